"""The batch as a decision: the example inputs at other sizes, each size planned within the memory, and what
the plan says of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch.utils import _pytree as pytree

from effcompile.core.cost import Cost
from effcompile.core.errors import FormatError, InfeasibleError, UsageError
from effcompile.core.reasons import Because, OverBudget, Reason
from effcompile.core.types import Args, Kwargs
from effcompile.ir.plan import Decision, Declined, Plan
from effcompile.passes.training.base import Case, setting_of
from effcompile.passes.training.microbatch import examples_in
from effcompile.planner.batch import BY, LARGEST, BatchSearch, BatchTrial, wanted_sizes
from effcompile.planner.learning_rate import LearningRate, law
from effcompile.search.request import Task
from effcompile.search.training.branches import Branches
from effcompile.search.training.cases import Joint
from effcompile.search.training.fit import room_elsewhere
from effcompile.search.training.solve import keeping_everything
from effcompile.search.training.work import Work

SITE, KIND = "batch", "batch size"
#: McCandlish et al. 2018 (arXiv 1812.06162), equation 2.11.
_CRITICAL = (
    "by the critical batch of {} training takes {} × the fewest steps and {} × the fewest "
    "examples: a law, not a measurement"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A size's step, and its plan. `branches`: what it was chosen from."""

    work: Work
    case: Case
    branches: Branches
    joint: Joint


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """The size that is foreseen to be best, and the search that found it.

    Attributes:
        best: with its plan. search: over the sizes that were asked for. failed: size → why nothing fits.
            there: examples of the inputs.
    """

    task: Task
    best: BatchTrial[Planned]
    search: BatchSearch[Planned]
    failed: Mapping[int, InfeasibleError]
    there: int

    @property
    def planned(self) -> Planned:
        assert self.best.made is not None
        return self.best.made

    def told_in(self, plan: Plan, measured: Mapping[int, float] = MappingProxyType({})) -> Plan:
        """The plan with the batch among its decisions.

        `measured`: size → examples a second, where steps of several sizes were run.
        """
        tried = sorted(self.search.tried.values(), key=lambda trial: trial.batch)
        given = next((trial for trial in tried if trial.batch == self.there), None)
        decision = _decision(self.best, given, self.there, len(tried), len(self.search.sizes), measured)
        declined = tuple(
            _declined(self.best, [trial for trial in tried if trial is not self.best], self.failed, measured)
        )
        notes = tuple(_notes(self.task, self.best, self.planned.work))
        return replace(
            plan,
            decisions=(decision, *plan.decisions),
            declined=(*declined, *plan.declined),
            notes=(*plan.notes, *notes),
        )


def resized(args: Args, kwargs: Kwargs, size: int) -> tuple[Args, Kwargs]:
    """The inputs with so many examples: those that are there, over and over.

    Raises:
        UsageError: no axis of the inputs is one of examples.
    """
    there = examples_in(args, kwargs)
    if there == size:
        return tuple(args), dict(kwargs)
    if there == 1:
        raise UsageError(
            "batch: it cannot be told which axis of the inputs is that of the examples, as the example "
            "inputs have but one. Give inputs of two examples or more."
        )

    def rows(value: torch.Tensor) -> torch.Tensor:
        if not value.dim() or value.shape[0] != there:
            return value
        picked = value.detach()[torch.arange(size, device=value.device) % there]
        return picked.requires_grad_(value.requires_grad)

    given: tuple[tuple[object, ...], dict[str, object]] = pytree.tree_map_only(
        torch.Tensor, rows, (tuple(args), dict(kwargs))
    )
    return given


def sized(task: Task, work: Work) -> Sized:
    """The size of those asked for that takes the most examples a second within the memory.

    Raises:
        InfeasibleError: no size fits; that of the smallest. UsageError: the sizes are none, or the inputs
            have one example.
    """
    asked = task.request
    assert asked.batch is not None
    if asked.lr is not None and work.optimizer is not None:
        law(type(work.optimizer).__name__)  # raises before anything is planned
    wanted, there = wanted_sizes(asked.batch), examples_in(work.args, work.kwargs)
    failed: dict[int, InfeasibleError] = {}

    def attempt(size: int) -> BatchTrial[Planned]:
        with work.progress.step(f"plan a batch of {size}"):
            return _attempt(work, size, asked.keep_outputs, failed)

    search = BatchSearch[Planned](sizes=wanted, memory=_budget(work), attempt=attempt)
    best = search.best(there)
    if best is None or best.made is None:
        raise failed[min(failed)]
    return Sized(task=task, best=best, search=search, failed=failed, there=there)


def as_saved(task: Task, plan: Plan) -> Task:
    """The request at the size that a saved plan was made for.

    Raises:
        FormatError: the plan says a size that is none.
    """
    found = next((d for d in plan.decisions if d.by == BY), None)
    if found is None:
        return task
    size = setting_of(found.settings, f"{SITE}: {KIND}", "examples", int)
    if not 0 < size <= LARGEST:
        raise FormatError(
            f"The plan's batch has {size} examples: 1 to {LARGEST:,} are wanted. Plan again, or restore "
            "the file."
        )
    args, kwargs = resized(task.args, task.kwargs, size)
    return replace(task, args=args, kwargs=kwargs)


def _attempt(
    work: Work, size: int, keep_outputs: bool, failed: dict[int, InfeasibleError]
) -> BatchTrial[Planned]:
    args, kwargs = resized(work.args, work.kwargs, size)
    mine = replace(work, args=args, kwargs=kwargs, fronts={})
    branches = Branches(work=mine, case=(case := mine.capture(keep_outputs)))
    fastest = min(branches.whole.variants, key=lambda variant: variant.least_seconds)
    size_of_all = (keeping_everything(fastest).trace.footprint + fastest.case.beside).peak_bytes
    try:
        joint = branches.solve(_budget(work))
    except InfeasibleError as error:
        failed[size] = error
        return BatchTrial(batch=size, unlimited=fastest.least_seconds, bytes=size_of_all)
    made = Planned(work=mine, case=case, branches=branches, joint=joint)
    unlimited = min(fastest.least_seconds, joint.seconds)
    return BatchTrial(batch=size, unlimited=unlimited, bytes=size_of_all, seconds=joint.seconds, made=made)


def _budget(work: Work) -> int:
    """What a step may take: the user's limit, and never more than the machine has, with the error of
    predictions for one elsewhere.
    """
    target = work.figures.target
    room = target.memory_bytes if work.figures.here else room_elsewhere(target)
    return room if work.goal.memory is None else min(work.goal.memory, room)


# ------------------------------------------------------------------ what the plan says


def _decision(
    best: BatchTrial[Planned],
    given: BatchTrial[Planned] | None,
    there: int,
    tried: int,
    wanted: int,
    measured: Mapping[int, float],
) -> Decision:
    """The size, beside that of the example inputs where it was tried and fits."""
    assert best.made is not None and best.seconds is not None
    before = given if given is not None and given.made is not None else best
    why: Reason = Because(
        "{} examples a second, the most of {} sizes; {} were planned", (_short(best.rate), wanted, tried)
    )
    if len(measured) > 1:
        text = (
            "{} examples a second measured, the most of {} sizes that were run in turn; {} of {} were planned"
        )
        why = Because(text, (_short(measured[best.batch]), len(measured), tried, wanted))
    return Decision(
        site=SITE, kind=KIND, option=_name(best.batch), baseline=_name(there), by=BY,
        cost=_cost(best), baseline_cost=_cost(before), settings={"examples": best.batch}, why=why,
    )  # fmt: skip


def _declined(
    best: BatchTrial[Planned],
    others: list[BatchTrial[Planned]],
    failed: Mapping[int, InfeasibleError],
    measured: Mapping[int, float],
) -> Iterator[Declined]:
    for trial in others:
        reason: Reason = Because(
            "{} examples a second: {share} fewer", (_short(trial.rate), 1 - trial.rate / best.rate)
        )
        if trial.seconds is None:
            reason = OverBudget(needed=int(failed[trial.batch].needed))
        elif trial.batch in measured:
            rate, most = measured[trial.batch], measured[best.batch]
            reason = Because("{} examples a second measured: {share} fewer", (_short(rate), 1 - rate / most))
        elif trial.rate > best.rate:
            reason = Because(
                "{} examples a second foreseen, but sizes near it took longer than foreseen",
                (_short(trial.rate),),
            )
        yield Declined(site=SITE, kind=KIND, option=_name(trial.batch), by=BY, reason=reason)


def _notes(task: Task, best: BatchTrial[Planned], work: Work) -> Iterator[Reason]:
    """What the user has to do with it."""
    there = examples_in(task.args, task.kwargs)
    if best.batch != there:
        text = "the step is of {} examples: the {} of the example inputs were repeated; give it batches of {}"
        yield Because(text, (best.batch, there, best.batch))
    if task.request.lr is not None and work.optimizer is not None:
        given, name = LearningRate.of(task.request.lr), type(work.optimizer).__name__
        text = (
            "learning rate {} for {} examples, from {} for {} by the {name} law of {name}: a law, not "
            "a measurement; it was not set"
        )
        yield Because(
            text,
            (
                _short(given.at(best.batch, name)),
                best.batch,
                _short(given.rate),
                given.batch,
                law(name),
                name,
            ),
        )
        if given.critical is not None:
            share = best.batch / given.critical
            yield Because(_CRITICAL, (_short(given.critical), _short(1 + 1 / share), _short(1 + share)))


def _cost(trial: BatchTrial[Planned]) -> Cost:
    assert trial.made is not None and trial.seconds is not None
    return Cost(seconds=trial.seconds, bytes_transient=trial.made.joint.peak_bytes)


def _name(size: int) -> str:
    return f"{size} example{'s' * (size > 1)}"


def _short(rate: float) -> float:
    """To three digits."""
    return float(f"{rate:.3g}")
