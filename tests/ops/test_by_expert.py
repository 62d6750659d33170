"""Products of tokens in groups by expert, as an operator: numbers, gradients and shapes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, fx

from effcompile.ops import by_expert as module


def one_by_one(rows: Tensor, matrices: Tensor, starts: list[int]) -> Tensor:
    return torch.cat([rows[a:b] @ matrices[e] for e, (a, b) in enumerate(pairwise(starts))])


@pytest.mark.parametrize("starts", [[0, 0, 1, 3], [0, 20, 20, 30]])
def test_numbers_and_gradients_are_those_of_products_one_by_one(starts: list[int]) -> None:
    """The cache's errors are followed through them: a gradient that is left out would be an error of none."""
    rows, held = torch.randn(starts[-1], 6), torch.randn(3, 5, 6)
    ends, found = torch.tensor(starts[1:]), []
    for product in (
        lambda r, m: torch.ops.effcompile.by_expert(r, m, ends),
        lambda r, m: one_by_one(r, m, starts),
    ):
        r, m = rows.clone().requires_grad_(), held.clone().requires_grad_()
        made = product(r, m.transpose(1, 2))
        found.append((made, *torch.autograd.grad(made.square().sum(), (r, m))))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_its_shape_is_known_without_numbers() -> None:
    made = torch.ops.effcompile.by_expert(*(torch.empty(s, device="meta") for s in ((7, 6), (3, 6, 5), (3,))))
    assert made.shape == (7, 5)


def test_theirs_becomes_ours() -> None:
    pytest.importorskip("transformers.integrations.moe")
    graph = fx.Graph()
    given = tuple(graph.placeholder(name) for name in "xwe")
    theirs = torch.ops.transformers.grouped_mm_fallback.default
    graph.output(graph.call_function(theirs, given))
    module.as_ours(graph)
    rows, matrices, ends = torch.randn(5, 4), torch.randn(2, 4, 3), torch.tensor([2, 5])
    run = fx.GraphModule({}, graph)
    assert not [node for node in graph.nodes if "transformers" in str(node.target)]
    torch.testing.assert_close(run(rows, matrices, ends), theirs(rows, matrices, ends))
