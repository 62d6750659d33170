"""Inputs of models of diffusers, which need not be installed: modules of its kind, with its names."""

from __future__ import annotations

import torch
from torch import nn

from effcompile.loader.derive import derive
from effcompile.loader.source import Reading


class Packed(nn.Module):
    """As Flux: a row of pixels, with the place of each."""

    __module__ = "diffusers.models.transformers.transformer_flux"

    def __init__(self, **config: object) -> None:
        super().__init__()
        self.config, self.linear = {"in_channels": 4, **config}, nn.Linear(4, 4)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        pooled_projections: torch.Tensor | None = None,
        timestep: torch.Tensor | None = None,
        img_ids: torch.Tensor | None = None,
        txt_ids: torch.Tensor | None = None,
        guidance: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.linear(hidden_states)


class Conditioned(nn.Module):
    """As SDXL's UNet: what belongs to a text stands in a dictionary beside it."""

    __module__ = "diffusers.models.unets.unet_2d_condition"

    def __init__(self, **config: object) -> None:
        super().__init__()
        self.config, self.conv = {"in_channels": 4, "sample_size": 16, **config}, nn.Conv2d(4, 4, 1)

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        added_cond_kwargs: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        return self.conv(sample)


def test_a_row_of_pixels_comes_with_their_places() -> None:
    settings = {"joint_attention_dim": 32, "pooled_projection_dim": 24, "axes_dims_rope": (4, 4, 8)}
    given = derive(Packed(**settings), Reading(shape=(2, 8)), "model.py").kwargs
    assert {name: tuple(value.shape) for name, value in given.items()} == {
        "hidden_states": (2, 16, 4), "timestep": (2,), "encoder_hidden_states": (2, 77, 32),
        "img_ids": (16, 3), "txt_ids": (77, 3), "pooled_projections": (2, 24),
    }  # fmt: skip
    assert given["img_ids"][:, 1:].tolist() == [[row, column] for row in range(4) for column in range(4)]
    guided = derive(Packed(**settings, guidance_embeds=True), Reading(), "model.py").kwargs
    assert guided["guidance"].tolist() == [3.5]


def test_what_an_image_is_conditioned_by_is_told_by_name() -> None:
    settings = {
        "cross_attention_dim": 32, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    }  # fmt: skip
    made = derive(Conditioned(**settings), Reading(), "model.py")
    conditions = made.kwargs["added_cond_kwargs"]
    assert conditions["text_embeds"].shape == (1, 32)
    assert conditions["time_ids"].tolist() == [[128, 128, 0, 0, 128, 128]]
    assert "added_cond_kwargs.text_embeds [1 × 32] float32" in str(made.notes[0])
    plain = derive(Conditioned(cross_attention_dim=32), Reading(), "model.py").kwargs
    assert "added_cond_kwargs" not in plain


def test_a_text_is_as_wide_as_its_captions() -> None:
    model = Conditioned(cross_attention_dim=32, caption_channels=24)
    assert derive(model, Reading(), "model.py").kwargs["encoder_hidden_states"].shape == (1, 77, 24)
