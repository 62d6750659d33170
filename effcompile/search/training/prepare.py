"""From a captured step to what the planner chooses from: its variants, cut into blocks, with the options of every block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType

import torch
from torch import fx

from effcompile.core import gpu
from effcompile.core.goal import Goal
from effcompile.core.reasons import Reason
from effcompile.core.types import Value
from effcompile.estimate import operators
from effcompile.estimate.operators import Measured
from effcompile.estimate.roofline import roofline_seconds
from effcompile.estimate.storages import Storages, graph_storages
from effcompile.ir.footprint import GIVEN, GRADIENTS, Footprint
from effcompile.ir.plan import Declined
from effcompile.ir.step import Step
from effcompile.machine.calibration import Calibration
from effcompile.machine.target import Target
from effcompile.ops import products
from effcompile.ops.products import Product, of_node
from effcompile.ops.workspace import workspace_bytes
from effcompile.ops.workspace_on_gpu import calls_products, workspace_on_gpu
from effcompile.passes.training.base import Case, StepContext
from effcompile.passes.training.checkpoint import Checkpoint, keeping_all
from effcompile.passes.training.levers import Levers
from effcompile.planner.remat import BlockFront, BlockOption, BlockStage, Group, keep_fronts
from effcompile.schedules.blocks import Blocks, cut_into_blocks, in_one_block, reads_of
from effcompile.schedules.emit import Emitted, emit
from effcompile.schedules.simulate import Trace, simulate
from effcompile.search.progress import QUIET, Progress

#: Recomputation alone: what there is without asking.
ALONE = Levers()

#: Of each block what is kept, and what is held in which form; and the groups.
Choices = tuple[tuple[tuple[frozenset[str], frozenset[tuple[str, str]]], ...], tuple[Group, ...]]

_NOTHING: Mapping[tuple[str, str], Reason] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One case of the step, ready to be planned.

    Attributes:
        case: its form, and what stands beside it.
        cut: the step in blocks. plain: the same before offload and compress were proposed in them.
        seconds: predicted time of forward and backward without recomputation.
        checkpoint: plans the blocks. solved: kind of block → its options, of all cases, found when they are first asked for.
        in_one: cuts the step into one block, which runs as autograd has it.
        known: what was found out of it (solve.leanest). made: its last schedules as they were emitted (solve.emitted).
    """

    case: Case
    cut: Blocks
    plain: Blocks
    seconds: float
    checkpoint: Checkpoint
    in_one: Callable[[], Blocks]
    solved: MutableMapping[str, BlockFront] = field(default_factory=dict, compare=False)
    known: MutableMapping[str, int] = field(default_factory=dict, compare=False)
    made: MutableMapping[Choices, tuple[Emitted, Trace]] = field(default_factory=dict, init=False, compare=False)

    @property
    def step(self) -> Step:
        return self.cut.step

    @cached_property
    def uncut(self) -> Prepared:
        """The same with the step as one block, in autograd's own order."""
        whole = replace(self.in_one(), host=self.cut.host, ways=self.cut.ways)
        return replace(self, cut=whole, plain=whole, solved={}, known={})

    @property
    def stages(self) -> tuple[BlockStage, ...]:
        return tuple(block.stage for block in self.cut.blocks)

    @property
    def options(self) -> Mapping[str, str]:
        """What is decided for the whole step → the option, in the plan's words; what was decided last is first."""
        return dict(reversed(self.case.options.items()))

    @property
    def least_seconds(self) -> float:
        """Of the whole step with nothing recomputed."""
        return self.case.seconds(self.seconds)

    @cached_property
    def fronts(self) -> dict[str, BlockFront]:
        """Kind of block → its options. Equal blocks are solved once."""
        wanted = {block.stage.kind: block for block in self.cut.blocks}
        missing = wanted.keys() - self.solved.keys()
        self.solved.update({kind: self.checkpoint.front(wanted[kind]) for kind in wanted if kind in missing})
        if missing:
            keep_fronts()
        return {kind: self.solved[kind] for kind in wanted}

    @property
    def blocks(self) -> dict[str, tuple[BlockOption, ...]]:
        """Kind of block → its options."""
        return {kind: front.options for kind, front in self.fronts.items()}

    @cached_property
    def whole(self) -> dict[str, BlockOption]:
        """Kind of block → the option that keeps everything."""
        return {kind: keeping_all(block) for kind, block in {block.stage.kind: block for block in self.cut.blocks}.items()}

    @property
    def end(self) -> Footprint:
        """What the backward leaves: what is there throughout, the loss and shown outputs, gradients."""
        held = self.cut.held
        lasting = (*self.step.outputs, *self.step.all_gradients)
        left = {s for node in lasting for s in held.of[node]} - held.fixed
        return Footprint(end={GIVEN: self.cut.base_bytes, GRADIENTS: sum(held.nbytes[s] for s in left)})


@dataclass(kw_only=True)
class OperatorCosts:
    """Seconds and workspace of operators: measured on this machine, else by the target's roofline.

    Attributes:
        target: the machine planned for.
        here: whether it is this one, and operators may be run.
        known: operator → what was measured. store: of this machine, where it is kept.
        modelled: operators that had to be modelled.
        doubted: operators whose seconds are measured again when they are asked for.
        progress: is told what is being measured.
        traced: graphs of steps, which do not change, → their storages.
    """

    target: Target
    here: bool
    known: MutableMapping[str, Measured] = field(default_factory=dict)
    store: Calibration | None = None
    modelled: set[str] = field(default_factory=set)
    doubted: set[str] = field(default_factory=set)
    progress: Progress = QUIET
    traced: MutableMapping[fx.Graph, Storages] = field(default_factory=dict)

    def context(self, goal: Goal, forbidden: Mapping[tuple[str, str], Reason] = _NOTHING) -> StepContext:
        """What passes propose for, with these figures. `forbidden`: (kind, option) → why it is out of the question."""
        return StepContext(goal=goal, target=self.target, here=self.here, prices=self, forbidden=forbidden)

    def doubt(self, nodes: Iterable[fx.Node]) -> None:
        """Have these measured again when they are asked for. What they take for themselves stays: schedules were found to hold with it."""
        self.doubted.update(key for node in nodes if (key := operators.key(node)) in self.known)

    def measure(self, nodes: Iterable[fx.Node]) -> None:
        """Run what is not known yet, or doubted."""
        if not self.here:
            return
        asked = {operators.key(node): node for node in nodes if node.op == "call_function"}
        before = {key: self.known.pop(key) for key in self.doubted & asked.keys() & self.known.keys()}
        operators.measure(asked.values(), self.known, progress=lambda done, of: self.progress.update("measure operators", done, of))
        self.known.update({key: self.known.get(key, was).with_bytes_of(was) for key, was in before.items()})
        self.doubted -= before.keys()

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
        return [roofline_seconds(n, self.target) if one is None else self._said(one) for n, one in zip(nodes, found, strict=True)]

    def _said(self, found: Measured) -> float:
        """A GPU may be done with an operator before the host has said the next one."""
        return found.seconds if self.target.device == "cpu" else max(found.seconds, self.target.launch_seconds)

    def unplanned(self, *steps: Step) -> list[tuple[float, int]]:
        """Of each step the seconds of its operators, and the bytes that the largest of them reads, makes and needs for itself."""
        held = [(step, self.storages(step)) for step in steps]
        self.measure([node for step, storages in held for node in _costly(step, storages)])
        return [(_seconds(step, storages, self), _largest(step, storages, self)) for step, storages in held]

    def storages(self, step: Step) -> Storages:
        """What each value of a step holds, traced once."""
        if step.graph not in self.traced:
            self.traced[step.graph] = graph_storages(step.graph, lambda node: node.meta["val"])
        return self.traced[step.graph]

    def workspace(self, node: fx.Node, traced: int) -> int:
        """Bytes that an operator needs for itself: the most of what was traced, measured and is known of our own operators.

        What matrix products take for themselves is measured on this machine, with their operator or alone; for another one it is a margin.
        """
        found = self.known.get(operators.key(node))
        args = [_value(arg) for arg in node.args]
        if self.target.device != "cpu":
            own = (workspace_on_gpu(node.target, args, node.kwargs) or 0) if found is None else found.workspace
            return max(traced, own)
        if not self.here:
            ours = workspace_bytes(node.target, args, node.kwargs, self.scratch)
            return max(traced, ours or 0, sum(map(self.scratch, of_node(node))))
        ours = workspace_bytes(node.target, args, node.kwargs, products.measured if found is None else products.unknown)
        return max(traced, found.workspace if found is not None else 0, ours or 0)

    def made_bytes(self, node: fx.Node, traced: Sequence[int]) -> Sequence[int]:
        """Bytes of the storages that an operator makes: as traced on fakes, or larger where kernels were seen to take more."""
        found = self.known.get(operators.key(node))
        if found is None or len(found.results) != len(traced):
            return traced
        return [max(pair) for pair in zip(traced, found.results, strict=True)]

    def libraries(self, step: Step) -> int:
        """Bytes that products keep for themselves: once for the forward, and once for the thread that runs the backward.

        Those with a bias may be run in both: what is recomputed, is in the backward.
        """
        plain, biased = self.target.library_bytes
        calls = [node for node in step.graph.nodes if calls_products(node)]
        return 2 * (plain * bool(calls) + biased * any(node.target is torch.ops.aten.addmm.default for node in calls))

    def scratch(self, product: Product) -> int:
        """The margin for a product on the target, which is not here."""
        return products.bounded(product) if self.target.device == "cpu" else 0


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """All variants of a step, and the step as it was captured: what stock torch would run.

    Attributes:
        variants: ready to be planned, those with fewer changes first. declined: what passes decline.
        captured: the step. seconds, footprint: predicted of it, with all kept that its backward reads.
        refused: options of the whole step that could not be had, with those beside which they were wanted, and the reason.
    """

    variants: list[Prepared]
    captured: Step
    seconds: float
    footprint: Footprint
    declined: tuple[Declined, ...] = ()
    refused: Sequence[tuple[Mapping[str, str], Reason]] = ()


def prepare(
    captured: Step, forms: Sequence[Case], checkpoint: Checkpoint, figures: OperatorCosts, *, levers: Levers = ALONE,
    solved: MutableMapping[str, BlockFront] | None = None,
) -> Preparation:  # fmt: skip
    """Every form of a step in blocks, whose options are found when they are asked for. A step of several forms is cut once.

    Args:
        captured: the step as it was captured.
        forms: what passes have made of it (passes/training/base.py).
        checkpoint: makes the options of a block.
        figures: times of operators.
        levers: what may be done with values beside keeping and recomputing them.
        solved: fronts of blocks by kind, found and added.
    """
    progress = figures.progress
    steps = {id(form.step): form.step for form in forms}
    with progress.step("trace storages"):
        traced = {key: figures.storages(step) for key, step in steps.items()}
        plain = figures.storages(captured)
    with progress.step("measure operators"):
        figures.measure([*_costly(captured, plain), *(n for key, held in traced.items() for n in _costly(steps[key], held))])
    solved = {} if solved is None else solved
    found: dict[int, Prepared] = {}
    with progress.step("cut the step into blocks"):
        for form in forms:
            if (key := id(form.step)) not in found:
                cut, seconds = _cut(form.step, traced[key], figures), _seconds(form.step, traced[key], figures)
                in_one = partial(_cut, form.step, traced[key], figures, whole=True)
                whole = Prepared(case=form, cut=cut, plain=cut, seconds=seconds, checkpoint=checkpoint, in_one=in_one)
                found[key] = with_levers(whole, levers, checkpoint, figures, solved)
    unplanned = simulate_unplanned(_cut(captured, plain, figures))
    return Preparation(
        variants=[replace(found[id(form.step)], case=form) for form in forms], captured=captured,
        seconds=_seconds(captured, plain, figures), footprint=unplanned.footprint,
    )  # fmt: skip


def _largest(step: Step, held: Storages, figures: OperatorCosts) -> int:
    """Most bytes that one operator reads, makes and needs for itself: no schedule of the step can do with fewer."""
    return max((_footprint(node, held, figures) for node in _costly(step, held)), default=0)


def _footprint(node: fx.Node, held: Storages, figures: OperatorCosts) -> int:
    return sum(held.nbytes[s] for s in (*reads_of(node, held), *held.made[node])) + figures.workspace(node, held.workspace[node])


def with_levers(
    prepared: Prepared,
    levers: Levers,
    checkpoint: Checkpoint,
    figures: OperatorCosts,
    solved: MutableMapping[str, BlockFront] | None = None,
) -> Prepared:
    """The same variant with the options that these levers leave its blocks. `solved`: fronts by kind, to which those found are added."""
    cut = levers.proposed(prepared.plain, levers.rates(figures.target, here=figures.here), figures.seconds)
    return replace(prepared, cut=cut, checkpoint=checkpoint, solved={} if solved is None else solved, known={})


def simulate_unplanned(cut: Blocks) -> Trace:
    """The step with all kept that its backward reads."""
    return simulate(cut, emit(cut, cut.decidable))


def cut_step(step: Step, figures: OperatorCosts) -> Blocks:
    """A step in blocks, with no options proposed yet."""
    return _cut(step, figures.storages(step), figures)


def _cut(step: Step, held: Storages, figures: OperatorCosts, *, whole: bool = False) -> Blocks:
    nbytes = dict(held.nbytes)
    for node, made in held.made.items():
        if made and node.op == "call_function":
            nbytes.update(zip(made, figures.made_bytes(node, [held.nbytes[s] for s in made]), strict=True))
    workspace = {node: figures.workspace(node, size) for node, size in held.workspace.items()}
    if figures.target.device != "cpu":
        nbytes = {storage: gpu.rounded(size) for storage, size in nbytes.items()}
        workspace = {node: gpu.rounded(size) for node, size in workspace.items()}
    exact = replace(held, nbytes=nbytes, workspace=workspace)
    cut = (in_one_block if whole else cut_into_blocks)(step, exact, figures.seconds)
    return cut.beside_libraries(figures.libraries(step))


def _seconds(step: Step, held: Storages, figures: OperatorCosts) -> float:
    return sum(figures.seconds(node) for node in _costly(step, held))


def _costly(step: Step, held: Storages) -> Iterator[fx.Node]:
    """Operators that do something: views and getitems are free."""
    yield from (n for n in step.graph.nodes if n.op == "call_function" and (held.made[n] or n in held.written))


def _value(arg: Value) -> Value:
    """An argument with its nodes replaced by their (fake) values."""
    return fx.map_arg(arg, lambda n: n.meta.get("val"))
