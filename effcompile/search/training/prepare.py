"""From a captured step to what the planner chooses from: its variants, cut into blocks, with the options of
every block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from effcompile.core import gpu
from effcompile.core.reasons import Reason
from effcompile.estimate.storages import Storages
from effcompile.ir.footprint import GIVEN, GRADIENTS, Footprint
from effcompile.ir.plan import Declined
from effcompile.ir.step import Step
from effcompile.passes.training.base import Case
from effcompile.passes.training.checkpoint import Checkpoint, keeping_all
from effcompile.passes.training.levers import Levers
from effcompile.planner.remat import BlockFront, BlockOption, BlockStage, Group, keep_fronts
from effcompile.schedules.blocks import Blocks
from effcompile.schedules.emit import Emitted, emit
from effcompile.schedules.into_blocks import cut_into_blocks, in_one_block
from effcompile.schedules.simulate import Trace, simulate
from effcompile.search.training.operator_costs import OperatorCosts, costly, seconds_of

#: Recomputation alone: what there is without asking.
ALONE = Levers()

#: Of each block what is kept, and what is held in which form; and the groups.
Choices = tuple[tuple[tuple[frozenset[str], frozenset[tuple[str, str]]], ...], tuple[Group, ...]]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One case of the step, ready to be planned.

    Attributes:
        case: its form, and what stands beside it.
        cut: the step in blocks. plain: the same before offload and compress were proposed in them.
        seconds: predicted time of forward and backward without recomputation.
        checkpoint: plans the blocks. solved: kind of block → its options, of all cases, found when they are
            first asked for.
        in_one: cuts the step into one block, which runs as autograd has it.
        known: what was found out of it (solve.leanest). made: its last schedules as they were emitted
            (solve.emitted).
    """

    case: Case
    cut: Blocks
    plain: Blocks
    seconds: float
    checkpoint: Checkpoint
    in_one: Callable[[], Blocks]
    solved: MutableMapping[str, BlockFront] = field(default_factory=dict, compare=False)
    known: MutableMapping[str, int] = field(default_factory=dict, compare=False)
    made: MutableMapping[Choices, tuple[Emitted, Trace]] = field(
        default_factory=dict, init=False, compare=False
    )

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
        """What is decided for the whole step → the option, in the plan's words; what was decided last is
        first.
        """
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
        return {
            kind: keeping_all(block)
            for kind, block in {block.stage.kind: block for block in self.cut.blocks}.items()
        }

    @property
    def end(self) -> Footprint:
        """What the backward leaves: what is there throughout, the loss and shown outputs, gradients."""
        held = self.cut.held
        lasting = (*self.step.outputs, *self.step.all_gradients)
        left = {s for node in lasting for s in held.of[node]} - held.fixed
        return Footprint(end={GIVEN: self.cut.base_bytes, GRADIENTS: sum(held.nbytes[s] for s in left)})


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """All variants of a step, and the step as it was captured: what stock torch would run.

    Attributes:
        variants: ready to be planned, those with fewer changes first. declined: what passes decline.
        captured: the step. seconds, footprint: predicted of it, with all kept that its backward reads.
        refused: options of the whole step that could not be had, with those beside which they were wanted,
            and the reason.
    """

    variants: list[Prepared]
    captured: Step
    seconds: float
    footprint: Footprint
    declined: tuple[Declined, ...] = ()
    refused: Sequence[tuple[Mapping[str, str], Reason]] = ()


def prepare(
    captured: Step, forms: Sequence[Case], checkpoint: Checkpoint, figures: OperatorCosts, *,
    levers: Levers = ALONE, solved: MutableMapping[str, BlockFront] | None = None,
) -> Preparation:  # fmt: skip
    """Every form of a step in blocks, whose options are found when they are asked for.

    A step of several forms is cut once.

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
        figures.measure(
            [*costly(captured, plain), *(n for key, held in traced.items() for n in costly(steps[key], held))]
        )
    solved = {} if solved is None else solved
    found: dict[int, Prepared] = {}
    with progress.step("cut the step into blocks"):
        for form in forms:
            if (key := id(form.step)) not in found:
                cut, seconds = (
                    _cut(form.step, traced[key], figures),
                    seconds_of(form.step, traced[key], figures),
                )
                in_one = partial(_cut, form.step, traced[key], figures, whole=True)
                whole = Prepared(
                    case=form, cut=cut, plain=cut, seconds=seconds, checkpoint=checkpoint, in_one=in_one
                )
                found[key] = with_levers(whole, levers, checkpoint, figures, solved)
    unplanned = simulate_unplanned(_cut(captured, plain, figures))
    return Preparation(
        variants=[replace(found[id(form.step)], case=form) for form in forms], captured=captured,
        seconds=seconds_of(captured, plain, figures), footprint=unplanned.footprint,
    )  # fmt: skip


def with_levers(
    prepared: Prepared,
    levers: Levers,
    checkpoint: Checkpoint,
    figures: OperatorCosts,
    solved: MutableMapping[str, BlockFront] | None = None,
) -> Prepared:
    """The same variant with the options that these levers leave its blocks.

    `solved`: fronts by kind, to which those found are added.
    """
    cut = levers.proposed(prepared.plain, levers.rates(figures.target, here=figures.here), figures.seconds)
    return replace(
        prepared, cut=cut, checkpoint=checkpoint, solved={} if solved is None else solved, known={}
    )


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
