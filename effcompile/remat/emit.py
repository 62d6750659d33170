"""The chosen schedule as two torch.fx graphs: a forward that returns what is kept, a backward that remakes the rest.

In the backward a value that was not kept is made again right before its first reader, by a copy of its operator inside its
block's part; copies do not outlive that part. A random operator's copy replays the numbers of the first run. A block group
first remakes the values that enter its blocks (one more run of their forwards), which live until their block is done.
Freed is what nobody reads any more: that is the executor's rule, and the simulator's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from effcompile.estimate.storages import Storage
from effcompile.ops.replay import random_state, replay
from effcompile.planner.remat.problem import Group
from effcompile.remat.blocks import Block, Blocks
from effcompile.torch_compat_aot import is_random


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """A schedule, emitted.

    Attributes:
        forward: placeholders of the step in its order (no tangent); returns (forward results …, saved …).
        backward: its placeholders are copies of the step's (parameters, inputs ...; the tangent last of all) and those in
            `handed`, in any order; returns the gradients in the order of `Step.gradients`.
        handed: placeholders of the backward that take what the forward saved, in the forward's order.
        origin: node of either graph → the joint graph's node of which it is a copy; generator states have none.
        stage: node of either graph → the block's index.
        recomputed: how many operators run again.
    """

    forward: fx.Graph
    backward: fx.Graph
    handed: tuple[fx.Node, ...]
    origin: Mapping[fx.Node, fx.Node]
    stage: Mapping[fx.Node, int]
    recomputed: int


def emit(cut: Blocks, kept: frozenset[Storage], groups: Sequence[Group] = ()) -> Emitted:
    """Emit a step.

    Args:
        cut: the step in blocks.
        kept: storages kept from forward to backward; shared ones and results are kept in any case.
        groups: blocks whose entering values, but the first one's, are remade together.
    """
    return _Emitter(cut, kept | cut.shared | {s for n in cut.step.forward_results for s in cut.held.of[n]}, groups).run()


@dataclass
class _Emitter:
    cut: Blocks
    kept: frozenset[Storage]
    groups: Sequence[Group]
    forward: fx.Graph = field(default_factory=fx.Graph)
    backward: fx.Graph = field(default_factory=fx.Graph)
    origin: dict[fx.Node, fx.Node] = field(default_factory=dict)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    static: dict[fx.Node, fx.Node] = field(default_factory=dict)  # step's placeholder → the backward's
    saved: dict[fx.Node, fx.Node] = field(default_factory=dict)  # joint forward node → the backward's placeholder
    states: dict[fx.Node, fx.Node] = field(default_factory=dict)  # random joint node → the backward's placeholder of its state
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)  # joint backward node → its copy
    again: dict[fx.Node, fx.Node] = field(default_factory=dict)  # joint forward node → its copy in the present part
    entered: dict[Storage, fx.Node] = field(default_factory=dict)  # entering storage that a group has remade → its copy
    recomputed: int = 0
    at: int = 0

    def run(self) -> Emitted:
        self.stage_of = {node: i for i, block in enumerate(self.cut.blocks) for node in block.forward}
        self.in_forward = set(self.stage_of)
        names = ["tangent", *(f"tangent_{i}" for i in range(1, len(self.cut.step.tangents)))]
        self.tangents = {node: self._tangent(node, name) for node, name in zip(self.cut.step.tangents, names, strict=False)}
        self.anchor = next(iter(self.tangents.values()), None) or self.backward.placeholder("tangent")
        for i in reversed(range(len(self.cut.blocks))):
            self._backward_of(i)
        self._finish_backward()
        self._emit_forward()
        return Emitted(
            forward=self.forward,
            backward=self.backward,
            handed=(*self.saved.values(), *self.states.values()),
            origin=self.origin,
            stage=self.stage,
            recomputed=self.recomputed,
        )

    # ------------------------------------------------------------------ the backward

    def _backward_of(self, i: int) -> None:
        self.at, block = i, self.cut.blocks[i]
        for group in self.groups:
            if group.last == i:
                self._remake_entering(group)
        self.again = dict(self._remade(block))
        for node in block.backward:
            self.made[node] = self._copy(self.backward, node, self._value)
        self.again = {}

    def _remake_entering(self, group: Group) -> None:
        self.again = {}
        self.entered = {}
        for k in range(group.first + 1, group.last + 1):
            for s in self.cut.blocks[k].entering:
                if s not in self.kept:
                    self.entered[s] = self._value(self.maker[s])
        self.again = {}

    def _remade(self, block: Block) -> dict[fx.Node, fx.Node]:
        """Entering values that a group has remade, under the nodes that made them first."""
        return {self.maker[s]: self.entered[s] for s in block.entering if s in self.entered}

    @cached_property
    def maker(self) -> dict[Storage, fx.Node]:
        """Storage → the first node whose value is exactly the tensor that was made with it."""
        found: dict[Storage, fx.Node] = {}
        for node in self.stage_of:
            if len(self.cut.held.of[node]) == 1:
                found.setdefault(self.cut.held.of[node][0], node)
        return found

    def _value(self, node: fx.Node) -> fx.Node:
        """The backward graph's node for a node of the joint graph: there already, saved, or made again now."""
        for there in (self.made, self.again, self.saved, self.static):
            if node in there:
                return there[node]
        if node.op == "placeholder":
            return self._input(node)
        assert node in self.in_forward, f"{node} of the backward is read before it runs"
        storages = self.cut.held.of[node]
        if storages and self.kept.issuperset(storages) and isinstance(node.meta.get("val"), torch.Tensor):
            self.saved[node] = self._placeholder(f"saved_{node.name}", node)
            return self.saved[node]
        copy = self._replayed(node) if is_random(node.target) else self._copy(self.backward, node, self._value)
        self.recomputed += bool(self.cut.held.made[node])
        self.again[node] = copy
        return copy

    def _input(self, node: fx.Node) -> fx.Node:
        if node in self.tangents:
            return self.tangents[node]
        self.static[node] = self._placeholder(node.name, node)
        return self.static[node]

    def _tangent(self, node: fx.Node, name: str) -> fx.Node:
        made = self.backward.placeholder(name)
        made.meta = dict(node.meta)
        self.origin[made] = node
        return made

    def _placeholder(self, name: str, origin: fx.Node | None) -> fx.Node:
        with self.backward.inserting_before(self.anchor):
            made = self.backward.placeholder(name)
        if origin is not None:
            self.origin[made] = origin
            made.meta = dict(origin.meta)
        return made

    def _replayed(self, node: fx.Node) -> fx.Node:
        state = self.states.get(node)
        if state is None:
            state = self.states[node] = self._placeholder(f"state_{node.name}", None)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._value)
        arguments: Any = (state, _device(node), node.target, *args)
        copy = self.backward.call_function(replay, arguments, kwargs)
        return self._noted(copy, node)

    def _finish_backward(self) -> None:
        results = []
        for node in self.cut.step.gradients.values():
            value = self.made.get(node)
            if value is None:  # a gradient that does not depend on the tangent: a constant, or a value that was kept
                value = self._value(node)
            results.append(value)
        self.backward.output(tuple(results))

    # ------------------------------------------------------------------ the forward

    def _emit_forward(self) -> None:
        step = self.cut.step
        wanted = {*step.forward_results, *self.saved, *(n for n in self.in_forward if is_random(n.target))}
        todo = list(wanted)
        while todo:
            for arg in todo.pop().all_input_nodes:
                if arg not in wanted:
                    wanted.add(arg)
                    todo.append(arg)
        copies: dict[fx.Node, fx.Node] = {}
        for node in step.graph.nodes:
            if node.op == "placeholder" and node not in self.tangents:
                copies[node] = self.forward.placeholder(node.name)
                copies[node].meta = dict(node.meta)
                self.origin[copies[node]] = node
        states: dict[fx.Node, fx.Node] = {}
        for i, block in enumerate(self.cut.blocks):
            self.at = i
            for node in block.forward:
                if node in wanted:
                    if node in self.states:
                        states[node] = self.forward.call_function(random_state, (_device(node),))
                        self.stage[states[node]] = i
                    copies[node] = self._copy(self.forward, node, copies.__getitem__)
        kept = [copies[n] for n in self.saved]
        self.forward.output((*(copies[n] for n in step.forward_results), *kept, *(states[n] for n in self.states)))

    def _copy(self, graph: fx.Graph, node: fx.Node, value: Any) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
        return self._noted(graph.call_function(node.target, args, kwargs), node)  # type: ignore[arg-type]

    def _noted(self, copy: fx.Node, node: fx.Node) -> fx.Node:
        copy.meta = dict(node.meta)
        self.origin[copy] = node
        self.stage[copy] = self.at
        return copy


def _device(node: fx.Node) -> str:
    value = node.meta["val"]
    return str((value[0] if isinstance(value, (tuple, list)) else value).device)
