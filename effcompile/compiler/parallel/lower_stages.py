"""A pipeline on a mesh: each rank plans its own stages, is left with their parameters, and runs them in the schedule's order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Unpack

import torch
from torch import nn

from effcompile.backends.torch.pipeline import Chunk, Course, PipelineRunner
from effcompile.backends.torch.ranks import Ranks
from effcompile.backends.torch.training import StepRunner
from effcompile.capture.state import ModelGuards
from effcompile.compiler.parallel.meeting import Meeting
from effcompile.compiler.training.compile import plan_training
from effcompile.core.cost import Cost
from effcompile.core.errors import EffcompileError, FormatError, UsageError
from effcompile.core.reasons import Because, Reason
from effcompile.core.types import Args, Kwargs
from effcompile.ir.plan import Decision, Plan, Setting, Totals
from effcompile.passes import load_training_passes
from effcompile.passes.training.pipeline import KIND, SITE, Pipeline
from effcompile.search.parallel.pipelined import Pipelined, pipelined
from effcompile.search.progress import entry
from effcompile.search.request import Asked, Task
from effcompile.search.training.build import build_plan, describe_inputs, fingerprint
from effcompile.search.training.cases import Joint
from effcompile.search.training.prepare import Preparation, cut_step, simulate_unplanned
from effcompile.search.training.solve import Schedule
from effcompile.search.training.work import make_work


def stages_asked(task: Task) -> Pipelined:
    """The step that a request's passes, or its plan, ask to be pipelined, in stages.

    Raises:
        UsageError: the optimizer is there already. FormatError: a plan of another model.
    """
    plan = task.request.plan
    work = make_work(task if plan is None else task.for_plan(plan))
    if work.optimizer is not None:
        raise UsageError("The optimizer of a pipelined step is of one rank's parameters: make it of the returned model's parameters().")
    asked = next(each for each in work.passes.step if isinstance(each, Pipeline)) if plan is None else pipeline_of(plan)
    found = pipelined(work, asked)
    if plan is not None and fingerprint(found.whole.step) != plan.fingerprint:
        raise FormatError(f"This plan was made for another model or other shapes: its step has the fingerprint {plan.fingerprint}.")
    return found


def pipeline_of(plan: Plan) -> Pipeline:
    """The pipeline that a plan decided on.

    Raises:
        FormatError: its settings are not known here.
    """
    settings = next(d.settings for d in plan.decisions if d.kind == KIND)
    numbers = {name: settings.get(name) for name in ("ranks", "stages", "micro_batches")}
    cuts, schedule = settings.get("cuts"), settings.get("schedule")
    if not all(isinstance(value, int) for value in numbers.values()) or not isinstance(cuts, tuple) or not isinstance(schedule, str):
        raise FormatError(f"The plan's decision {KIND} has settings that are not known here: {dict(settings)}. Plan again.")
    return Pipeline(**numbers, cuts=tuple(map(int, cuts)), schedule=schedule)  # type: ignore[arg-type]


def plan_stages(task: Task) -> Plan:
    """The plan of the fullest rank, made for all of them where there is one process.

    Raises:
        InfeasibleError: a rank has no plan. UsageError: the model has no such stages.
    """
    found = stages_asked(task)
    made = {rank: found.planned(rank) for rank in range(found.asked.ranks)}
    peaks = {rank: found.peak_bytes(rank, schedules) for rank, schedules in made.items()}
    fullest = max(peaks, key=peaks.__getitem__)
    told = Because("predicted peak of each rank: " + ", ".join(["{bytes}"] * len(peaks)), tuple(peaks.values()))
    return _plan(found, fullest, made[fullest], (told,))


def plan_parts(model: nn.Module, args: Args, kwargs: Kwargs, **asked: Unpack[Asked]) -> Plan:
    """The plan of a training step; of the stages of a pipeline where its passes ask for one. Arguments as in Request."""
    passes = load_training_passes(asked.get("passes")).step
    staged = any(isinstance(each, Pipeline) and each.ranks > 1 for each in passes)
    return (_plan_stages if staged else plan_training)(model, args, kwargs, **asked)


@entry("plan")
def _plan_stages(model: nn.Module, args: Args, kwargs: Kwargs, **asked: Unpack[Asked]) -> Plan:
    return plan_stages(Task.of(model, args, kwargs, asked))


def _plan(found: Pipelined, rank: int, made: Mapping[int, Schedule], notes: tuple[Reason, ...] = ()) -> Plan:
    """What is said of a rank: the blocks of its first stage, and the bytes and seconds of all that it does."""
    work, asked, whole = found.work, found.asked, found.whole.step
    unplanned = simulate_unplanned(cut_step(whole, work.figures))
    first = made[found.own(rank)[0]]
    beside = Preparation(variants=[first.prepared], captured=whole, seconds=0.0, footprint=unplanned.footprint)
    layers = "; ".join(f"stage {stage}: {len(found.stages[stage].layers)} layers" for stage in found.own(rank))
    text = "{} pipeline ranks, {} micro-batches, {name}: bytes are those of rank {} ({name}), decisions those of its first stage"
    own = (
        Because(text + "; every rank plans its own", (asked.ranks, found.count, asked.schedule, rank, layers)),
        Because("gradients are made when the loss is, and loss.backward() hands them out"),
    )
    plan = build_plan(Joint.of(first), beside, work.figures, work.goal, (*own, *notes, *work.notes))
    cuts = tuple(str(len(stage.layers)) for stage in found.stages)
    settings: dict[str, Setting] = {
        "ranks": asked.ranks, "stages": asked.stages, "micro_batches": found.count, "schedule": asked.schedule, "cuts": cuts
    }  # fmt: skip
    decision = Decision(
        site=SITE, kind=KIND, option=f"{'/'.join(cuts)} over {asked.ranks} ranks", baseline="one rank", by=Pipeline.name, cost=Cost(),
        baseline_cost=Cost(), why=Because("nothing else is asked for"), settings=settings,
    )  # fmt: skip
    busy = found.count * sum(one.seconds for one in made.values())
    bubble = 1 + (asked.ranks - 1) / (asked.stages * found.count)
    totals = Totals(seconds=busy * bubble, peak_bytes=found.peak_bytes(rank, made), error=0.0)
    return plan.with_changes(
        decisions=(*plan.decisions, decision), predicted=totals, memory_timeline=None, inputs=describe_inputs(whole),
        guards=whole.guards, parameters=sum(math.prod(node.meta["val"].shape) for node in whole.parameters),
    )  # fmt: skip


def own_stages(task: Task, place: Ranks, meeting: Meeting) -> tuple[Pipelined, dict[int, Schedule], Plan]:
    """The stages of this rank, planned.

    Raises:
        UsageError: of another rank, named. EffcompileError: of this rank; the others say which it was.
    """
    rank = place.place("pp")[0]
    try:
        found = stages_asked(task)
        made = found.planned(rank)
        plan = _plan(found, rank, made)
    except EffcompileError as error:
        meeting.exchanged("planned stages", str(error))
        raise
    said = meeting.exchanged("planned stages", None)
    if failed := next(((r, text) for r, text in zip(meeting.ranks, said, strict=True) if text is not None), None):
        raise UsageError(f"Rank {failed[0]} has no plan of its stages: {failed[1]}")
    return found, made, plan


def left_with(model: nn.Module, names: frozenset[str]) -> None:
    """Take all parameters but these from a model, in place."""
    own = {id(p) for name, p in model.named_parameters() if name in names}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in own:
                module._parameters[name] = None
                with torch.no_grad():
                    parameter.data = parameter.new_empty(0)


def stage_runner(found: Pipelined, made: Mapping[int, Schedule], place: Ranks) -> PipelineRunner:
    """What runs this rank's stages; the model has their parameters alone."""
    rank, model = place.place("pp")[0], found.work.model
    group = place.group("pp")
    assert group is not None
    chunks: dict[int, Chunk] = {}
    state = ModelGuards(model, training=True)
    for stage, one in made.items():
        runner = StepRunner(model, replace(one.prepared.step, state=state), one.emitted)
        chunks[stage] = Chunk(runner=runner, emitted=one.emitted, takes=found.stages[stage].takes)
    handed = {i: stage.step.loss.meta["val"] for i, stage in enumerate(found.stages)}
    course = Course(
        order=found.tasks(rank), stages=len(found.stages), handed={i: (torch.Size(v.shape), v.dtype) for i, v in handed.items()},
        group=group, data=place.group("dp"), shared=found.shared,
    )  # fmt: skip
    return PipelineRunner(model, found.division, chunks, course)
