"""Rows that stand in another order for a while: a mixture sorts its tokens by expert, multiplies each run of
them, and puts them back.

Sorting looks at the whole batch, and so does what counts the rows of each expert; but a row's product depends
on the row and its own expert alone, in whichever order the rows stand. Followed here, from each sort on, are
the rows in sorted order, the permutation, and the counts, which may be read for the ends of the runs and
nothing else. Whatever else is done with any of them, the sort is none such.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import fx

from effcompile.core.types import Value
from effcompile.ir.program import shape_of
from effcompile.ops.grouped import multiplies_runs

aten = torch.ops.aten

_SORTS = (aten.sort.default, aten.sort.stable)
#: Of values, without mixing them: the counts of rows, and the ends of their runs.
_COUNTING = (aten.histc.default, aten.cumsum.default, aten._to_copy.default)
_FLOORED = (aten.floor_divide.default, aten.div.Tensor_mode)
_BLANK = (aten.empty_like.default, aten.new_empty.default)
#: Axes along which each value grows with the batch, of those that do.
Grown = Mapping[fx.Node, Collection[int]]


def regrouped(nodes: Sequence[fx.Node], grown: Grown) -> Iterator[fx.Node]:
    """The sorts and counts that change nothing but the order of rows meanwhile. `nodes`: in graph order."""
    for sort in nodes:
        if sort.target in _SORTS and len(shape_of(sort.args[0])) == 1 and sort.args[0] in grown:  # type: ignore[arg-type]
            found = _Regrouped(sort, grown)
            if all(map(found.follow, nodes[nodes.index(sort) + 1 :])) and found.back:
                yield from (sort, *found.counts)


class _Regrouped:
    """What comes of one sort.

    `places`: the permutation, and it divided by k, of which row i // k is; `back`: rows were put back.
    """

    def __init__(self, sort: fx.Node, grown: Grown) -> None:
        self.sort, self.grown, self.back = sort, grown, False
        self.length = shape_of(sort.args[0])[0]  # type: ignore[arg-type]
        self.places: dict[fx.Node, int] = {}
        self.rows, self.counts, self.inverse = set[fx.Node](), dict[fx.Node, None](), set[fx.Node]()

    def follow(self, node: fx.Node) -> bool:
        """Whether the next node does with these values what is known here."""
        if self.sort in node.all_input_nodes:
            if node.args[1]:
                self.places[node] = 1
            else:
                self.rows.add(node)
            return True
        mine = [
            n
            for n in node.all_input_nodes
            if n in self.places or n in self.rows or n in self.counts or n in self.inverse
        ]
        if not mine or node.target in _BLANK:
            return True
        if node.target is aten.index.Tensor:
            return self._looked_up(node)
        if node.target is aten.index_put.default:
            return self._inverted(node)
        if multiplies_runs(node.target):
            return self._product(node)
        if node.target in _COUNTING and node not in self.grown:
            self.counts[node] = None
            return all(n in self.counts for n in mine) or (
                _counts_each(node) and all(n in self.rows for n in mine)
            )
        if node.target in _FLOORED and node.args[0] in self.places and isinstance(node.args[1], int):
            self.places[node] = self.places[node.args[0]] * node.args[1]  # type: ignore[index]
            return node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor"
        # in the batch's own order
        others = any(n in self.grown for n in node.all_input_nodes if n not in mine)
        if others or any(n not in self.rows for n in mine) or shape_of(node)[:1] != (self.length,):
            return False
        self.rows.add(node)
        return True

    def _looked_up(self, node: fx.Node) -> bool:
        of, at = node.args[0], _only(node.args[1])
        if at in self.inverse and of in self.rows:
            self.back = True
            return True
        if (
            not isinstance(of, fx.Node)
            or of in self.rows
            or of in self.places
            or of in self.counts
            or of in self.inverse
        ):
            return False
        by_place = (
            at in self.places
            and set(self.grown.get(of, ())) == {0}
            and shape_of(of)[0] * self.places[at] == self.length
        )
        by_expert = at in self.rows and of not in self.grown
        if by_place or by_expert:
            self.rows.add(node)
        return by_place or by_expert

    def _inverted(self, node: fx.Node) -> bool:
        """places[permutation] = 0, 1, 2 ... makes the inverse."""
        base, at, numbers = node.args[0], _only(node.args[1]), node.args[2]
        fine = (
            at is not None
            and self.places.get(at) == 1
            and _is(base, _BLANK)
            and _counts_up(numbers, self.length)
        )
        if fine:
            self.inverse.add(node)
        return fine

    def _product(self, node: fx.Node) -> bool:
        rows, weights, *rest = node.args
        ends = rest[0] if rest else node.kwargs.get("offs")
        fine = rows in self.rows and weights not in self.grown and ends in self.counts
        if fine:
            self.rows.add(node)
        return fine


def _only(indices: Value) -> fx.Node | None:
    """The index along the first axis, where there is no other."""
    alone = isinstance(indices, (list, tuple)) and len(indices) == 1 and isinstance(indices[0], fx.Node)
    return indices[0] if alone else None


def _is(node: object, targets: Collection[object]) -> bool:
    return isinstance(node, fx.Node) and node.target in targets


def _counts_each(node: fx.Node) -> bool:
    """Whether it counts the zeros, the ones, the twos ..., as many as there are."""
    _, bins, low, high = (*node.args, *node.kwargs.values(), None, None, None)[:4]
    return bool(node.target is aten.histc.default and low == 0 and isinstance(bins, int) and high == bins - 1)


def _counts_up(node: object, length: int) -> bool:
    """Whether it is 0, 1, 2 ... up to a length."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is aten.arange.default:
        return bool(node.args[0] == length)
    from_zero = node.args[:2] == (0, length) and node.args[2:] in ((), (1,))
    return bool(from_zero) and node.target in (aten.arange.start, aten.arange.start_step)
