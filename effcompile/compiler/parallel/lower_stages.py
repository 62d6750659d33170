"""A pipeline on a mesh: each rank plans its own stages, is left with their parameters, and runs them in the
schedule's order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

import torch
from torch import nn

from effcompile.backends.torch.pipeline import Chunk, Course, PipelineRunner
from effcompile.backends.torch.ranks import Ranks
from effcompile.backends.torch.training import StepRunner
from effcompile.capture.state import ModelGuards
from effcompile.compiler.parallel.axes import AlongAxes
from effcompile.compiler.training.compile import plan_training
from effcompile.core.cost import Cost
from effcompile.core.errors import FormatError, InfeasibleError
from effcompile.core.reasons import Because, Reason
from effcompile.core.types import Args, Kwargs
from effcompile.ir.figures import Totals
from effcompile.ir.plan import Decision, Plan, Setting
from effcompile.ir.step import Step
from effcompile.passes import load_training_passes
from effcompile.passes.training import states
from effcompile.passes.training.checkpoint import carried_out
from effcompile.passes.training.pipeline import KIND, SITE, Pipeline
from effcompile.passes.training.saved_blocks import chosen, held
from effcompile.runtime.meeting import Meeting, RepeatedInfeasibleError
from effcompile.schedules.blocks import WHOLE
from effcompile.schedules.emit import Emitted
from effcompile.search.parallel.pipelined import Pipelined, pipelined
from effcompile.search.progress import entry
from effcompile.search.request import Asked, Task
from effcompile.search.training.build import build_plan, describe_inputs, fingerprint
from effcompile.search.training.cases import Joint
from effcompile.search.training.prepare import Preparation, cut_step, simulate_unplanned
from effcompile.search.training.solve import Schedule
from effcompile.search.training.work import Work, make_work

#: A note where stages draw random numbers.
_DRAWN = (
    "each stage draws for each micro-batch anew (dropout), from a seed of the step's: other numbers than one "
    "process draws"
)


def stages_asked(task: Task, rank: int = 0) -> Pipelined:
    """The step that a request's passes, or its plan, ask to be pipelined, in stages; `rank`: along "tp".

    Raises:
        FormatError: a plan of another model, or one that counts an optimizer's states where there is none, or
            the other way round.
    """
    plan = task.request.plan
    work = make_work(task if plan is None else task.for_plan(plan))
    if plan is not None:
        _check_optimizer(plan, work)
    asked = AlongAxes.asked(work.passes) if plan is None else AlongAxes.decided(plan, rank)
    found = pipelined(work, asked.pipeline, asked.tensor, asked.shard)
    if plan is not None and fingerprint(found.whole.step) != plan.fingerprint:
        raise FormatError(
            "This plan was made for another model or other shapes: its step has the fingerprint "
            f"{plan.fingerprint}."
        )
    return found


def _check_optimizer(plan: Plan, work: Work) -> None:
    """Raises FormatError where a plan counts an optimizer's states and there is none, or the
    other way round.
    """
    counted = any(d.kind == states.KIND for d in plan.decisions)
    if counted and work.optimizer is None:
        raise FormatError("The plan holds optimizer states: give the optimizer, too, when it is applied.")
    if not counted and work.optimizer is not None:
        raise FormatError(
            "The plan was made without an optimizer. Leave the optimizer out, or plan again with it."
        )


def plan_stages(task: Task) -> Plan:
    """The plan of the fullest rank, made for all of them where there is one process.

    Raises:
        InfeasibleError: a rank has no plan. UsageError: the model has no such stages.
    """
    found = stages_asked(task)
    refused: list[InfeasibleError] = []
    for form in found.forms:
        spread = found.over(form)
        try:
            made = {rank: spread.planned(rank) for rank in range(found.asked.ranks)}
        except InfeasibleError as error:
            refused.append(error)
            continue
        peaks = {rank: spread.peak_bytes(rank, schedules) for rank, schedules in made.items()}
        fullest = max(peaks, key=peaks.__getitem__)
        told = Because(
            "predicted peak of each rank: " + ", ".join(["{bytes}"] * len(peaks)), tuple(peaks.values())
        )
        return _plan(spread, fullest, made[fullest], (told,))
    raise min(refused, key=lambda error: error.needed)


def plan_parts(model: nn.Module, args: Args, kwargs: Kwargs, **asked: Unpack[Asked]) -> Plan:
    """The plan of a training step; of the stages of a pipeline where its passes ask for one.

    Arguments as in Request.
    """
    staged = load_training_passes(asked.get("passes")).pipeline.ranks > 1
    return (_plan_stages if staged else plan_training)(model, args, kwargs, **asked)


@entry("plan")
def _plan_stages(model: nn.Module, args: Args, kwargs: Kwargs, **asked: Unpack[Asked]) -> Plan:
    return plan_stages(Task.of(model, args, kwargs, asked))


def _plan(found: Pipelined, rank: int, made: Mapping[int, Schedule], notes: tuple[Reason, ...] = ()) -> Plan:
    """What is said of a rank: the blocks of its first stage, and the bytes and seconds of all
    that it does.
    """
    work, asked, whole = found.work, found.asked, found.whole.step
    first = made[found.own(rank)[0]]
    layers = "; ".join(
        f"stage {stage}: {len(found.stages[stage].layers)} layers" for stage in found.own(rank)
    )
    text = (
        "{} pipeline ranks, {} micro-batches, {name}: bytes are those of rank {} ({name}), decisions "
        "those of its first stage"
    )
    own = (
        Because(
            text + "; those of other stages are planned where they run",
            (asked.ranks, found.count, asked.schedule, rank, layers),
        ),
        Because("gradients are made when the loss is, and loss.backward() hands them out"),
        Because(
            "clip with model.clip_grad_norm_(...) of the planned model: torch.nn.utils sees the gradients "
            "of one rank's stages alone"
        ),
    )
    chance = (Because(_DRAWN),) * found.division.random
    plan = _plan_of_one(found, first, (*own, *chance, *notes, *work.notes))
    cuts = tuple(str(len(stage.layers)) for stage in found.stages)
    settings: dict[str, Setting] = {
        "ranks": asked.ranks, "stages": asked.stages, "micro_batches": found.count,
        "schedule": asked.schedule, "cuts": cuts
    }  # fmt: skip
    decision = Decision(
        site=SITE, kind=KIND, option=f"{'/'.join(cuts)} over {asked.ranks} ranks", baseline="one rank",
        by=Pipeline.name, cost=Cost(), baseline_cost=Cost(), why=Because("nothing else is asked for"),
        settings=settings,
    )  # fmt: skip
    held = found.states(rank)
    busy = found.count * sum(one.seconds for one in made.values())
    bubble = 1 + (asked.ranks - 1) / (asked.stages * found.count)
    seconds = busy * bubble + (0.0 if held is None else held.seconds)
    totals = Totals(seconds=seconds, peak_bytes=found.peak_bytes(rank, made), error=0.0)
    beside = () if held is None else (states.as_given(held),)
    return plan.with_changes(
        decisions=(*plan.decisions, *beside, decision), predicted=totals, memory_timeline=None,
        inputs=describe_inputs(whole), guards=whole.guards,
        parameters=sum(math.prod(node.meta["val"].shape) for node in whole.parameters),
    )  # fmt: skip


def _plan_of_one(found: Pipelined, made: Schedule, notes: tuple[Reason, ...] = ()) -> Plan:
    """Of a stage's schedule."""
    work, whole = found.work, found.whole.step
    unplanned = simulate_unplanned(cut_step(whole, work.figures))
    beside = Preparation(
        variants=[made.prepared], captured=whole, seconds=0.0, footprint=unplanned.footprint,
        declined=found.declined
    )  # fmt: skip
    plan = build_plan(Joint.of(made), beside, work.figures, work.goal, notes)
    if (optimizer := found.whole.optimizer) is None:
        return plan
    peak, seconds = (unplanned.footprint + optimizer.given.footprint).peak_bytes, plan.baseline.seconds or 0.0
    return plan.with_changes(
        baseline=replace(plan.baseline, seconds=seconds + optimizer.given.seconds, peak_bytes=peak)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStages:
    """The stages of a rank. `emitted`: of each its schedule; `plan`: what is said of them."""

    found: Pipelined
    emitted: Mapping[int, Emitted]
    plan: Plan


def forward_of(step: Step) -> Mapping[str, object]:
    """What ranks must have in common of a captured step: its operators with all their numbers, of which a
    plan's fingerprint has shapes.
    """
    return {"forwards": hashlib.sha256(str(step.graph).encode()).hexdigest()[:12]}


def own_stages(task: Task, place: Ranks, meeting: Meeting) -> OwnStages:
    """The stages of this rank, planned: by the first of those that have them, for all of these.

    Ranks that have the same stages meet in collectives within them, so their schedules must be one.

    Raises:
        InfeasibleError: a rank has no room for its stages, this one or another, named. UsageError: of another
            rank. EffcompileError: of this rank; the others say which it was.
    """
    rank, count = place.place("pp")
    each = len(meeting.ranks) // count
    leader = rank * each  # the mesh's first axis is the pipeline's
    leads = meeting.ranks[leader] == meeting.me
    found = meeting.together(lambda: stages_asked(task, place.place("tp")[0]))
    meeting.agree(forward_of(found.whole.step))
    for form in found.forms:
        spread = found.over(form)
        made, refused = meeting.together(partial(_made, spread, rank, leads=leads))
        said = meeting.exchanged("planned stages", None if refused is None else str(refused))
        if not any(said):
            break
    else:
        if refused is not None:
            raise refused
        first = next(r for r, text in zip(meeting.ranks, said, strict=True) if text is not None)
        raise RepeatedInfeasibleError(
            f"Rank {first} has no plan of its stages: {said[meeting.ranks.index(first)]}"
        )
    if each == 1:
        return OwnStages(
            found=spread,
            emitted={stage: one.emitted for stage, one in made.items()},
            plan=_plan(spread, rank, made),
        )
    told = meeting.exchanged("schedules", _as_told(spread, rank, made) if leads else None)[leader]
    emitted = {
        stage: _again(spread, stage, Plan.from_dict(told["stages"][str(stage)])) for stage in spread.own(rank)
    }
    return OwnStages(found=spread, emitted=emitted, plan=Plan.from_dict(told["plan"]))


def _made(found: Pipelined, rank: int, *, leads: bool) -> tuple[dict[int, Schedule], InfeasibleError | None]:
    """The schedules of a rank's stages, or why there are none within its memory; nothing where another rank
    makes them.
    """
    try:
        return (found.planned(rank) if leads else {}), None
    except InfeasibleError as error:
        return {}, error


def _as_told(found: Pipelined, rank: int, made: Mapping[int, Schedule]) -> dict[str, object]:
    """What the ranks with the same stages are told."""
    stages = {str(stage): _plan_of_one(found, one).to_dict() for stage, one in made.items()}
    return {"plan": _plan(found, rank, made).to_dict(), "stages": stages}


def _again(found: Pipelined, stage: int, plan: Plan) -> Emitted:
    """The schedule of a stage that another rank has made."""
    blocks, prepared = held(plan), found.prepared(stage)
    cut = (prepared.uncut if blocks.keys() == {WHOLE} else prepared).cut
    return carried_out(cut, *chosen(cut, blocks))[0]


def left_with(model: nn.Module, names: frozenset[str]) -> None:
    """Take all parameters but these from a model, in place."""
    own = {id(p) for name, p in model.named_parameters() if name in names}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in own:
                module._parameters[name] = None
                with torch.no_grad():
                    parameter.data = parameter.new_empty(0)


def stage_runner(own: OwnStages, ranks: Ranks) -> PipelineRunner:
    """What runs this rank's stages; the model has their parameters alone, as they lie over `ranks`."""
    found, model, group = own.found, own.found.work.model, ranks.group("pp")
    assert group is not None
    chunks: dict[int, Chunk] = {}
    state = ModelGuards(model, training=True)
    for stage, emitted in own.emitted.items():
        runner = StepRunner(model, replace(found.prepared(stage).step, state=state), emitted, ranks=ranks)
        chunks[stage] = Chunk(runner=runner, emitted=emitted, takes=found.stages[stage].takes)
    handed = {i: stage.step.loss.meta["val"] for i, stage in enumerate(found.stages)}
    course = Course(
        order=found.tasks(ranks.place("pp")[0]), stages=len(found.stages), group=group,
        handed={i: (torch.Size(v.shape), v.dtype) for i, v in handed.items()},
        data=ranks.group("dp") if ranks.spread.ranks == 1 else None, shared=found.shared,
    )  # fmt: skip
    return PipelineRunner(model, found.division, chunks, course, ranks)
