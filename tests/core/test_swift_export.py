"""Exports that leave out what changes nothing give what torch's own give."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from effcompile.core import torch_compat_export as swift


class Views(nn.Module):
    """Calls every composite operator that torch takes apart and that is said to lead to none that stays whole."""

    def forward(self, x: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = x.chunk(2, -1)
        taken = x[1:, 0].unflatten(-1, (2, -1)).movedim(0, 1).swapaxes(0, 1).flatten(0, 1).T
        made = nn.functional.dropout(x, 0.5, training=False).to(torch.float64).to("cpu").contiguous().narrow(0, 0, 2)
        return (a * b).transpose(0, 1).reshape(-1), taken, made, like.view_as(x).reshape_as(x), a[..., :1].expand_as(a), *x.unbind(0)


class Counts(nn.Module):
    """Numbers of elements, of which torch may make a product of more than two factors."""

    def forward(self, x: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
        return x + like, x.numel(), x.shape[0] * 2


class Composite(nn.Module):
    """Composite operators that stay whole, among others that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bsd,btd->bst", self.layer(x), like)
        y.add_(1.0)
        return nn.functional.instance_norm(self.norm(x.transpose(1, 2))) @ y


@pytest.fixture(scope="module", params=[Views, Counts, Composite])
def exported(request: pytest.FixtureRequest) -> Iterator[torch.export.ExportedProgram]:
    x = torch.randn(3, 4, 8)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        free = dict.fromkeys(range(2), torch.export.Dim.AUTO) if request.param is Counts else None
        shapes = {"x": free, "like": free} if free else None
        yield torch.export.export(request.param().eval(), (x, torch.randn(3, 4, 8)), dynamic_shapes=shapes, strict=False)


def test_a_functional_graph_is_torchs_own(exported: torch.export.ExportedProgram) -> None:
    torchs, ours = exported.run_decompositions({}), swift.functional(exported)
    assert [str(node) for node in torchs.graph.nodes] == [str(node) for node in ours.graph.nodes]
    assert [len(node.args) for node in torchs.graph.nodes] == [len(node.args) for node in ours.graph.nodes]
    assert [node.target for node in torchs.graph.nodes if node.op == "call_function"] == [
        node.target for node in ours.graph.nodes if node.op == "call_function"
    ]
    assert "_collect_all_valid_cia_ops" in vars(swift._module("torch.export.exported_program"))  # put back, or never there


def test_views_are_taken_apart_the_short_way() -> None:
    """Else the test above compares torch's way with itself."""
    with torch.no_grad():
        short = torch.export.export(Views().eval(), (torch.randn(3, 4, 8), torch.randn(3, 4, 8)), strict=False)
    called = [node.target for node in short.graph.nodes if node.op == "call_function"]
    assert swift._INTO_PLAIN & set(called) and not any(swift._may_lead_elsewhere(target) for target in called)


@pytest.mark.parametrize("operator", [torch.ops.aten.batch_norm.default, torch.ops.aten.feature_dropout.default])
def test_what_may_lead_to_others_goes_torchs_way(operator: torch._ops.OpOverload) -> None:
    assert swift._may_lead_elsewhere(operator)
