"""tanh by the logistic function in fused kernels: torch's in float64, and which are left as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from effcompile.ops.fused import Fused, TileLayout
from effcompile.ops.tanh_by_sigmoid import by_sigmoid

aten = torch.ops.aten


def gelu(x: Tensor) -> tuple[Tensor, ...]:
    return (0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3.0)))),)


def gelu_gradient(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    tanh = torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3.0)))
    inner = aten.tanh_backward.default(g * 0.5 * x, tanh) * 0.79788456
    return (g * 0.5 * (1.0 + tanh) + inner * (1.0 + 0.134145 * torch.pow(x, 2.0)),)


def traced(function: Callable[..., tuple[Tensor, ...]], *args: Tensor) -> fx.Graph:
    return make_fx(function)(*args).graph


def targets(graph: fx.Graph) -> set[object]:
    return {node.target for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("function", [gelu, gelu_gradient])
def test_a_gelu_and_its_gradient_are_as_near_to_double(
    function: Callable[..., tuple[Tensor, ...]], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(200) * 3, torch.linspace(-1e-3, 1e-3, 40), torch.tensor([0.0, -60, 60, 1e4])])
    args = tuple(t.to(dtype) for t in (x, torch.randn(len(x)))[: function.__code__.co_argcount])
    layouts = [TileLayout.of(arg) for arg in args]
    graph = traced(function, *args)
    assert aten.tanh.default in targets(graph) and aten.tanh.default not in targets(by_sigmoid(graph))
    kernel = Fused(graph, layouts, layouts[:1])
    found = kernel(*args)
    assert kernel.fallback_reason is None and isinstance(found, Tensor)
    (right,) = function(*(arg.double() for arg in args))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-13}[dtype]
    assert torch.allclose(found.double(), right, tolerance, tolerance)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_what_it_was(value: float) -> None:
    x = torch.full((32,), value)
    graph = traced(lambda x: (torch.tanh(x) + 1.0,), x)
    (found,) = fx.GraphModule(torch.nn.Module(), by_sigmoid(graph))(x)
    assert torch.equal(found.nan_to_num(7.0), (torch.tanh(x) + 1.0).nan_to_num(7.0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (torch.tanh(x),),
        lambda x: (torch.tanh(x) * x,),
        lambda x: (torch.tanh(x) + x,),
        lambda x: ((tanh := torch.tanh(x)) + 1.0, tanh),
        lambda x: (torch.tanh(x) + 2.0,),
        lambda x: (torch.add(torch.tanh(x), 1.0, alpha=3),),
        lambda x: (aten.tanh_backward.default(torch.tanh(x), x),),
    ],
)
def test_a_tanh_that_is_read_by_itself_is_left(function: Callable[..., tuple[Tensor, ...]]) -> None:
    graph = traced(function, torch.randn(8))
    assert by_sigmoid(graph) is graph
