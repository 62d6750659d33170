"""What a backward computes again inside its own kernels: the cut through the forward's element-wise chains
that keeps fewest bytes.

A minimal cut (Ford and Fulkerson 1956) between what only the forward can make (products, reductions, random
numbers) and the backward's element-wise groups; AOTAutograd's min-cut partitioner cuts by the same idea, but
the whole graph. A value that the backward reads elsewhere anyway costs nothing. Of equal cuts the earliest is
taken: what it keeps is there already, and the forward need not write what comes after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from effcompile.passes.training.pointwise_graph import base, block_of, is_view, link

_ENDLESS = 1 << 62
_Place = tuple[fx.Node, str] | str  # a node's "in" or "out", "source", "sink"


def absorbed(
    groups: Sequence[tuple[str, Sequence[fx.Node]]], absorbable: Collection[fx.Node],
    backward: Collection[fx.Node], results: Collection[fx.Node],
) -> set[fx.Node]:  # fmt: skip
    """Forward nodes that the groups which read them make again.

    Args:
        groups: block and nodes of each element-wise group of the backward.
        absorbable: element-wise operators of the forward.
        backward: all nodes that depend on the tangent.
        results: what the forward returns, kept in any case.
    """
    grouped = {node for _, nodes in groups for node in nodes}
    others = [node for node in backward if node not in grouped and not is_view(node)]
    free = {base(node) for node in results} | {base(arg) for node in others for arg in node.all_input_nodes}
    cut = _Cut(frozenset(absorbable), free)
    for block, nodes in groups:
        for node in nodes:
            for arg in node.all_input_nodes:
                if base(arg) not in backward and base(arg).op != "placeholder":
                    cut.edge((cut.source_of(arg, block), "out"), "sink", _ENDLESS)
    cut.flow()
    return {node for node in cut.inner if (node, "in") not in cut.reached}


class _Cut:
    """The network: every value an edge of its bytes, every read an endless one."""

    def __init__(self, absorbable: Collection[fx.Node], free: Collection[fx.Node]) -> None:
        self.absorbable, self.free = absorbable, free
        self.capacity: dict[_Place, dict[_Place, int]] = {"source": {}, "sink": {}}
        self.inner: dict[fx.Node, None] = {}
        self.seen: set[fx.Node] = set()
        self.reached: Mapping[_Place, _Place] = {}

    def edge(self, start: _Place, end: _Place, capacity: int) -> None:
        self.capacity.setdefault(start, {})[end] = capacity
        self.capacity.setdefault(end, {}).setdefault(start, 0)

    def source_of(self, arg: fx.Node, block: str) -> fx.Node:
        """The node that stands for what is read: an operator that can be absorbed in this block, or who made
        the memory.
        """
        node = link(arg)
        inner = node in self.absorbable and node not in self.free and block_of(node) == block
        node = node if inner else base(arg)
        if node not in self.seen:
            self.seen.add(node)
            self.edge(
                (node, "in"),
                (node, "out"),
                0 if node in self.free or node.op == "placeholder" else _bytes(node),
            )
            if inner:
                self.inner[node] = None
                for operand in node.all_input_nodes:
                    self.edge((self.source_of(operand, block), "out"), (node, "in"), _ENDLESS)
            else:
                self.edge("source", (node, "in"), _ENDLESS)
        return node

    def flow(self) -> None:
        """Fill the network by shortest paths (Edmonds and Karp 1972); `reached` is then what is on the
        source's side.
        """
        while "sink" in (came := self._search()):
            path, place = list[tuple[_Place, _Place]](), "sink"
            while place != "source":
                path.append((came[place], place))
                place = came[place]  # type: ignore[assignment]
            most = min(self.capacity[start][end] for start, end in path)
            for start, end in path:
                self.capacity[start][end] -= most
                self.capacity[end][start] += most
        self.reached = came

    def _search(self) -> dict[_Place, _Place]:
        came: dict[_Place, _Place] = {"source": "source"}
        waiting: deque[_Place] = deque(["source"])
        while waiting and "sink" not in came:
            place = waiting.popleft()
            for end, left in self.capacity[place].items():
                if left > 0 and end not in came:
                    came[end] = place
                    waiting.append(end)
        return came


def _bytes(node: fx.Node) -> int:
    """Bytes of what a node made; of several tensors all of them."""
    value = node.meta.get("val")
    tensors = [
        t for t in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(t, torch.Tensor)
    ]
    return sum(int(t.numel()) * t.element_size() for t in tensors)
