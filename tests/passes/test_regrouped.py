"""Rows that a mixture sorts by expert and puts back: seen as such, and nothing that only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.integrations import moe

from effcompile.passes.training.regrouped import regrouped

TOKENS, EACH, EXPERTS, WIDTH = 6, 2, 3, 4
assert moe.grouped_mm_experts_forward  # it brings the product of runs of rows
Grouped = Callable[[Tensor, Tensor, Tensor], Tensor]


def seen(by_expert: Grouped) -> list[str]:
    """Of a function of (x (N, d), expert of each of the N·k pairs, weights) the sorts and counts that are
    none of the whole batch's.
    """
    graphs = []
    for tokens in (2 * TOKENS, TOKENS):
        given = (
            torch.randn(tokens, WIDTH),
            torch.arange(tokens * EACH) % EXPERTS,
            torch.randn(EXPERTS, WIDTH, WIDTH),
        )
        graphs.append(list(make_fx(torch.func.functionalize(by_expert))(*given).graph.nodes)[:-1])
    grown = {a: axes for a, b in zip(*graphs, strict=True) if (axes := axes_of(a, b))}
    return [node.target.name() for node in regrouped(graphs[0], grown)]


def axes_of(a: fx.Node, b: fx.Node) -> set[int]:
    """Where the larger of two values is larger."""
    first, second = (
        node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
        for node in (a, b)
    )
    pairs = zip(first, second, strict=True)
    return {i for x, y in pairs for i, (m, n) in enumerate(zip(x.shape, y.shape, strict=True)) if m != n}


def put_back(rows: Tensor, place: Tensor) -> Tensor:
    back = torch.empty_like(place)
    back[place] = torch.arange(len(place))
    return rows[back]


def mixture(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """As HuggingFace's: a product for each run of rows, and a bias by each row's expert."""
    ordered, place = torch.sort(experts)
    ends = torch.histc(ordered.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0).to(torch.int32)
    rows = torch.ops.transformers.grouped_mm_fallback(x[place // EACH], weights, ends) + weights[ordered, 0]
    return put_back(torch.nn.functional.silu(rows), place).view(len(x), EACH, -1).sum(1)


def simply(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Sorted and put back, nothing counted."""
    place = torch.sort(experts).indices
    return put_back(2 * x[place // EACH], place)


def left_sorted(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    return 2 * x[torch.sort(experts).indices // EACH]


def by_another_place(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Row i // 4 of half as many."""
    place = torch.sort(experts).indices
    return put_back(x[place // (2 * EACH)], place)


def beside_the_batch(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Each row in sorted order beside another one in the batch's."""
    place = torch.sort(experts).indices
    return put_back(x[place // EACH] * x.repeat_interleave(EACH, 0), place)


def by_counts(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """How many rows an expert has is read by the rows."""
    ordered, place = torch.sort(experts)
    load = torch.histc(ordered.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    return put_back(x[place // EACH] * load.max(), place)


def by_other_ends(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Runs end where the counts of other experts say."""
    ordered, place = torch.sort(experts)
    ends = torch.histc(ordered.float(), bins=EXPERTS, min=1, max=EXPERTS).cumsum(0).to(torch.int32)
    return put_back(torch.ops.transformers.grouped_mm_fallback(x[place // EACH], weights, ends), place)


def test_rows_that_are_put_back_are_seen() -> None:
    assert seen(simply) == ["aten::sort"]
    assert seen(mixture) == ["aten::sort", "aten::histc", "aten::cumsum", "aten::_to_copy"]


@pytest.mark.parametrize("other", [left_sorted, by_another_place, beside_the_batch, by_counts, by_other_ends])
def test_what_depends_on_the_batch_is_not(other: Grouped) -> None:
    assert seen(other) == []
