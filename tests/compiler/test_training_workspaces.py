"""What operators of a step need for themselves, on machines that are not here."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from effcompile.machine.machines import load_target
from effcompile.search.training.operator_costs import OperatorCosts


@pytest.mark.parametrize(("target", "dtype", "margin"), [
    ("cpu-generic", torch.bfloat16, True), ("cpu-generic", torch.float32, False),
    ("h200", torch.bfloat16, False),
])  # fmt: skip
def test_a_margin_is_counted_for_16_bit_products_of_a_cpu_that_is_not_here(
    target: str, dtype: torch.dtype, margin: bool
) -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"], b.meta["val"] = (
        torch.empty(64, 32, dtype=dtype, device="meta"),
        torch.empty(32, 128, dtype=dtype, device="meta"),
    )
    node = graph.call_function(torch.ops.aten.mm.default, (a, b))
    node.meta["val"] = torch.empty(64, 128, dtype=dtype, device="meta")
    found = OperatorCosts(target=load_target(target), here=False).workspace(node, 7)
    assert found > 4 * 64 * 128 if margin else found == 7
