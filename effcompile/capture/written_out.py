"""Activations that a model writes out, as the operators that they are: GELU's tanh form (GPT-2's
`NewGELUActivation`, eight operators over the widest values of a layer), GELU and SiLU.

What lies between a tanh, an erf or a sigmoid, the value that it is of and their product is evaluated in fp64
and compared with what it may be: so it is found however it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch.nn import functional as F  # noqa: N812

from effcompile.ir.program import dtype_of, shape_of

__all__ = ["as_operators"]

aten = torch.ops.aten

_HEARTS = (aten.tanh.default, aten.erf.default, aten.sigmoid.default)
_AROUND = (
    aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar,
    aten.neg.default, aten.square.default, aten.mul.Scalar, aten.add.Scalar, aten.rsub.Scalar,
)  # fmt: skip
#: What may be meant, with its arguments beside x.
_KNOWN: tuple[tuple[Callable[..., object], dict[str, fx.node.Argument], Callable[[Tensor], Tensor]], ...] = (
    (aten.gelu.default, {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
    (aten.gelu.default, {}, F.gelu),
    (aten.silu.default, {}, F.silu),
)
#: Values at which they are compared, and how far they may lie apart, of the larger of 1 and the value: about
#: what fp32 rounds, and more than digits that a constant lacks.
_LEAST, _MOST, _POINTS, _APART = -12.0, 12.0, 241, 1e-7
#: Operators that one is written out in, at most.
_LONGEST = 12


def as_operators(graph: fx.Graph) -> None:
    """Put each in the place of its last operator, and drop what only that read."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    changed = False
    for heart in [node for node in graph.nodes if node.target in _HEARTS]:
        for end in _ends(heart):
            inside, x = _function(end, heart, order)
            if x is None or dtype_of(x) not in (torch.float32, torch.float64):
                continue
            if (meant := _meant(inside, x)) is not None:
                target, others = meant
                with graph.inserting_before(end):
                    node = graph.call_function(target, (x,), others)
                node.meta, order[node] = dict(end.meta), order[end]
                end.replace_all_uses_with(node)
                changed = True
                break
    if changed:
        graph.eliminate_dead_code()


def _ends(heart: fx.Node) -> list[fx.Node]:
    """Products of it with another value, as far as one operator alone reads the one before, the longest
    first.
    """
    node, ends, joined = heart, list[fx.Node](), False
    while len(ends) < _LONGEST and len(node.users) == 1:
        (node,) = node.users
        if node.target not in _AROUND:
            break
        joined = joined or len(node.all_input_nodes) == 2
        ends += [node] * joined
    return ends[::-1]


def _function(
    end: fx.Node, heart: fx.Node, order: dict[fx.Node, int]
) -> tuple[list[fx.Node], fx.Node | None]:
    """The operators that make it of one value, in order, and that value, the nearest; None where there is
    none near it.
    """
    inside, ahead = list[fx.Node](), {end}
    while ahead and len(inside) < _LONGEST:
        last = max(ahead, key=order.__getitem__)
        if len(ahead) == 1 and heart in inside:
            return inside[::-1], last
        if last.target not in (*_AROUND, *_HEARTS) or shape_of(last) != shape_of(end):
            break
        inside.append(last)
        ahead = {*ahead, *last.all_input_nodes} - {last}
    return inside, None


def _meant(
    nodes: Sequence[fx.Node], x: fx.Node
) -> tuple[Callable[..., object], dict[str, fx.node.Argument]] | None:
    """Which of the known ones these compute."""
    at = torch.linspace(_LEAST, _MOST, _POINTS, dtype=torch.float64, device="cpu")
    values: dict[fx.Node, Tensor] = {x: at}
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    made, room = values[nodes[-1]], _APART * at.abs().clamp(min=1.0)
    alike = (known for known in _KNOWN if bool(((made - known[2](at)).abs() <= room).all()))
    return next(((target, dict(others)) for target, others, _ in alike), None)
