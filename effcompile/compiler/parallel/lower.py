"""`effcompile.optimize(model, ..., mesh=...)` under torchrun: one plan for all ranks, carried out on each.

The first rank plans and tells the others (collectives are priced, never measured by one rank alone); every rank captures its own model,
and applies the plan to it. The planned step is run before the user gets it: against the model's own step where that fits beside.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from effcompile.backends.torch.ranks import Ranks, made_alike, spread_parameters
from effcompile.backends.torch.training import StepRunner
from effcompile.compiler.parallel.meeting import Meeting
from effcompile.compiler.progress import entry
from effcompile.compiler.request import Asked, Task
from effcompile.compiler.room import Room, device_of
from effcompile.compiler.search import versions
from effcompile.compiler.training import verify
from effcompile.compiler.training.alive import alive_bytes
from effcompile.compiler.training.compile import Applied, applied_plan, plan_training
from effcompile.compiler.training.executable import TrainingExecutable, planned
from effcompile.compiler.training.in_parts import runner_of
from effcompile.core.errors import UsageError, VerificationError
from effcompile.core.types import Args, Kwargs
from effcompile.core.units import format_bytes
from effcompile.ir.footprint import excess
from effcompile.ir.plan import Check, Plan, Totals
from effcompile.passes.training import shard

#: What the original step takes beside what is predicted of it (confirm.py).
_UNPLANNED = 1.25
#: Steps that are timed.
_TIMED = 3


@entry("optimize")
def optimize_on_ranks(model: nn.Module, args: Args, kwargs: Kwargs, **asked: Unpack[Asked]) -> TrainingExecutable:
    """Plan a step for the ranks of `mesh`, lower, verify and measure it. Every rank calls it; the model's parameters become DTensors.

    Raises:
        UsageError: the ranks have different models, inputs, plans or versions; a mesh that the plan is not for.
        RankError: a rank does not come. As of `optimize_training`.
    """
    task = Task.of(model, args, kwargs, asked)
    mesh = _data_parallel(task.request.mesh)
    _refuse_spread(model)
    meeting = Meeting.of(mesh)
    meeting.agree(_facts(task, mesh))
    alone = replace(task, request=replace(task.request, mesh=None))
    plan = task.request.plan
    if plan is None:
        with task.request.progress.step("plan for all ranks"):
            plan = Plan.from_dict(dict(meeting.told(lambda: _made(alone, mesh.size()).to_dict())))
    _check_world(plan, mesh.size())
    return _carried_out(applied_plan(alone, plan), mesh, meeting)


def _data_parallel(mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh, if it has one axis of several ranks.

    Raises:
        UsageError: it has others, or no rank but this one.
    """
    assert mesh is not None
    if mesh.ndim != 1:
        raise UsageError(
            f"mesh has the axes {mesh.mesh_dim_names or mesh.ndim} of {tuple(mesh.shape)}; the ranks of a data-parallel step are one axis. "
            'Give mesh["dp"], or init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)).'
        )
    if mesh.size() < 2:
        raise UsageError("mesh has one rank. Leave mesh out, or start more with torchrun --nproc-per-node.")
    return mesh


def _refuse_spread(model: nn.Module) -> None:
    """Raises UsageError for a model that something else has sharded."""
    if spread := next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None):
        raise UsageError(
            f"{spread} is a DTensor already (fully_shard, parallelize_module, an earlier optimize(..., mesh=...)). "
            "Give the model as it was made: it is sharded here."
        )


def _facts(task: Task, mesh: DeviceMesh) -> Mapping[str, object]:
    """What must be the same on every rank."""
    leaves = [leaf for leaf in pytree.tree_leaves((task.args, dict(task.kwargs))) if isinstance(leaf, torch.Tensor)]
    plan = task.request.plan
    asked = (task.request.goal.describe(), *map(str, task.request.passes or ()), str(task.request.target))
    parameters = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in task.model.named_parameters()]
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(versions().items())),
        "meshes": list(mesh.shape),
        "models": f"{type(task.model).__name__} {_hash(parameters)}",
        "inputs": ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in leaves),
        "requests": "; ".join(asked),
        "plans": "none" if plan is None else f"{plan.model} {_hash(plan.to_dict())}",
    }


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def _made(task: Task, world: int) -> Plan:
    """The plan, made by this rank alone."""
    request = task.request
    own = [each for each in request.passes or () if not each.startswith(f"{shard.Shard.name}.ranks")]
    spec = (*own, f"{shard.Shard.name}.ranks={world}")
    return plan_training(task.model, task.args, task.kwargs, **replace(request, passes=spec).asked)


def ranks_of(plan: Plan) -> int:
    """The data-parallel ranks that a plan is for; 1 for none."""
    found = [d.settings.get("ranks") for d in plan.decisions if d.kind == shard.KIND]
    return next((ranks for ranks in found if isinstance(ranks, int)), 1)


def _check_world(plan: Plan, world: int) -> None:
    if (ranks := ranks_of(plan)) != world:
        for_whom = "one process" if ranks == 1 else f"{ranks} data-parallel ranks"
        raise UsageError(
            f"The plan is for {for_whom}, and the mesh has {world}. Start {ranks} with torchrun, or leave `plan` out to plan for {world}."
        )


def _carried_out(found: Applied, mesh: DeviceMesh, meeting: Meeting) -> TrainingExecutable:
    """The model on this rank: sharded, its step run, compared and timed on all of them."""
    work, spread = found.work, found.prepared.step.spread
    assert spread is not None
    with work.progress.step("run the original step"):
        wanted, refusal = _eager(found, mesh, meeting)
    spread_parameters(work.model, spread, mesh)
    runner = runner_of(work.model, found.prepared.case, found.emitted, Ranks(mesh=mesh, spread=spread))
    runner.guarded = False
    constants = list(found.prepared.step.constants.values())
    base = alive_bytes(device_of(work.model), work.model, work.args, dict(work.kwargs), work.loss, constants)
    with work.progress.step("run the planned step"):
        ran = verify.run(lambda: runner.loss(work.args, work.kwargs), work.model, work.leaves)
    peak = None if ran.peak_bytes is None else base + ran.peak_bytes
    check = None if wanted is None else verify.compare(replace(ran, gradients=_local(ran.gradients)), wanted, work.goal.max_error)
    del wanted
    with work.progress.step("time the steps"):
        seconds = _timed(work, runner)
    said = meeting.exchanged("measured", [peak, seconds, None if check is None else check.error])
    return planned(work.model, runner, _measured(found.plan, said, check, refusal, meeting))


def _eager(found: Applied, mesh: DeviceMesh, meeting: Meeting) -> tuple[verify.Result | None, str]:
    """The model's own step with its gradients averaged, of which this rank's shards are left; or why it is not run, on all ranks."""
    work, spread = found.work, found.prepared.step.spread
    assert spread is not None
    made_alike(work.model, mesh)
    whole = found.plan.baseline.peak_bytes or 0
    room = Room.of(device_of(work.model), whole, found.plan.goal.memory)
    refusals = meeting.exchanged("room for the original step", room.refusal(int(_UNPLANNED * whole), whole))
    refusal = next((f"on rank {rank} it {said}" for rank, said in zip(meeting.ranks, refusals, strict=True) if said), "")
    if refusal:
        return None, refusal
    wanted = verify.run(work.eager_loss, work.model, work.leaves)
    me, kept = mesh.get_local_rank(), dict[str, torch.Tensor | None]()
    for name, gradient in wanted.gradients.items():
        if gradient is not None and not name.startswith("input "):
            dist.all_reduce(gradient, group=mesh.get_group())
            gradient = gradient.div_(mesh.size())
            if name in spread.shapes:
                rows = -(-gradient.shape[0] // mesh.size())
                gradient = gradient[me * rows : (me + 1) * rows].clone()
        kept[name] = gradient
    return replace(wanted, gradients=kept), ""


def _local(gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: g.to_local() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def _timed(work: Any, runner: StepRunner) -> float:
    """Seconds of a step, all ranks at once: the fastest of a few."""
    runs = (verify.seconds(lambda: runner.loss(work.args, work.kwargs), work.model, work.leaves) for _ in range(_TIMED))
    return min(runs)


def _measured(plan: Plan, said: list[list[float | None]], check: Check | None, refusal: str, meeting: Meeting) -> Plan:
    """The plan with what all ranks measured.

    Raises:
        VerificationError: on some rank the step is not the model's own.
    """
    peaks, seconds = [int(each[0]) for each in said if each[0] is not None], [float(each[1] or 0.0) for each in said]
    errors = [float(each[2]) for each in said if each[2] is not None]
    checks: tuple[Check, ...] = ()
    if check is not None:
        worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
        checks = (replace(check, error=worst, name="loss and all gradients on every rank, as eager averaged over ranks"),)
        if not checks[0].passed:
            raise VerificationError(
                f"The planned step differs from the model's own on rank {meeting.ranks[errors.index(worst)]}: relative error {worst:.3e} > "
                f"{check.limit:.3e} ({check.note}). Please report it."
            )
    notes = [f"the original step was not run: {refusal}; `effcompile verify` compares a small copy of it"] * bool(refusal)
    notes.append("measured peak of each rank: " + ", ".join(map(format_bytes, peaks)))
    if over := [(r, p) for r, p in zip(meeting.ranks, peaks, strict=False) if excess(p, plan.goal.memory)]:
        notes.append("above the budget: " + ", ".join(f"rank {rank} at {format_bytes(peak)}" for rank, peak in over))
    measured = Totals(seconds=max(seconds), peak_bytes=max(peaks, default=None), error=max(errors, default=None))
    return plan.with_changes(checks=checks, measured=measured, notes=(*plan.notes, *notes))
