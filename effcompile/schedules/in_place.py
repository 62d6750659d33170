"""Values of a backward that are written where one of their operands lies, as autograd does it with sums of
gradients.

The joint graph is functional. Autograd adds what arrives at a node to what is there already where nobody else
holds that (InputBuffer::accumulate), and the backward of a write through a view writes into the gradient
(CopySlices): where the graph makes a third tensor of two, eager's step has two. A plan that could not do the
same would need more than eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from effcompile.core.types import Value
from effcompile.estimate.storages import Storage, Storages
from effcompile.ir.step import Step
from effcompile.ops.consume import consume
from effcompile.ops.parts import put_select_, put_slice_

aten = torch.ops.aten

#: What makes a new tensor of an operand with a part of it replaced → the operator that replaces it where the
#: operand lies.
_PARTS: Mapping[object, Callable[..., object]] = {
    aten.slice_scatter.default: put_slice_,
    aten.select_scatter.default: put_select_,
}


@dataclass(frozen=True, slots=True)
class Written:
    """How a node of the backward runs instead: `target(*arguments)`, of which the first is the operand that
    it writes into and returns.
    """

    target: Callable[..., object]
    arguments: tuple[Value, ...]

    @property
    def into(self) -> fx.Node:
        """The operand."""
        assert isinstance(self.arguments[0], fx.Node)
        return self.arguments[0]


def written_in_place(step: Step, held: Storages, order: Sequence[fx.Node]) -> dict[fx.Node, Written]:
    """Nodes of a backward that may write into an operand.

    That is a sum, or a value with a part replaced, of an operand that the backward made, that is all of its
    memory and lies in it as the result would, that nobody reads after this node, and that is no gradient.

    `order`: the backward's nodes in the order in which they run.
    """
    return _Finder(step, held, order).found


class _Finder:
    def __init__(self, step: Step, held: Storages, order: Sequence[fx.Node]) -> None:
        self.held, self.position = held, {node: at for at, node in enumerate(order)}
        self.made = {s for node in order for s in held.made[node]}
        self.last: dict[Storage, int] = {}
        for at, node in enumerate(order):
            # what a consumed gradient is read by runs later than it stands (emit.py)
            when = len(order) if node.target is consume else at
            self.last.update(
                {s: max(when, self.last.get(s, 0)) for arg in node.all_input_nodes for s in held.of[arg]}
            )
        self.last.update({s: len(order) for gradient in step.all_gradients for s in held.of[gradient]})
        self.merged: dict[Storage, Storage] = {}
        self.found: dict[fx.Node, Written] = {}
        for node in order:
            self._look_at(node)

    def _look_at(self, node: fx.Node) -> None:
        for way in _ways(node):
            if self._is_free(way.into, node):
                (mine,), (its,) = self.held.made[node], self.held.of[way.into]
                first = self.merged.get(its, its)
                self.merged[mine] = first
                self.last[first] = self.last[mine] = self.last.get(mine, self.position[node])
                self.found[node] = way
                return

    def _is_free(self, operand: fx.Node, node: fx.Node) -> bool:
        mine, its = self.held.made[node], self.held.of[operand]
        if (
            len(mine) != 1
            or len(its) != 1
            or its[0] not in self.made
            or self.held.nbytes[its[0]] != self.held.nbytes[mine[0]]
        ):
            return False
        memory = self.merged.get(its[0], its[0])
        shared = [
            arg
            for arg in node.all_input_nodes
            if arg is not operand and memory in map(self._memory, self.held.of[arg])
        ]
        return (
            not shared
            and self.last[its[0]] == self.last[memory] == self.position[node]
            and _lies_alike(operand, node)
        )

    def _memory(self, s: Storage) -> Storage:
        return self.merged.get(s, s)


def _ways(node: fx.Node) -> list[Written]:
    if node.target in _PARTS and not node.kwargs:
        return [Written(_PARTS[node.target], node.args)]
    if node.target is not aten.add.Tensor or node.kwargs or len({*node.all_input_nodes}) != 2:
        return []
    a, b = node.args[:2]
    return [Written(aten.add_.Tensor, pair) for pair in ((a, b), (b, a)) if _of_one_kind(*pair)]


def _of_one_kind(a: object, b: object) -> bool:
    """Two tensors of one shape, dtype and device."""
    x, y = (n.meta.get("val") if isinstance(n, fx.Node) else None for n in (a, b))
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    return (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)


def _lies_alike(operand: fx.Node, node: fx.Node) -> bool:
    """Whether the operand fills its memory, as the result does its own, with the same strides."""
    here, there = operand.meta.get("val"), node.meta.get("val")
    if not isinstance(here, torch.Tensor) or not isinstance(there, torch.Tensor):
        return False
    alike = (here.shape, here.stride(), here.dtype) == (there.shape, there.stride(), there.dtype)
    return (
        alike
        and here.storage_offset() == 0
        and here.numel() * here.itemsize == here.untyped_storage().nbytes()
    )


def as_they_lie(held: Storages, written: Mapping[fx.Node, Written]) -> Storages:
    """The storages where these nodes make none, but return the operand's."""
    if not written:
        return held
    into: dict[Storage, Storage] = {}
    for node, way in written.items():
        (its,) = held.of[way.into]
        into[held.made[node][0]] = into.get(its, its)
    return replace(
        held,
        of={node: tuple(into.get(s, s) for s in held_by) for node, held_by in held.of.items()},
        made={node: () if node in written else made for node, made in held.made.items()},
        written=held.written | written.keys(),
    )
