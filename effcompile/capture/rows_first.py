"""A captured step whose states are channels first, put in order: tokens are rows in it as they are elsewhere.

Models with a convolution turn (tokens, channels) around and back again. Linears among them hide as products
with a weight on the left, and a decay's table is computed for every call. What is computed stays the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import torch
from torch import fx

from effcompile.core.types import Args, Forward
from effcompile.ir.export import refresh_shapes
from effcompile.ir.program import Program, dtype_of, shape_of
from effcompile.ops.recurrence import short_conv, state_space

aten = torch.ops.aten


def rows_first(program: Program) -> Program:
    """The program with its tokens as rows throughout, where that is only a matter of order."""
    edited = program.editable("rows first")
    graph = edited.graph
    _one_mask(graph)
    changed = True
    while changed:
        changed = False
        for node in list(graph.nodes):
            made = next((new for rule in _RULES if (new := rule(graph, node)) is not None), None)
            if made is not None:
                node.replace_all_uses_with(made)
                graph.erase_node(node)
                changed = True
        graph.eliminate_dead_code()
    refresh_shapes(edited.module, edited.args, edited.kwargs)
    graph.lint()
    edited.module.recompile()
    return edited


def _swaps(node: object) -> fx.Node | None:
    """What a node turns around: tokens and channels of three axes."""
    if not isinstance(node, fx.Node) or node.target is not aten.transpose.int or len(shape_of(node)) != 3:
        return None
    source, *axes = node.args
    return source if isinstance(source, fx.Node) and {int(str(axis)) % 3 for axis in axes} == {1, 2} else None


def _call(graph: fx.Graph, at: fx.Node, target: Forward, args: Args, like: fx.Node) -> fx.Node:
    """A new call before a node, which belongs where another one does."""
    with graph.inserting_before(at):
        made = graph.call_function(target, args)
    made.meta = {name: value for name, value in like.meta.items() if name != "val"}
    return made


def _turned(graph: fx.Graph, at: fx.Node, source: fx.Node, shape_like: fx.Node) -> fx.Node:
    """A node turned around, in the place of one of that shape."""
    made = _call(graph, at, aten.transpose.int, (source, 1, 2), at)
    made.meta["val"] = shape_like.meta.get("val")
    return made


def _twice(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Turned around and back."""
    once = _swaps(node)
    return None if once is None else _swaps(once)


def _product(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """W xᵀ as a linear of x."""
    if node.target is not aten.matmul.default:
        return None
    weight, turned = node.args
    x = _swaps(turned)
    if x is None or not isinstance(weight, fx.Node) or weight.op != "get_attr" or len(shape_of(weight)) != 2:
        return None
    made = _call(graph, node, aten.linear.default, (x, weight), node)
    made.meta["val"] = node.meta["val"].transpose(1, 2).contiguous()
    return _turned(graph, node, made, node)


def _bias(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A row that is added to a linear's result, as its bias."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    linear, row = node.args
    fits = (
        isinstance(linear, fx.Node)
        and linear.target is aten.linear.default
        and len(linear.args) == 2
        and len(linear.users) == 1
        and isinstance(row, fx.Node)
        and row.op == "get_attr"
        and shape_of(row) == shape_of(linear)[-1:]
        and dtype_of(row) == dtype_of(linear)
    )
    if not fits:
        return None
    assert isinstance(linear, fx.Node)
    made = _call(graph, node, aten.linear.default, (*linear.args, row), linear)
    made.meta["val"] = node.meta.get("val")
    return made


def _part(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A part of channels that was turned around, turned back: the part of rows."""
    item = _swaps(node)
    if item is None or item.target is not operator.getitem:
        return None
    split, at = item.args
    if not isinstance(split, fx.Node) or split.target not in _SPLITS or split.args[2:] != (1,):
        return None
    rows = _swaps(split.args[0])
    if rows is None:
        return None
    again = next(
        (
            user
            for user in rows.users
            if user.target is split.target and user.args == (rows, split.args[1], 2)
        ),
        None,
    )
    if again is None:
        again = _call(graph, split, split.target, (rows, split.args[1], 2), split)
    made = _call(graph, node, operator.getitem, (again, at), item)
    made.meta["val"] = node.meta.get("val")
    return made


_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def _all_tokens(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The last tokens of a convolution, which are all that it has."""
    if node.target is not aten.slice.Tensor or len(node.args) > 3:
        return None
    turned, axis, start = node.args
    item = _swaps(turned)
    conv = None if item is None or item.target is not operator.getitem else item.args[0]
    counted = isinstance(start, fx.Node) and start.target is operator.neg
    of_conv = isinstance(conv, fx.Node) and conv.target is short_conv.default
    return turned if axis == 2 and counted and of_conv else None  # type: ignore[return-value]


def _silu(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Both gates of one product, where one of them was turned around: the product of what was not."""
    if node.target is not aten.mul.Tensor or node.kwargs:
        return None
    first, second = node.args
    one = _swaps(first)
    if one is None or not isinstance(second, fx.Node) or second.target is not aten.silu.default:
        return None
    inner = second.args[0]
    gate = _call(graph, node, aten.transpose.int, (inner, 1, 2), second)
    gate.meta["val"] = inner.meta["val"].transpose(1, 2)  # type: ignore[union-attr]
    opened = _call(graph, node, aten.silu.default, (gate,), second)
    opened.meta["val"] = gate.meta["val"]
    made = _call(graph, node, aten.mul.Tensor, (one, opened), node)
    made.meta["val"] = one.meta.get("val")
    return _turned(graph, node, made, node)


def _decay(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """−exp of a table of weights, as logarithms that the recurrence takes itself."""
    if node.target is not state_space.default or len(node.args) > 7:
        return None
    table = node.args[2]
    column = isinstance(table, fx.Node) and table.target is aten.unsqueeze.default
    negative = table.args[0] if column else table  # type: ignore[union-attr]
    if not isinstance(negative, fx.Node) or negative.target is not aten.neg.default:
        return None
    exponential = negative.args[0]
    if not isinstance(exponential, fx.Node) or exponential.target is not aten.exp.default:
        return None
    logs = exponential.args[0]
    if column:
        logs = _call(graph, node, aten.unsqueeze.default, (logs, table.args[1]), negative)  # type: ignore[union-attr]
    made = _call(graph, node, state_space.default, (*node.args[:2], logs, *node.args[3:], True), node)
    made.meta["val"] = node.meta.get("val")
    return made


_RULES: tuple[Callable[[fx.Graph, fx.Node], fx.Node | None], ...] = (
    _twice, _product, _bias, _part, _all_tokens, _silu, _decay,
)  # fmt: skip


def _one_mask(graph: fx.Graph) -> None:
    """Whole numbers that hide rows, as numbers of the rows' dtype that are made once."""
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        for column, rows, mask in _hidden(node):
            dtype = dtype_of(rows)
            if dtype is None:
                continue
            if (mask, dtype) not in made:
                with graph.inserting_after(column):
                    wide = graph.call_function(aten._to_copy.default, (column,), {"dtype": dtype})
                wide.meta = dict(column.meta)
                wide.meta["val"] = column.meta["val"].to(dtype)
                made[mask, dtype] = wide
            node.replace_input_with(column, made[mask, dtype])


def _hidden(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """(column of the mask, rows, mask) of a product that hides rows."""
    if node.target is aten.mul.Tensor and not node.kwargs:
        rows, column = node.args
        if isinstance(column, fx.Node) and column.target is aten.unsqueeze.default:
            mask = column.args[0]
            if isinstance(rows, fx.Node) and isinstance(mask, fx.Node) and dtype_of(mask) == torch.int64:
                yield column, rows, mask
