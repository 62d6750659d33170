"""Gradients of a 16-bit step's attentions by tiles: the same step; only where they are faster, and here."""

from __future__ import annotations

import pytest
import torch
from step_helpers import assert_equal, eager, joint_step, run
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from train_helpers import context

from effcompile.ops.bf16_attention_backward import kernels
from effcompile.ops.torch_attention import BACKWARD
from effcompile.passes.training import tiled
from effcompile.passes.training.base import Case
from effcompile.passes.training.tiled import KIND, TILES, TiledGradients

ours = torch.ops.effcompile.bf16_attention_backward.default


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(32, 96, dtype=dtype), causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 16)).transpose(1, 2) for each in self.qkv(x).split(32, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal and mask is None)
        return y.float().square().mean()


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)


@pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
@pytest.mark.parametrize(
    ("dtype", "share", "here"),
    [
        (torch.bfloat16, 0.3, True),
        (torch.bfloat16, 1.2, True),
        (torch.bfloat16, 0.3, False),
        (torch.float32, 0.3, True),
    ],
)
def test_they_are_by_tiles_where_that_is_faster(
    dtype: torch.dtype, share: float, here: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "time_share", lambda queries, keys, width: share)
    torch.manual_seed(0)
    model, batch = Net(dtype, causal=kind == "causal"), {"x": torch.randn(3, 20, 32, dtype=dtype)}
    if kind == "mask":
        unseen = torch.rand(3, 1, 20, 20) < 0.3
        batch["mask"] = torch.zeros(3, 1, 20, 20, dtype=dtype).masked_fill(unseen, -1e4)
    step = joint_step(model, batch, loss_of)
    choices = list(TiledGradients().propose(Case(step=step), context(here=here)))
    if dtype is torch.float32 or share > 1 or not here:
        assert not choices
        return
    (choice,) = choices
    made = TiledGradients().apply(Case(step=step), choice, choice.option(TILES)).step
    targets = [node.target for node in made.graph.nodes]
    assert choice.kind == KIND and targets.count(ours) == 1 and BACKWARD.default not in targets
    assert_equal(run(made, model, batch), eager(model, batch, loss=loss_of), 2e-2)
    assert not list(TiledGradients(enabled=False).propose(Case(step=step), context(here=True)))
