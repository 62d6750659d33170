"""What a loop writes part by part (`output[:, t] = x`, RWKV), as its parts side by side.

A graph has no writes: of each torch.export makes a copy of the whole with one part replaced, so that a loop
over T parts copies T times the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from effcompile.core.torch_compat_export import known_equal
from effcompile.ir.owned import received

__all__ = ["side_by_side"]

aten = torch.ops.aten
_PUT = aten.select_scatter.default


@dataclass(frozen=True, slots=True)
class _Put:
    """A write of `part` at a place of an axis of what `base` is."""

    base: fx.Node
    part: fx.Node
    axis: int
    place: int


def side_by_side(graph: fx.Graph) -> None:
    """One `stack` for each chain of writes that leaves nothing of what was there before."""
    _drop_casts(graph)
    puts = {node: found for node in graph.nodes if (found := _put(node)) is not None}
    for node, put in puts.items():
        if any(not _goes_on(puts.get(user), node, put.axis) for user in node.users):
            parts = _parts(node, puts)
            if parts is not None:
                with graph.inserting_before(node):
                    made = graph.call_function(aten.stack.default, (parts, put.axis))
                made.meta = node.meta
                node.replace_all_uses_with(made)
    graph.eliminate_dead_code()


def _drop_casts(graph: fx.Graph) -> None:
    """Write what was computed, not what `copy` makes of it and of the part that was there, where that is the
    same.
    """
    theirs = received(graph)
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        into, source = node.args[:2]
        written = all(user.target is _PUT and user.args[1] is node for user in node.users)
        if written and node not in theirs and _alike(into, source):
            node.replace_all_uses_with(source)
    graph.eliminate_dead_code()


def _put(node: fx.Node) -> _Put | None:
    """What a node writes, where it is one part at a place that is a number."""
    if node.target is not _PUT or node.kwargs or len(node.args) != 4:
        return None
    base, part, axis, place = node.args
    shape = node.meta["val"].shape
    if not (isinstance(base, fx.Node) and isinstance(part, fx.Node)) or not isinstance(axis, int):
        return None
    if type(place) is not int or not isinstance(shape[axis], int) or not _one_dtype(node, part):
        return None
    return _Put(base, part, axis % len(shape), place % shape[axis])


def _goes_on(put: _Put | None, node: fx.Node, axis: int) -> bool:
    """Whether it is the next write of the same axis."""
    return put is not None and put.base is node and put.part is not node and put.axis == axis


def _parts(last: fx.Node, puts: Mapping[fx.Node, _Put]) -> list[fx.Node] | None:
    """What the writes up to this one leave at each place of the axis; None where something else is there, or
    the result lies otherwise than a stack does.
    """
    value, axis = last.meta["val"], puts[last].axis
    found = dict[int, fx.Node]()
    node, after = last, None
    while (put := puts.get(node)) is not None and put.axis == axis:
        if after is not None and list(node.users) != [after]:
            break  # somebody reads what is there in between
        found.setdefault(put.place, put.part)  # a later write counts
        node, after = put.base, node
    complete = len(found) == value.shape[axis] > 1
    return [found[at] for at in range(len(found))] if complete and value.is_contiguous() else None


def _one_dtype(one: fx.Node, other: fx.Node) -> bool:
    return bool(one.meta["val"].dtype is other.meta["val"].dtype)


def _alike(one: object, other: object) -> bool:
    """Whether both have one dtype, one device and one shape, at every call."""
    mine, theirs = (node.meta.get("val") if isinstance(node, fx.Node) else None for node in (one, other))
    return (
        isinstance(mine, torch.Tensor)
        and isinstance(theirs, torch.Tensor)
        and (mine.dtype, mine.device) == (theirs.dtype, theirs.device)
        and mine.dim() == theirs.dim()
        and all(known_equal(a, b) for a, b in zip(mine.shape, theirs.shape, strict=True))
    )
