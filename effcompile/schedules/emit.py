"""The chosen schedule as two torch.fx graphs: a forward that returns what is kept, a backward that remakes
the rest.

In the backward a value that was not kept is made again right before its first reader, by a copy of its
operator inside its block's part; copies do not outlive that part. A random operator's copy replays the
numbers of the first run. A block group first remakes the values that enter its blocks (one more run of their
forwards), which live until their block is done. What a block holds in another form is put away right after it
was made, an entering value when the block begins, and restored right before its first reader in the backward;
views of it are taken again (away.py). Freed is what nobody reads any more: that is the executor's rule, and
the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from effcompile.core.torch_compat_aot import draws
from effcompile.core.types import Args
from effcompile.estimate.storages import Storage
from effcompile.ir.program import ancestors
from effcompile.ops.consume import consume
from effcompile.ops.replay import random_state, replay
from effcompile.planner.remat.problem import Group
from effcompile.schedules.away import Away, Move, begun, ended, putting_away, restoring
from effcompile.schedules.blocks import Block, Blocks
from effcompile.schedules.ways import Way


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """A schedule, emitted.

    Attributes:
        forward: placeholders of the step in its order (no tangent); returns (forward results …, saved …).
        backward: its placeholders are copies of the step's (parameters, inputs ...; the tangent last of all)
            and those in `handed`, in any order; returns the gradients in the order of `Step.all_gradients`.
        handed: placeholders of the backward that take what the forward saved, in the forward's order.
        origin: node of either graph → the joint graph's node of which it is a copy; generator states have
            none.
        stage: node of either graph → the block's index.
        recomputed: how many operators run again.
        moves: nodes that put values away and restore them, and what they take; they have no origin.
    """

    forward: fx.Graph
    backward: fx.Graph
    handed: tuple[fx.Node, ...]
    origin: Mapping[fx.Node, fx.Node]
    stage: Mapping[fx.Node, int]
    recomputed: int
    moves: Mapping[fx.Node, Move] = field(default_factory=dict)


def emit(
    cut: Blocks, kept: frozenset[Storage], groups: Sequence[Group] = (), away: Away | None = None
) -> Emitted:
    """Emit a step.

    Args:
        cut: the step in blocks.
        kept: storages kept from forward to backward; shared ones and results are kept in any case.
        groups: blocks whose entering values, but the first one's, are remade together.
        away: block's index → storage that it holds in another form → which way, in the order in which they
            are needed. Kept storages, and entering ones that a group remakes, are left as they are.
    """
    kept = kept | cut.shared | {s for n in cut.step.forward_results for s in cut.held.of[n]}
    remade = {
        s
        for group in groups
        for block in cut.blocks[group.first + 1 : group.last + 1]
        for s in block.entering
    }
    others = {
        i: {s: form for s, form in forms.items() if s not in kept | remade}
        for i, forms in (away or {}).items()
    }
    assert sum(map(len, others.values())) == len({s for forms in others.values() for s in forms}), (
        "one block holds a storage"
    )
    return _Emitter(cut, kept, groups, others).run()


@dataclass
class _Emitter:
    cut: Blocks
    kept: frozenset[Storage]
    groups: Sequence[Group]
    away: Away
    forward: fx.Graph = field(default_factory=fx.Graph)
    backward: fx.Graph = field(default_factory=fx.Graph)
    origin: dict[fx.Node, fx.Node] = field(default_factory=dict)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    static: dict[fx.Node, fx.Node] = field(default_factory=dict)  # step's placeholder → the backward's
    # joint forward node → the backward's placeholder
    saved: dict[fx.Node, fx.Node] = field(default_factory=dict)
    # random joint node → the backward's placeholder of its state
    states: dict[fx.Node, fx.Node] = field(default_factory=dict)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)  # joint backward node → its copy
    # joint forward node → its copy in the present part
    again: dict[fx.Node, fx.Node] = field(default_factory=dict)
    # entering storage that a group has remade → its copy
    entered: dict[Storage, fx.Node] = field(default_factory=dict)
    # storage in another form → the backward's placeholder of that
    held: dict[Storage, fx.Node] = field(default_factory=dict)
    # storage on its way to the device → the copy that was begun
    asked: dict[Storage, fx.Node] = field(default_factory=dict)
    moves: dict[fx.Node, Move] = field(default_factory=dict)
    recomputed: int = 0
    at: int = 0

    def run(self) -> Emitted:
        self.stage_of = {node: i for i, block in enumerate(self.cut.blocks) for node in block.forward}
        self.in_forward = set(self.stage_of)
        names = ["tangent", *(f"tangent_{i}" for i in range(1, len(self.cut.step.tangents)))]
        self.tangents = {
            node: self._tangent(node, name) for node, name in zip(self.cut.step.tangents, names, strict=False)
        }
        self.anchor = next(iter(self.tangents.values()), None) or self.backward.placeholder("tangent")
        for i in reversed(range(len(self.cut.blocks))):
            self._backward_of(i)
        self._finish_backward()
        self._consume_late()
        self._emit_forward()
        return Emitted(
            forward=self.forward,
            backward=self.backward,
            handed=(*self.saved.values(), *self.states.values(), *self.held.values()),
            origin=self.origin,
            stage=self.stage,
            recomputed=self.recomputed,
            moves=self.moves,
        )

    # ------------------------------------------------------------------ the backward

    def _backward_of(self, i: int) -> None:
        self.at, block = i, self.cut.blocks[i]
        for group in self.groups:
            if group.last == i:
                self._remake_entering(group)
        self.again = dict(self._remade(block))
        if self.cut.host.beside:
            self._ask(i)
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
    def maker(self) -> Mapping[Storage, fx.Node]:
        return self.cut.maker

    def _ask(self, i: int) -> None:
        """Begin to copy all that the block has on the host, in the order in which it is needed."""
        for s, way in self.away.get(i, {}).items():
            if way.on_host:
                self.asked[s] = self._moved(self.backward, *begun(self.cut, s, way, self._holder(s)))

    def _restored(self, s: Storage, way: Way) -> fx.Node:
        """A value that was held in another form, as it was."""
        value = self.asked.pop(s, None)
        value = self._holder(s) if value is None else value
        for call in restoring(self.cut, s, way):
            value = self._moved(self.backward, call.target, (value, *call.arguments), call.move)
        return value

    def _holder(self, s: Storage) -> fx.Node:
        if s not in self.held:
            self.held[s] = self._placeholder(f"away_{self.maker[s].name}", None)
        return self.held[s]

    def _moved(self, graph: fx.Graph, target: Callable[..., object], arguments: Args, move: Move) -> fx.Node:
        node = graph.call_function(target, arguments)
        self.moves[node] = move
        self.stage[node] = self.at
        return node

    def _value(self, node: fx.Node) -> fx.Node:
        """The backward graph's node for a node of the joint graph: there already, saved, or made
        again now.
        """
        for there in (self.made, self.again, self.saved, self.static):
            if node in there:
                return there[node]
        if node.op == "placeholder":
            return self._input(node)
        assert node in self.in_forward, f"{node} of the backward is read before it runs"
        storages = self.cut.held.of[node]
        way = self.away.get(self.at, {}).get(storages[0]) if storages else None
        if way is not None and self.maker.get(storages[0]) is node:
            self.again[node] = self._restored(storages[0], way)
            return self.again[node]
        if storages and self.kept.issuperset(storages) and isinstance(node.meta.get("val"), torch.Tensor):
            self.saved[node] = self._placeholder(f"saved_{node.name}", node)
            return self.saved[node]
        copy = self._replayed(node) if draws(node) else self._copy(self.backward, node, self._value)
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
        for node in self.cut.step.all_gradients:
            value = self.made.get(node)
            if value is None:
                # a gradient that does not depend on the tangent: a constant, or a value that was kept
                value = self._value(node)
            results.append(value)
        self.backward.output(tuple(results))

    def _consume_late(self) -> None:
        """A gradient is consumed, which writes the parameter, after all that reads the parameter: remade
        values too.
        """
        last: dict[Storage, fx.Node] = {}
        for node in self.backward.nodes:
            if node.op == "call_function" and node.target is not consume:
                last.update(
                    {
                        s: node
                        for arg in node.all_input_nodes
                        if arg in self.origin
                        for s in self.cut.held.of[self.origin[arg]]
                    }
                )
        order = {node: at for at, node in enumerate(self.backward.nodes)}
        for node in [n for n in order if n.target is consume]:
            reader = max(
                (last[s] for s in self.cut.held.of[self.origin[node.args[3]]] if s in last),
                key=order.__getitem__,
                default=node,
            )
            if order[reader] > order[node]:
                reader.append(node)
                self.stage[node] = self.stage[reader]

    # ------------------------------------------------------------------ the forward

    def _emit_forward(self) -> None:
        step = self.cut.step
        wanted = {*step.forward_results, *self.saved, *(n for n in self.in_forward if draws(n))}
        wanted = ancestors([*wanted, *(self.maker[s] for s in self.held)])
        copies: dict[fx.Node, fx.Node] = {}
        for node in step.graph.nodes:
            if node.op == "placeholder" and node not in self.tangents:
                copies[node] = self.forward.placeholder(node.name)
                copies[node].meta = dict(node.meta)
                self.origin[copies[node]] = node
        states: dict[fx.Node, fx.Node] = {}
        gone: dict[Storage, fx.Node] = {}
        for i, block in enumerate(self.cut.blocks):
            self.at = i
            away = {self.maker[s]: s for s in self.away.get(i, {}) if s in self.held}
            sources: dict[Storage, fx.Node] = {}
            for node in [n for n in away if n not in block.forward]:
                self._put_away(away[node], copies[node], gone, sources)
            for node in block.forward:
                if node in wanted:
                    if node in self.states:
                        states[node] = self.forward.call_function(random_state, (_device(node),))
                        self.stage[states[node]] = i
                    copies[node] = self._copy(self.forward, node, copies.__getitem__)
                    if node in away:
                        self._put_away(away[node], copies[node], gone, sources)
            for s, source in sources.items():
                gone[s] = self._moved(self.forward, *ended(gone[s], source))
        kept = [copies[n] for n in self.saved]
        away_values = [gone[s] for s in self.held]
        results = (
            *(copies[n] for n in step.forward_results),
            *kept,
            *(states[n] for n in self.states),
            *away_values,
        )
        self.forward.output(results)

    def _put_away(
        self, s: Storage, value: fx.Node, gone: dict[Storage, fx.Node], sources: dict[Storage, fx.Node]
    ) -> None:
        """Put a value away: `gone` has what is handed to the backward, `sources` what a copy that goes on
        still reads.
        """
        for call in putting_away(self.cut, s, self.away[self.at][s]):
            source, value = value, self._moved(self.forward, call.target, (value, *call.arguments), call.move)
            if call.move.host and self.cut.host.beside:
                sources[s] = source
        gone[s] = value

    def _copy(self, graph: fx.Graph, node: fx.Node, value: Callable[[fx.Node], fx.Node]) -> fx.Node:
        way = self.cut.written.get(node)
        target, given, named = (
            (node.target, node.args, dict(node.kwargs)) if way is None else (way.target, way.arguments, {})
        )
        args, kwargs = fx.map_arg((given, named), value)
        copy = graph.call_function(target)  # type: ignore[arg-type]
        # set later: torch looks for sizes without a value in what a node is made with
        copy.args, copy.kwargs = args, kwargs
        return self._noted(copy, node)

    def _noted(self, copy: fx.Node, node: fx.Node) -> fx.Node:
        copy.meta = dict(node.meta)
        self.origin[copy] = node
        self.stage[copy] = self.at
        return copy


def _device(node: fx.Node) -> str:
    value = node.meta["val"]
    return str((value[0] if isinstance(value, (tuple, list)) else value).device)
