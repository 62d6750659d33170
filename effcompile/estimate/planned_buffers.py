"""Bytes beside the weights where a runtime plans its buffers before it runs, as ONNX Runtime does.

Its planner gives a value the buffer of one that is no more read and is of the same size, and a buffer is
free again after the last value that it is ever given to (allocation_planner.cc). Of layers that repeat, the
halves of an MLP stay while the attentions run, and its attention has all scores at once, and its mask in
floats, where torch's has a block of them.

Counted is the least that a call takes: what is predicted too low is corrected once it has run, and what is
predicted too high is refused for good. Its arena takes up to 1.3 of that.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import fx

from effcompile.estimate.storages import Storage, Storages, storages
from effcompile.estimate.timeline import given_bytes, last_reads
from effcompile.ir.program import Program
from effcompile.sites.parts import attentions

#: What ONNX Runtime holds for each node of a graph; measured of BERT and SigLIP: 4 to 5.8 KB.
_NODE = 4 << 10
_FLOAT = 4


@dataclass(slots=True)
class _Buffer:
    """Given to values of one size, from the first that it is given to until after the last is read."""

    nbytes: int
    first: int
    last: int


def planned_bytes(program: Program) -> int:
    """Bytes of inputs, buffers and the graph itself at the highest instant of a call."""
    held, nodes = storages(program), list(program.graph.nodes)
    buffers = _buffers(held, nodes, last_reads(nodes, held))
    changes = defaultdict[int, int](int)
    for buffer in buffers:
        changes[buffer.first] += buffer.nbytes
        changes[buffer.last + 1] -= buffer.nbytes
    scores = _scores(program)
    live = highest = 0
    for step, node in enumerate(nodes):
        live += changes[step]
        highest = max(highest, live + scores.get(node.name, held.workspace.get(node, 0)))
    graph = _NODE * sum(node.op == "call_function" for node in nodes)
    return given_bytes(nodes, held) + highest + graph


def _buffers(held: Storages, nodes: list[fx.Node], freed_after: dict[int, list[Storage]]) -> list[_Buffer]:
    """Of all values that the graph makes; those of its outputs are there to the end."""
    made, free, of = list[_Buffer](), defaultdict[int, list[_Buffer]](list), dict[Storage, _Buffer]()

    def let_go(step: int) -> None:
        for storage in freed_after.pop(step, ()):
            if storage in of:
                of[storage].last = step
                free[of[storage].nbytes].append(of[storage])

    for step, node in enumerate(nodes):
        if torch.Tag.pointwise in getattr(node.target, "tags", ()):
            let_go(step)  # its kernel writes where it reads
        for storage in held.made[node]:
            if storage in held.fixed:
                continue
            size = held.nbytes[storage]
            of[storage] = free[size].pop() if free[size] else _Buffer(size, step, len(nodes))
            if of[storage].first == step:
                made.append(of[storage])
            of[storage].last = len(nodes)
        let_go(step)
    return made


def _scores(program: Program) -> dict[str, int]:
    """Name of an attention's node → bytes of its scores and of its mask."""
    found = dict[str, int]()
    for site in attentions(program):
        b, h, sq, sk, _ = site.dims
        masked = b * sq * sk if site.mask is not None else 0
        found[site.node.name] = _FLOAT * (b * h * sq * sk + masked)
    return found
