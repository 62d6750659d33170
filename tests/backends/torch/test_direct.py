"""What Python calls an operator by says the same of the same arguments, by place."""

import pytest
import torch
from torch import fx

from effcompile.backends.torch import direct as module

aten = torch.ops.aten
X, Y = (torch.arange(24.0).mul(step).sin().view(2, 3, 4) for step in (0.7, 0.3))
AT = torch.tensor([[[2, 0, 1, 1]], [[0, 2, 2, 1]]])
ARGUMENTS = {
    aten.view.default: (X, [6, 4]),
    aten.expand.default: (X[:1], [5, 3, 4]),
    aten.sym_size.int: (X, 1),
    aten.reshape.default: (X.mT, [4, 6]),
    aten.split_with_sizes.default: (X, [1, 3], 2),
    aten.transpose.int: (X, 0, 2),
    aten.permute.default: (X, [2, 0, 1]),
    aten.layer_norm.default: (X, [4], Y[0, 0], Y[1, 1], 1e-3),
    aten.unsqueeze.default: (X, -1),
    aten.cat.default: ([X, Y], 1),
    aten.matmul.default: (X, Y.mT),
    aten.where.self: (X > 0, X, Y),
    aten.embedding.default: (X[0], AT),
    aten.linear.default: (X, Y[0], Y[0, :, 0]),
    aten.pow.Tensor_Scalar: (X, 2),
    aten.mean.dim: (X, [-1], True),
    aten.sum.dim_IntList: (X, [0, 2], True),
    aten.cumsum.default: (X, 1),
    aten.softmax.int: (X, 1, torch.float64),
    aten.bmm.default: (X, Y.mT),
    aten.repeat.default: (X, [2, 1, 1, 3]),
    aten.select.int: (X, 1, -1),
    aten.gather.default: (X, 1, AT),
    aten.scatter.src: (X, 1, AT, Y),
    aten.topk.default: (X, 2, 1, False),
    aten.view_as_complex.default: (X.view(2, 3, 2, 2),),
    aten.view_as_real.default: (torch.complex(X, Y),),
}
UNARY = ("neg", "rsqrt", "exp", "tanh", "sigmoid", "cos", "sin", "clone")
ARGUMENTS |= {getattr(aten, name).default: (X.abs() + 0.1,) for name in UNARY}
ARGUMENTS |= {getattr(aten, name).Tensor: (X, Y[:, :1]) for name in ("add", "sub", "mul", "div", "le", "eq")}


def test_each_has_its_arguments_here() -> None:
    assert ARGUMENTS.keys() == module._SAME.keys()


@pytest.mark.parametrize("operator", list(ARGUMENTS), ids=str)
def test_python_s_own_function_gives_the_same(operator: object) -> None:
    graph, given = fx.Graph(), list[torch.Tensor]()

    def entered(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        given.append(value)
        return graph.placeholder(f"x{len(given)}")

    graph.output(graph.call_function(operator, fx.node.map_aggregate(ARGUMENTS[operator], entered)))
    wanted = fx.GraphModule({}, graph)(*given)
    changed = module.direct(fx.GraphModule({}, graph))
    [called] = [node for node in changed.graph.nodes if node.op == "call_function"]
    found = changed(*given)
    assert called.target is not operator
    alone = isinstance(wanted, (torch.Tensor, int))
    for one, other in [(found, wanted)] if alone else zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
