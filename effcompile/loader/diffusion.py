"""Example inputs of a model of diffusers: a noisy sample, its time step, and what it is conditioned by."""

from __future__ import annotations

import torch

from effcompile.core.types import Value
from effcompile.loader.figures import ModelSizes

#: Tokens of a text, as CLIP has them; sides of an image, in the pixels of its latent.
_TOKENS, _SIDE = 77, 64
#: What the width of a text's states is called, the more special first.
_WIDTHS = ("caption_channels", "joint_attention_dim", "cross_attention_dim")
#: What SDXL is told of an image: its size, its crop, and the size that is asked for.
_TIME_IDS = 6


def diffusion(figures: ModelSizes) -> dict[str, Value] | None:
    """Of a UNet or diffusion transformer of diffusers; None of other models."""
    sample = next((name for name in ("sample", "hidden_states") if name in figures.parameters), None)
    if not type(figures.model).__module__.startswith("diffusers.") or sample is None:
        return None
    made: dict[str, Value] = {sample: _sample(figures)}
    packed = "img_ids" in figures.parameters
    if "timestep" in figures.parameters:
        made["timestep"] = (
            torch.full((figures.batch,), 0.5, dtype=figures.dtype)
            if packed
            else torch.full((figures.batch,), 500)
        )
    width = figures.number(_WIDTHS)
    if "encoder_hidden_states" in figures.parameters and width:
        made["encoder_hidden_states"] = figures.floats(figures.batch, _TOKENS, width)
    if packed:
        axes = figures.config.get("axes_dims_rope") or (0, 0, 0)
        made |= _places(made[sample].shape[1], len(axes), figures.dtype)
    if "pooled_projections" in figures.parameters and (width := figures.number(("pooled_projection_dim",))):
        made["pooled_projections"] = figures.floats(figures.batch, width)
    if "guidance" in figures.parameters and figures.config.get("guidance_embeds"):
        made["guidance"] = torch.full((figures.batch,), 3.5, dtype=figures.dtype)
    if "class_labels" in figures.parameters and (classes := figures.number(("num_embeds_ada_norm",))):
        made["class_labels"] = figures.ids(classes, (figures.batch,))
    if "added_cond_kwargs" in figures.parameters and (conditions := _conditions(figures)):
        made["added_cond_kwargs"] = conditions
    return made


def _sample(figures: ModelSizes) -> torch.Tensor:
    """[batch, channels, height, width]; where places of pixels are given beside it a row of them, [batch,
    pixels, channels], as Flux takes it.
    """
    size = figures.sizes() or (_SIDE, _SIDE)
    if "img_ids" in figures.parameters:
        return figures.floats(figures.batch, (size[0] // 2) * (size[1] // 2), figures.channels())
    return figures.floats(figures.batch, figures.channels(), *size)


def _places(pixels: int, axes: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Row and column of each pixel, and no place of each token."""
    at, wide = torch.arange(pixels), int(pixels**0.5)
    places = torch.zeros(pixels, axes, dtype=dtype)
    places[:, 1], places[:, 2] = (at // wide).to(dtype), (at % wide).to(dtype)
    return {"img_ids": places, "txt_ids": torch.zeros(_TOKENS, axes, dtype=dtype)}


def _conditions(figures: ModelSizes) -> dict[str, torch.Tensor]:
    """What SDXL takes beside the text's states: the text as one row, and sizes."""
    each, whole = (
        figures.number((name,))
        for name in ("addition_time_embed_dim", "projection_class_embeddings_input_dim")
    )
    if figures.config.get("addition_embed_type") != "text_time" or whole <= _TIME_IDS * each:
        return {}
    size = float(8 * (figures.sizes() or (_SIDE,))[0])  # of the image, of which a latent's side is an eighth
    ids = torch.tensor([size, size, 0.0, 0.0, size, size], dtype=figures.dtype)
    text = figures.floats(figures.batch, whole - _TIME_IDS * each)
    return {"text_embeds": text, "time_ids": ids.expand(figures.batch, -1).contiguous()}
