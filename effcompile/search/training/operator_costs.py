"""What running each operator of a step takes: seconds, and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import fx

from effcompile.core.goal import Goal
from effcompile.core.pace import Pace, at_pace
from effcompile.core.reasons import Reason
from effcompile.core.types import Value
from effcompile.estimate import operators
from effcompile.estimate.operators import Measured
from effcompile.estimate.roofline import roofline_seconds
from effcompile.estimate.storages import Storages, graph_storages
from effcompile.ir.step import Step
from effcompile.machine.calibration import Calibration
from effcompile.machine.cold import pushed_out
from effcompile.machine.load import busy
from effcompile.machine.target import Target
from effcompile.ops import products
from effcompile.ops.products import Product, of_node
from effcompile.ops.workspace import workspace_bytes
from effcompile.ops.workspace_on_gpu import calls_products, workspace_on_gpu
from effcompile.passes.training.base import StepContext
from effcompile.schedules.blocks import reads_of
from effcompile.search.progress import QUIET, Progress

_NOTHING: Mapping[tuple[str, str], Reason] = MappingProxyType({})


@dataclass(kw_only=True)
class OperatorCosts:
    """Seconds and workspace of operators: measured on this machine, else by the target's roofline.

    Attributes:
        target: the machine planned for.
        here: whether it is this one, and operators may be run.
        known: operator → what was measured. store: of this machine, where it is kept.
        modelled: operators that had to be modelled.
        doubted: operators whose seconds are measured again when they are asked for. asked: all whose figures
            were.
        progress: is told what is being measured. pace: that timings are held against.
        cold: bytes of a step's other values that are read between two operators on the same.
        traced: graphs of steps, which do not change, → their storages.
    """

    target: Target
    here: bool
    known: MutableMapping[str, Measured] = field(default_factory=dict)
    store: Calibration | None = None
    modelled: set[str] = field(default_factory=set)
    doubted: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    progress: Progress = QUIET
    pace: Pace | None = None
    cold: int = 0
    traced: MutableMapping[fx.Graph, Storages] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.here:
            self.doubt_busy()

    def context(self, goal: Goal, forbidden: Mapping[tuple[str, str], Reason] = _NOTHING) -> StepContext:
        """What passes propose for, with these figures.

        `forbidden`: (kind, option) → why it is out of the question.
        """
        return StepContext(goal=goal, target=self.target, here=self.here, prices=self, forbidden=forbidden)

    def doubt(self, nodes: Iterable[fx.Node]) -> None:
        """Have these measured again when they are asked for.

        What they take for themselves stays: schedules were found to hold with it.
        """
        self.doubted.update(key for node in nodes if (key := operators.key(node)) in self.known)

    def measure(self, nodes: Iterable[fx.Node]) -> None:
        """Run what is not known yet, or doubted; what is timed while others use the machine is marked."""
        if not self.here:
            return
        counted, asked = Counter[str](), dict[str, fx.Node]()
        for node in nodes:
            if node.op == "call_function":
                asked[key := operators.key(node)] = node
                counted[key] += 1
        self.asked.update(asked)
        before = {key: self.known.pop(key) for key in self.doubted & asked.keys() & self.known.keys()}
        todo = [key for key in asked if key not in self.known]
        tell = lambda done, of: self.progress.update("measure operators", done, of)  # noqa: E731
        with at_pace(self.pace):
            shares = self._shares(asked, counted) if todo and self.pace is not None else {}
            operators.measure(asked.values(), self.known, cold=self.cold, progress=tell, shares=shares)
        self.known.update({key: self.known.get(key, was).with_bytes_of(was) for key, was in before.items()})
        self.doubted -= before.keys()
        timed = [key for key in todo if key in self.known]
        if timed and self.target.device == "cpu" and busy():
            self.known.update({key: replace(self.known[key], busy=True) for key in timed})

    def _shares(self, asked: Mapping[str, fx.Node], times: Mapping[str, int]) -> Mapping[str, float]:
        """Operator → what part of the seconds of all of these its own are, by the target's roofline. `times`:
        that it is run.
        """
        seconds = {key: times[key] * roofline_seconds(node, self.target) for key, node in asked.items()}
        return {key: each / sum(seconds.values()) for key, each in seconds.items()}

    def within(self, step: Step) -> None:
        """Have operators timed as they run in a step: what its values leave in the caches.

        Those timed otherwise are doubted.
        """
        if not self.here or self.target.device != "cpu":
            return
        self.cold = pushed_out(sum(self.storages(step).nbytes.values()))
        self.doubted |= {key for key, found in self.known.items() if found.cold != self.cold}

    def doubt_busy(self) -> None:
        """Doubt what was timed while others used the machine, unless they still do."""
        timed = {key for key, found in self.known.items() if found.busy}
        if timed and not busy():
            self.doubted |= timed

    def seconds(self, node: fx.Node) -> float:
        """Time of one operator."""
        found = self.known.get(operators.key(node))
        if found is not None:
            return self._said(found)
        self.modelled.add(str(node.target))
        return roofline_seconds(node, self.target)

    def priced(self, nodes: Sequence[fx.Node]) -> list[float]:
        """Times of operators that may never run in a plan: measured, or modelled where they cannot be."""
        self.measure(nodes)
        found = [self.known.get(operators.key(node)) for node in nodes]
        return [
            roofline_seconds(n, self.target) if one is None else self._said(one)
            for n, one in zip(nodes, found, strict=True)
        ]

    def _said(self, found: Measured) -> float:
        """A GPU may be done with an operator before the host has said the next one."""
        return (
            found.seconds if self.target.device == "cpu" else max(found.seconds, self.target.launch_seconds)
        )

    def unplanned(self, *steps: Step) -> list[tuple[float, int]]:
        """Of each step the seconds of its operators, and the bytes that the largest of them reads, makes and
        needs for itself.
        """
        held = [(step, self.storages(step)) for step in steps]
        self.measure([node for step, storages in held for node in costly(step, storages)])
        return [(seconds_of(step, storages, self), _largest(step, storages, self)) for step, storages in held]

    def storages(self, step: Step) -> Storages:
        """What each value of a step holds, traced once."""
        if step.graph not in self.traced:
            self.traced[step.graph] = graph_storages(step.graph, lambda node: node.meta["val"])
        return self.traced[step.graph]

    def workspace(self, node: fx.Node, traced: int) -> int:
        """Bytes that an operator needs for itself: the most of what was traced, measured and is known of our
        own operators.

        What matrix products take for themselves is measured on this machine, with their operator or alone;
        for another one it is a margin.
        """
        found = self.known.get(operators.key(node))
        args = [_value(arg) for arg in node.args]
        if self.target.device != "cpu":
            own = (
                (workspace_on_gpu(node.target, args, node.kwargs) or 0) if found is None else found.workspace
            )
            return max(traced, own)
        if not self.here:
            ours = workspace_bytes(node.target, args, node.kwargs, self.scratch)
            return max(traced, ours or 0, sum(map(self.scratch, of_node(node))))
        ours = workspace_bytes(
            node.target, args, node.kwargs, products.measured if found is None else products.unknown
        )
        return max(traced, found.workspace if found is not None else 0, ours or 0)

    def made_bytes(self, node: fx.Node, traced: Sequence[int]) -> Sequence[int]:
        """Bytes of the storages that an operator makes: as traced on fakes, or larger where kernels were seen
        to take more.
        """
        found = self.known.get(operators.key(node))
        if found is None or len(found.results) != len(traced):
            return traced
        return [max(pair) for pair in zip(traced, found.results, strict=True)]

    def libraries(self, step: Step) -> int:
        """Bytes that products keep for themselves: once for the forward, and once for the thread that runs
        the backward.

        Those with a bias may be run in both: what is recomputed, is in the backward.
        """
        plain, biased = self.target.library_bytes
        calls = [node for node in step.graph.nodes if calls_products(node)]
        return 2 * (
            plain * bool(calls) + biased * any(node.target is torch.ops.aten.addmm.default for node in calls)
        )

    def scratch(self, product: Product) -> int:
        """The margin for a product on the target, which is not here."""
        return products.bounded(product) if self.target.device == "cpu" else 0


def _largest(step: Step, held: Storages, figures: OperatorCosts) -> int:
    """Most bytes that one operator reads, makes and needs for itself: no schedule of the step can do with
    fewer.
    """
    return max((_footprint(node, held, figures) for node in costly(step, held)), default=0)


def _footprint(node: fx.Node, held: Storages, figures: OperatorCosts) -> int:
    return sum(held.nbytes[s] for s in (*reads_of(node, held), *held.made[node])) + figures.workspace(
        node, held.workspace[node]
    )


def seconds_of(step: Step, held: Storages, figures: OperatorCosts) -> float:
    """Of a whole step, with nothing recomputed."""
    return sum(figures.seconds(node) for node in costly(step, held))


def costly(step: Step, held: Storages) -> Iterator[fx.Node]:
    """Operators that do something: views and getitems are free."""
    yield from (
        n for n in step.graph.nodes if n.op == "call_function" and (held.made[n] or n in held.written)
    )


def _value(arg: Value) -> Value:
    """An argument with its nodes replaced by their (fake) values."""
    return fx.map_arg(arg, lambda n: n.meta.get("val"))
