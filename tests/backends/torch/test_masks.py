"""A mask that is all ones in the example must still count at other shapes and with padding, in every form of
attention.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from effcompile.backends.torch import TorchEager, load
from effcompile.capture import capture
from effcompile.ir.formats import Form
from effcompile.ir.program import Program
from effcompile.sites.parts import attentions

WIDTH, HEADS = 16, 2


class Masked(nn.Module):
    """Two attentions under one padding mask: boolean, or 0 and -inf to be added."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = x.shape
        mask = attention_mask.bool()[:, None, None, :].expand(batch, 1, rows, rows)
        if self.kind == "added":
            mask = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
        for layer in (self.first, self.second):
            q, k, v = (part.view(batch, rows, HEADS, -1).transpose(1, 2) for part in layer(x).chunk(3, -1))
            heads = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + heads.transpose(1, 2).reshape(batch, rows, WIDTH)
        return x


def inputs_of(batch: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, rows, WIDTH, generator=torch.Generator().manual_seed(rows)), torch.ones(
        batch, rows, dtype=torch.long
    )


def captured(kind: str) -> tuple[nn.Module, Program]:
    torch.manual_seed(0)
    model = Masked(kind).eval()
    return model, capture(model, inputs_of(1, 8))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", ["boolean", "added"])
@pytest.mark.parametrize("forms", [("sdpa", "sdpa"), ("math", "math"), ("sdpa", "math")])
def test_padding_counts_at_any_shape(kind: str, forms: tuple[str, str]) -> None:
    model, program = captured(kind)
    sites = [site.site for site in attentions(program)]
    lowered = TorchEager().lower(
        program.tagged({site: Form(word=word) for site, word in zip(sites, forms, strict=True)}, "test"),
        None,
        [],
    )
    assert tuple(lowered.applied[site].word for site in sites) == forms
    for batch, rows in ((1, 8), (2, 5), (3, 13)):
        x, mask = inputs_of(batch, rows)
        with torch.no_grad():
            whole = model(x, mask)
            assert error(lowered(x, mask)[0], whole) <= 1e-6
            mask[0, :2] = 0
            padded = model(x, mask)
        assert error(padded, whole) > 1e-3  # else a lost mask would pass
        assert error(lowered(x, mask)[0], padded) <= 1e-6


def test_a_row_that_is_all_padding_is_as_in_the_model() -> None:
    model, program = captured("boolean")
    lowered = TorchEager().lower(
        program.tagged({site.site: Form(word="math") for site in attentions(program)}, "test"), None, []
    )
    x, mask = inputs_of(2, 6)
    mask[1] = 0
    with torch.no_grad():
        assert error(lowered(x, mask)[0], model(x, mask)) <= 1e-6


def test_the_mask_is_still_there_in_the_artifact(tmp_path) -> None:
    model, program = captured("boolean")
    lowered = TorchEager().lower(
        program.tagged({site.site: Form(word="math") for site in attentions(program)}, "test"), None, []
    )
    run = load(lowered.save(tmp_path)[0])
    x, mask = inputs_of(2, 6)
    mask[0, :3] = 0
    with torch.no_grad():
        assert error(run(x, mask), model(x, mask)) <= 1e-6
