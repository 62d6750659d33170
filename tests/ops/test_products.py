"""What products allocate for themselves: as the allocator says on this machine, and a margin that covers it
for others.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import fx

from effcompile.ops import products
from effcompile.ops.products import Product

SIZES = st.integers(1, 200)


def traced(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> int:
    """The highest running sum of what the profiler saw the allocator give out in a second call."""
    torch.mm(a, b, out=out)
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.mm(a, b, out=out)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("turned", [False, True])
def test_what_is_measured_is_the_trace_of_the_very_product(dtype: torch.dtype, turned: bool) -> None:
    a, b, out = (
        torch.randn(96, 8).to(dtype),
        torch.randn(8, 5003).to(dtype),
        torch.empty(96, 5003, dtype=dtype),
    )
    if turned:
        b = b.t().contiguous().t()
    product = Product.of(a, b, out, device="cpu")
    assert products.measured(product) == traced(a, b, out)
    assert products.measured(product) <= products.bounded(product) or dtype == torch.float32


@settings(max_examples=40, deadline=None)
@given(
    m=SIZES,
    k=SIZES,
    n=SIZES,
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    accumulate=st.booleans(),
)
# operands in fp16 that are copied in fp32: 1,016,528 bytes with AVX512-FP16
@example(m=179, k=1087, n=12, dtype=torch.float16, accumulate=False)
@example(m=9, k=1092, n=5, dtype=torch.float16, accumulate=True)
def test_the_margin_for_other_machines_covers_this_one(
    m: int, k: int, n: int, dtype: torch.dtype, accumulate: bool
) -> None:
    a, b, out = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((m, k), (k, n), (m, n)))
    product = Product.of(a, b, out, device="cpu", accumulate=accumulate)
    assert products.measured(product) <= products.bounded(product)


def test_the_margin_covers_what_was_seen_with_tiles() -> None:
    """AMX: the second operand of 50257 x 8 padded to 32, 3.2 MB."""
    a, b, out = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((96, 8), (8, 50257), (96, 50257))
    )
    assert products.bounded(Product.of(a, b, out, device="cpu")) > 2 * 32 * 50257


def test_products_are_found_in_graphs_and_nothing_else() -> None:
    graph = fx.Graph()
    x, w, bias = (graph.placeholder(name) for name in ("x", "w", "bias"))
    for node, shape in ((x, (3, 4)), (w, (4, 5)), (bias, (5,))):
        node.meta["val"] = torch.empty(shape)
    linear = graph.call_function(torch.ops.aten.addmm.default, (bias, x, w))
    linear.meta["val"] = torch.empty(3, 5)
    other = graph.call_function(torch.ops.aten.relu.default, (linear,))
    other.meta["val"] = torch.empty(3, 5)
    (found,) = products.of_node(linear)
    assert (found.m, found.k, found.n, found.dtype) == (3, 4, 5, torch.float32)
    assert not [*products.of_node(other)] and products.bounded(found) == 0
