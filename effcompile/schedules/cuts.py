"""Where a forward is cut into blocks: by the user's modules, and where those are too large, where little
crosses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch import fx

from effcompile.core.torch_compat_aot import is_random
from effcompile.estimate.storages import Storage, Storages
from effcompile.ir.program import ancestors, module_path

#: A block with more storages than this is cut further: the exact frontier of a block takes time exponential
#: in them.
LARGEST = 48


def cut(
    forward: Sequence[fx.Node], results: Sequence[fx.Node], held: Storages
) -> tuple[tuple[str, ...], dict[fx.Node, int]]:
    """(names of the stages in order, node → stage). A node is never in an earlier stage than what it reads.

    Nor is a random draw in an earlier one than the draw before it: the nodes of a module used twice bear the
    name of its first place.

    Args:
        forward: what does not depend on the tangent.
        results: what the forward returns. What is not needed for them (made for the backward alone) follows
            its operands.
        held: the graph's storages.
    """
    needed = ancestors(results)
    runs = _by_module([node for node in forward if node in needed], depth=1)
    runs = [piece for name, nodes in runs for piece in _refined(name, nodes, held, depth=2)]
    names: list[str] = []
    stage_of: dict[fx.Node, int] = {}
    for name, nodes in runs:
        names.append(_unique(name, names))
        for node in nodes:
            stage_of[node] = len(names) - 1
    drawn = 0
    for node in forward:
        operands = [stage_of[arg] for arg in node.all_input_nodes if arg in stage_of]
        stage_of[node] = max([stage_of.get(node, 0), *operands])
        if is_random(node.target):
            stage_of[node] = drawn = max(stage_of[node], drawn)
    return tuple(names), stage_of


Run = tuple[str, list[fx.Node]]


def _by_module(nodes: Sequence[fx.Node], depth: int) -> list[Run]:
    """Runs of nodes of one repeated module.

    Nodes of none join: the first ones "start", the last ones "end", others their predecessor.
    """
    keys = [_key(module_path(node), depth) for node in nodes]
    known = [i for i, key in enumerate(keys) if key]
    if not known:
        return [("", list(nodes))]
    runs: dict[str, list[fx.Node]] = {}
    order: list[str] = []
    current = ""
    for i, (node, key) in enumerate(zip(nodes, keys, strict=True)):
        if i < known[0]:
            name = "start"
        elif i > known[-1]:
            name = "end"
        else:
            name = key or current
        if name != current and name not in runs:
            order.append(name)
        runs.setdefault(name, []).append(node)
        current = name
    return [(name, runs[name]) for name in order]


def _key(path: str, depth: int) -> str:
    """The path up to its `depth`-th part that is an index: "transformer.h.3" of "transformer.h.3.mlp.c_fc";
    "" without one.
    """
    parts = path.split(".")
    indices = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: indices[depth - 1] + 1]) if len(indices) >= depth else ""


def _refined(name: str, nodes: list[fx.Node], held: Storages, depth: int) -> list[Run]:
    """A run, cut into smaller ones while it is too large: by deeper modules, then where the fewest storages
    cross.
    """
    if _size(nodes, held) <= LARGEST:
        return [(name, nodes)]
    deeper = [key for key, _ in groupby(nodes, key=lambda n: _key(module_path(n), depth))]
    if 1 < len(deeper) <= len({*deeper}) + 2 and len({*deeper} - {""}) > 1:
        inner = _by_module(nodes, depth)
        renamed = [(f"{name}.{part}" if part in ("start", "end", "") else part, run) for part, run in inner]
        return [piece for part, run in renamed for piece in _refined(part, run, held, depth + 1)]
    pieces = _at_narrow_places(nodes, held)
    return [(name if len(pieces) == 1 else f"{name}#{i}", piece) for i, piece in enumerate(pieces)]


def _size(nodes: Sequence[fx.Node], held: Storages) -> int:
    return sum(bool(held.made[node]) for node in nodes)


def _at_narrow_places(nodes: list[fx.Node], held: Storages) -> list[list[fx.Node]]:
    """Cut where the fewest bytes cross, so that each piece has between a quarter of LARGEST and LARGEST
    storages.
    """
    crossing = _crossing_bytes(nodes, held)
    pieces: list[list[fx.Node]] = []
    start = 0
    while _size(nodes[start:], held) > LARGEST:
        places = _window(nodes, held, start)
        best = min(places, key=lambda i: (crossing[i], i))
        pieces.append(nodes[start : best + 1])
        start = best + 1
    return [*pieces, nodes[start:]]


def _window(nodes: Sequence[fx.Node], held: Storages, start: int) -> list[int]:
    """Positions after which a piece that begins at `start` has between a quarter of LARGEST and LARGEST
    storages.
    """
    made, places = 0, []
    for i in range(start, len(nodes) - 1):
        made += bool(held.made[nodes[i]])
        if made > LARGEST:
            break
        if made >= LARGEST // 4:
            places.append(i)
    return places or [start]


def _crossing_bytes(nodes: Sequence[fx.Node], held: Storages) -> list[int]:
    """Per position the bytes of storages made among the nodes up to it and read by one after it."""
    position = {node: i for i, node in enumerate(nodes)}
    made = {s: i for i, node in enumerate(nodes) for s in held.made[node]}
    last: dict[Storage, int] = {}
    for node, i in position.items():
        for arg in node.all_input_nodes:
            for s in held.of[arg]:
                last[s] = i
    change = [0] * (len(nodes) + 1)
    for s, first in made.items():
        if last.get(s, first) > first:
            change[first] += held.nbytes[s]
            change[last[s]] -= held.nbytes[s]
    total, crossing = 0, []
    for delta in change[: len(nodes)]:
        total += delta
        crossing.append(total)
    return crossing


def _unique(name: str, taken: Sequence[str]) -> str:
    name = name or "model"
    if name not in taken:
        return name
    return next(f"{name}~{i}" for i in range(2, len(taken) + 3) if f"{name}~{i}" not in taken)
