"""Bytes live at every step of an emitted schedule, storage by storage: the proof that it stays within its
budget.

The executor frees a value after its last reader, as counted here. Alive throughout: parameters, buffers,
constants and inputs. Results of the forward (the loss, shown outputs) stay; gradients stay from where they
are made. New values of buffers live until the forward has ended; old ones that the backward reads are copied
while they are all there still, which is counted to the forward's last operator. A copy of an operator makes
what the first one made. What is put on the host is no byte of the device, and counted apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from effcompile.estimate.storages import Storage, Storages
from effcompile.ir.footprint import GIVEN, GRADIENTS, KEPT, LIBRARIES, WORKING, Footprint
from effcompile.ir.step import Step
from effcompile.ops.replay import CPU_STATE_BYTES, replay
from effcompile.schedules.away import Move
from effcompile.schedules.blocks import Blocks
from effcompile.schedules.emit import Emitted
from effcompile.schedules.reserved import Event

Instance = tuple[Storage, int]  # a storage, and which copy of the operator made it


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInstant:
    """One operator of a schedule.

    `phase`: "forward" or "backward"; `live`: bytes alive while it runs; `again`: it is a copy.
    """

    phase: str
    stage: int
    node: str
    live: int
    again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A simulated step.

    Attributes:
        peak_bytes: the most bytes alive at one instant. `peak`: that instant.
        instants: all of them, in order.
        saved_bytes: kept from forward to backward. end_bytes: alive when the step is over.
        parts: what the peak is made of, by kind (ir/footprint.py).
        host_bytes: the most bytes on the host at one instant.
    """

    peak_bytes: int
    peak: MemoryInstant
    instants: tuple[MemoryInstant, ...]
    saved_bytes: int
    end_bytes: int
    parts: dict[str, int]
    host_bytes: int = 0

    @property
    def footprint(self) -> Footprint:
        """Of forward and backward.

        What is given is there throughout; what else is left are gradients, the loss, shown outputs.
        """
        given = {kind: self.parts[kind] for kind in (GIVEN, LIBRARIES) if kind in self.parts}
        return Footprint(
            step=self.parts,
            end={**given, GRADIENTS: self.end_bytes - sum(given.values())},
            host=self.host_bytes,
        )


def simulate(cut: Blocks, emitted: Emitted) -> Trace:
    """Walk an emitted schedule."""
    return _Simulator(cut, emitted).run()


def allocations(cut: Blocks, emitted: Emitted) -> list[Event]:
    """What one step asks the allocator for, in order: what operators make and take for themselves, and what
    is freed after its last reader.

    What is left when the step is over, gradients and the loss, is freed at the end, as the next step does.
    """
    return _Simulator(cut, emitted).events()


def overwritten(step: Step, emitted: Emitted) -> dict[fx.Node, fx.Node]:
    """Placeholders of the backward that are buffers which the forward updates → the step's placeholder; they
    need a copy.
    """
    updated = {node for node, name in step.buffers.items() if name in step.updated}
    holders = [
        (node, emitted.origin.get(node)) for node in emitted.backward.nodes if node.op == "placeholder"
    ]
    return {node: origin for node, origin in holders if origin in updated}


class _Simulator:
    def __init__(self, cut: Blocks, emitted: Emitted) -> None:
        self.held: Storages = cut.held
        self.cut, self.emitted = cut, emitted
        self.of: dict[fx.Node, dict[Storage, Instance]] = {}
        self.made: dict[fx.Node, list[Instance]] = {}
        self.copies = 0
        # of what is no storage of the step: states of generators, packed copies
        self.sizes: dict[Storage, int] = {}
        self.calls = [
            n for g in (emitted.forward, emitted.backward) for n in g.nodes if n.op == "call_function"
        ]
        self.split = sum(n.op == "call_function" for n in emitted.forward.nodes)

    def run(self) -> Trace:
        results, shown, copied, last = self._followed()
        lasting = shown - len(self.cut.step.updated)
        renewed = {
            i for node in results[lasting:shown] for i in self.of[node].values() if last[i] == self.split - 1
        }
        return self._walk(last, copied, sum(map(self._bytes, renewed)))

    def events(self) -> list[Event]:
        """See `allocations`."""
        *_, last = self._followed()
        freed: dict[int, list[Instance]] = {}
        for instance, at in last.items():
            freed.setdefault(at, []).append(instance)
        names: dict[Instance, int] = {}
        numbers, found = itertools.count(1), list[Event]()
        for at, node in enumerate(self.calls):
            made = [i for i in self.made[node] if self._bytes(i)]
            names |= {instance: next(numbers) for instance in made}
            found += [(names[i], self._bytes(i)) for i in made]
            if workspace := self._workspace(node):
                found += [(0, workspace), (0, 0)]
            found += [(names.pop(i), 0) for i in freed.get(at, ()) if i in names]
        return [*found, *((name, 0) for name in names.values())]

    def _followed(self) -> tuple[Any, int, int, dict[Instance, int]]:
        """(results of the forward, how many are shown, bytes of copied buffers, instance → its last reader),
        all instances numbered.
        """
        self._number(self.emitted.forward, {})
        results: Any = self.emitted.forward.output_node().args[0]
        shown = len(self.cut.step.forward_results)
        self._number(self.emitted.backward, dict(zip(self.emitted.handed, results[shown:], strict=True)))
        copied = self._copy_overwritten()
        return results, shown, copied, self._last_reads(results, shown)

    def _copy_overwritten(self) -> int:
        """Instances of the old values of buffers, made when the backward begins; their bytes."""
        copied = 0
        for node, origin in overwritten(self.cut.step, self.emitted).items():
            first = next((n for n in self.calls[self.split :] if node.users), None)
            if first is not None:
                self.copies += 1
                self.of[node] = {s: (s, self.copies) for s in self.held.of[origin]}
                self.made[first] += self.of[node].values()
                copied += sum(map(self._bytes, self.of[node].values()))
        return copied

    def _number(self, graph: fx.Graph, handed: dict[fx.Node, fx.Node]) -> None:
        """Instances that each node's value refers to, and those that it makes."""
        for node in graph.nodes:
            if node in handed:
                self.of[node] = self.of[handed[node]]
            elif node in self.emitted.moves:
                self._number_move(node, self.emitted.moves[node])
            elif node.op == "call_function":
                there = {s: i for arg in node.all_input_nodes for s, i in self.of[arg].items()}
                origin = self.emitted.origin.get(node)
                self.copies += 1
                storages = self.held.of[origin] if origin is not None else (-self.copies,)
                fresh = set(self.held.made[origin]) if origin is not None else set(storages)
                self.of[node] = {
                    s: (s, self.copies) if s in fresh else there[s]
                    for s in storages
                    if s in fresh or s in there
                }
                self.made[node] = [(s, self.copies) for s in fresh]
            else:
                self.of[node] = {}

    def _number_move(self, node: fx.Node, move: Move) -> None:
        """A slot on the host has no instance; what only waits for a copy hands on the one that it
        was given.
        """
        if move.nbytes is None:
            given = {s: i for arg in node.all_input_nodes[:1] for s, i in self.of[arg].items()}
            self.of[node], self.made[node] = ({} if move.host > 0 else given), []
            return
        self.copies += 1
        storage = -self.copies if move.storage is None else move.storage
        self.sizes[storage] = move.nbytes
        self.of[node] = {storage: (storage, self.copies)}
        self.made[node] = [(storage, self.copies)]

    def _last_reads(self, results: tuple[fx.Node, ...], shown: int) -> dict[Instance, int]:
        last: dict[Instance, int] = {}
        for at, node in enumerate(self.calls):
            for used in (node, *node.all_input_nodes):
                for instance in self.of[used].values():
                    last[instance] = at
        end = len(self.calls)
        gradients: Any = self.emitted.backward.output_node().args[0]
        lasting = len(results[:shown]) - len(self.cut.step.updated)
        for node in (*results[:lasting], *gradients):
            last.update(dict.fromkeys(self.of[node].values(), end))
        for node in results[lasting:shown]:
            for instance in self.of[node].values():
                last[instance] = max(last[instance], self.split - 1)
        for node in results[shown:]:  # handed over, even if the backward only looks at it
            for instance in self.of[node].values():
                last[instance] = max(last[instance], self.split)
        return last

    def _walk(self, last: dict[Instance, int], copied: int, renewed: int) -> Trace:
        """`copied`: bytes of the copies of old values of buffers; `renewed`: of the new values, which are
        alive beside them.
        """
        freed: dict[int, list[Instance]] = {}
        for instance, at in last.items():
            freed.setdefault(at, []).append(instance)
        live = base = self.cut.base_bytes
        instants: list[MemoryInstant] = []
        saved = live
        host = most_hosted = 0
        for at, node in enumerate(self.calls):
            host += self.emitted.moves[node].host if node in self.emitted.moves else 0
            most_hosted = max(most_hosted, host)
            live += sum(self._bytes(i) for i in self.made[node])
            origin = self.emitted.origin.get(node)
            phase = "forward" if at < self.split else "backward"
            workspace = self._workspace(node)
            again = phase == "backward" and origin in self._forward_nodes
            instants.append(
                MemoryInstant(
                    phase=phase,
                    stage=self.emitted.stage[node],
                    node=node.name,
                    live=live + workspace,
                    again=again,
                )
            )
            live -= sum(self._bytes(i) for i in freed.get(at, ()))
            if at == self.split - 1:
                saved = live + copied
                if copied:
                    instants[-1] = replace(instants[-1], live=max(instants[-1].live, saved + renewed))
        peak = max(instants, key=lambda i: i.live)
        where = instants.index(peak)
        return Trace(
            peak_bytes=peak.live, peak=peak, instants=tuple(instants), saved_bytes=saved - base,
            end_bytes=live, parts=self._parts(where, last, peak.live), host_bytes=most_hosted,
        )  # fmt: skip

    def _workspace(self, node: fx.Node) -> int:
        """Bytes that an operator needs for itself; a replayed one also holds the generator's
        state of before.
        """
        if node in self.emitted.moves:
            return self.emitted.moves[node].workspace
        origin = self.emitted.origin.get(node)
        own = self.held.workspace[origin] if origin is not None else 0
        return own + (CPU_STATE_BYTES if node.target is replay else 0)

    def _parts(self, where: int, last: dict[Instance, int], peak: int) -> dict[str, int]:
        """What is alive at one instant, by kind."""
        made_at = {i: at for at, node in enumerate(self.calls) for i in self.made[node]}
        alive = [i for i, at in made_at.items() if at <= where <= last.get(i, -1)]
        returned: Any = self.emitted.backward.output_node().args[0]
        gradients = {i for node in returned for i in self.of[node].values()}
        grads = sum(self._bytes(i) for i in alive if i in gradients and where >= self.split)
        kept = sum(
            self._bytes(i)
            for i in alive
            if i not in gradients and made_at[i] < self.split and last[i] >= self.split
        )
        base = self.cut.base_bytes
        libraries = self.cut.libraries
        return {
            GIVEN: base - libraries,
            **({LIBRARIES: libraries} if libraries else {}),
            GRADIENTS: grads,
            KEPT: kept,
            WORKING: peak - base - grads - kept,
        }

    @cached_property
    def _forward_nodes(self) -> frozenset[fx.Node]:
        return frozenset(node for block in self.cut.blocks for node in block.forward)

    def _bytes(self, instance: Instance) -> int:
        return (
            self.held.nbytes[instance[0]]
            if instance[0] >= 0
            else self.sizes.get(instance[0], CPU_STATE_BYTES)
        )


def per_stage(trace: Trace) -> Iterator[tuple[str, int, int]]:
    """(phase, stage, most bytes alive) of every part of a schedule, in order."""
    best: dict[tuple[str, int], int] = {}
    for instant in trace.instants:
        key = (instant.phase, instant.stage)
        best[key] = max(best.get(key, 0), instant.live)
    yield from ((phase, stage, live) for (phase, stage), live in best.items())
