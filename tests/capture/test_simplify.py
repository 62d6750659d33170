"""What changes nothing is gone from masks and positions, to the bit; what looks like it stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from effcompile.capture import cleanup
from effcompile.capture.simplify import simplify

aten = torch.ops.aten
Function = Callable[[Tensor], Tensor]


class Around(nn.Module):
    """A function of a mask (batch, seq), behind a sum, so that no caller receives what it returns."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, mask: Tensor) -> Tensor:
        return self.function(mask).to(torch.float32) * 2


def _axes(mask: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(mask.shape[0])[:, None, None, None], torch.arange(mask.shape[1])[None, None, None]


def _transformers(mask: Tensor) -> Tensor:
    """As masking_utils.py makes a padding's."""
    batch, keys = _axes(mask)
    queries = torch.arange(mask.shape[1])[None, None, :, None] + 0
    seen = queries.new_ones((), dtype=torch.bool) & (queries >= 0) & mask.bool()[batch, keys]
    return seen.expand(mask.shape[0], -1, mask.shape[1], mask.shape[1])


def _causal(mask: Tensor) -> Tensor:
    batch, keys = _axes(mask)
    queries = torch.arange(mask.shape[1])[None, None, :, None]
    return ((keys <= queries) & mask.bool()[batch, keys]).expand(mask.shape[0], 3, -1, -1)


def _simplified(function: Function) -> tuple[fx.GraphModule, fx.GraphModule]:
    batch, seq = torch.export.Dim("batch", min=2), torch.export.Dim("seq", min=2)
    exported = torch.export.export(
        Around(function), (torch.ones(3, 5, dtype=torch.int64),), dynamic_shapes=({0: batch, 1: seq},)
    )
    before = exported.module(check_guards=False)
    after = exported.module(check_guards=False)
    for module in (before, after):
        cleanup.drop_asserts(module.graph)
        cleanup.drop_copies(module.graph)
        cleanup.compute_once(module.graph)
    simplify(after.graph)
    after.graph.lint()
    after.recompile()
    return before, after


def _calls(module: fx.GraphModule) -> set[object]:
    return {node.target for node in module.graph.nodes if node.op == "call_function"}


def _equal(before: fx.GraphModule, after: fx.GraphModule) -> None:
    for batch, seq in ((3, 5), (2, 9), (7, 7), (4, 2)):
        mask = torch.randint(0, 2, (batch, seq))
        wanted, made = before(mask), after(mask)
        assert made.shape == wanted.shape and torch.equal(made, wanted)


@pytest.mark.parametrize(
    ("function", "gone"),
    [
        (_transformers, {aten.index.Tensor, aten.arange.default, aten.ge.Scalar, aten.add.Tensor}),
        (_causal, {aten.index.Tensor}),
        (lambda mask: mask + 0, {aten.add.Tensor}),
        (lambda mask: mask.bool() & torch.ones_like(mask, dtype=torch.bool), {aten.ones_like.default}),
        (lambda mask: mask[torch.arange(mask.shape[0])[:, None], torch.arange(mask.shape[1])],
         {aten.index.Tensor}),
        (lambda mask: (mask * 2).type_as(mask) + 1, {aten.type_as.default}),
    ],
)  # fmt: skip
def test_is_gone_and_nothing_changes(function: Function, gone: set[object]) -> None:
    before, after = _simplified(function)
    assert gone <= _calls(before) and not gone & _calls(after)
    _equal(before, after)


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        # the other order: a transpose
        (lambda mask: mask[torch.arange(mask.shape[0])[None], torch.arange(mask.shape[1])[:, None]],
         aten.index.Tensor),
        # some of a row
        (lambda mask: mask[torch.arange(2)[:, None], torch.arange(mask.shape[1])[None]], aten.index.Tensor),
        # another first row
        (lambda mask: mask[torch.arange(-1, mask.shape[0] - 1)[:, None], torch.arange(mask.shape[1])],
         aten.index.Tensor),
        # the sum turns -0.0 into 0.0, and ints into floats
        (lambda mask: (mask * -0.0 + 0).sign(), aten.add.Tensor),
        (lambda mask: mask + 0.0, aten.add.Tensor),
        # not everywhere true
        (lambda mask: mask.bool() & (torch.arange(mask.shape[1]) >= 1), aten.ge.Scalar),
        (lambda mask: mask.bool() & (torch.arange(-1, mask.shape[1] - 1) >= 0), aten.ge.Scalar),
        (lambda mask: mask & torch.ones_like(mask), aten.ones_like.default),
        (lambda mask: mask.bool()[:1] & torch.ones_like(mask, dtype=torch.bool), aten.ones_like.default),
        (lambda mask: mask.type_as(torch.ones(2, dtype=torch.int32)) * 3, aten.type_as.default),
        # what expands it leaves the size to it
        (lambda mask: (mask.bool()[:, :1] & torch.ones_like(mask, dtype=torch.bool)).expand(4, -1, -1),
         aten.ones_like.default),
    ],
)  # fmt: skip
def test_what_changes_something_stays(function: Function, kept: object) -> None:
    before, after = _simplified(function)
    assert kept in _calls(before) and kept in _calls(after)
    _equal(before, after)


def test_what_a_caller_receives_is_its_own() -> None:
    class Returns(nn.Module):
        def forward(self, mask: Tensor) -> Tensor:
            return mask + 0

    module = torch.export.export(Returns(), (torch.ones(3, 5, dtype=torch.int64),)).module(check_guards=False)
    simplify(module.graph)
    module.recompile()
    given = torch.ones(3, 5, dtype=torch.int64)
    assert module(given).data_ptr() != given.data_ptr()
