"""`effcompile.optimize(model, ..., mesh=...)` under torchrun: one plan for all ranks, carried out on each.

The first rank plans and tells the others (collectives are priced, never measured by one rank alone); every
rank captures its own model, and applies the plan to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from effcompile.backends.torch import around_ranks
from effcompile.backends.torch.ranks import AXES, OTHER_AXES, SAMPLER, Ranks, ordered_mesh, spread_parameters
from effcompile.compiler.parallel.axes import axes_of, beside_any, passes_for
from effcompile.compiler.parallel.lower_stages import forward_of, left_with, own_stages, stage_runner
from effcompile.compiler.parallel.prove import Stages, own_step, proven
from effcompile.compiler.training.compile import Applied, applied_plan, plan_training
from effcompile.core.errors import UsageError
from effcompile.core.installed import versions
from effcompile.core.types import Args, Kwargs
from effcompile.ir.plan import Plan
from effcompile.ir.step import Spread
from effcompile.passes.training import pipeline, shard, tensor
from effcompile.proof.training.in_parts import runner_of, without_dropout
from effcompile.runtime.meeting import Meeting
from effcompile.runtime.training import TrainingExecutable
from effcompile.search.progress import entry
from effcompile.search.request import AnyOptimizer, Asked, Task


@entry("optimize")
def optimize_on_ranks(
    model: nn.Module, args: Args, kwargs: Kwargs, **asked: Unpack[Asked]
) -> TrainingExecutable:
    """Plan a step for the ranks of `mesh`, lower, verify and measure it.

    Every rank calls it; the model's parameters become DTensors.

    Raises:
        UsageError: the ranks have different models, inputs, plans or versions; a mesh that the plan is not
            for.
        RankError: a rank does not come. As of `optimize_training`.
    """
    task = Task.of(model, args, kwargs, asked)
    mesh = _checked(task.request.mesh)
    _refuse_spread(model)
    meeting = Meeting.of(mesh)
    meeting.agree(_facts(task, mesh))
    _same_models(task.model, meeting)
    place = Ranks(mesh=mesh, spread=Spread())
    _same_examples(task, place, meeting)
    alone = replace(task, request=replace(task.request, mesh=None))
    plan = task.request.plan
    if place.place("pp")[1] > 1:
        return _in_stages(alone, place, meeting)
    if plan is None:
        with task.request.progress.step("plan for all ranks"):
            plan = Plan.from_dict(dict(meeting.told(lambda: _made(alone, place).to_dict())))
    _check_world(plan, place)
    mine = (*(alone.request.passes or ()), f"{tensor.TensorParallel.name}.rank={place.place('tp')[0]}")
    found = meeting.together(
        partial(applied_plan, replace(alone, request=replace(alone.request, passes=mine)), plan)
    )
    meeting.agree(forward_of(found.step))
    return _carried_out(found, place, meeting, alone.request.optimizer)


def _checked(mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh with its axes in our order.

    Raises:
        UsageError: it has axes that no step is divided along, or no rank but this one.
    """
    assert mesh is not None
    names = mesh.mesh_dim_names or ()
    if not set(names) <= {*AXES} and (mesh.ndim > 1 or names[0] in OTHER_AXES):
        raise UsageError(
            f"mesh has the axes {names or mesh.ndim} of {tuple(mesh.shape)}. A step is divided along 'dp' "
            "(each rank has examples of its "
            "own), 'tp' (each has a part of the heads and neurons) and 'pp' (each has some of the "
            "layers): init_device_mesh("
            '"cpu", (2, 2), mesh_dim_names=("dp", "tp")), or one of them alone, mesh["dp"].'
        )
    if mesh.size() < 2:
        raise UsageError("mesh has one rank. Leave mesh out, or start more with torchrun --nproc-per-node.")
    return ordered_mesh(mesh)


def mesh_for(plan: Plan, device: str) -> DeviceMesh:
    """The mesh that a plan is for, of all processes that torchrun started.

    Raises:
        UsageError: it started another number of them.
    """
    axes, started = axes_of(plan), dist.get_world_size()
    of_one = axes["pp"] * axes["tp"]
    if beside_any(plan) and started % of_one == 0:
        axes["dp"] = started // of_one
    if math.prod(axes.values()) != started:
        raise UsageError(
            f"The plan is for {_named(axes)}, and {started} were started. {_start(axes)[:-1]}, or plan for "
            f"{started} (effcompile optimize ... --devices {started} -o OUT), whose train.py goes on from "
            "the same CHECKPOINTS. A rank keeps its batch, so that fewer ranks are fewer examples a step."
        )
    wanted = {axis: size for axis, size in axes.items() if size > 1}
    return init_device_mesh(device, tuple(wanted.values()), mesh_dim_names=tuple(wanted))


def _refuse_spread(model: nn.Module) -> None:
    """Raises UsageError for a model that something else has sharded."""
    if spread := next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None):
        raise UsageError(
            f"{spread} is a DTensor already (fully_shard, parallelize_module, an earlier optimize(..., "
            "mesh=...)). Give the model as it was made: it is sharded here."
        )


def _facts(task: Task, mesh: DeviceMesh) -> Mapping[str, object]:
    """What must be the same on every rank."""
    leaves = [
        leaf for leaf in pytree.tree_leaves((task.args, dict(task.kwargs))) if isinstance(leaf, torch.Tensor)
    ]
    plan = task.request.plan
    asked = (task.request.goal.describe(), *map(str, task.request.passes or ()), str(task.request.target))
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(versions().items())),
        "meshes": [list(mesh.mesh_dim_names or ()), list(mesh.shape)],
        "models": type(task.model).__name__,
        "inputs": ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in leaves),
        "requests": "; ".join(asked),
        "optimizers": _named_as(task.request.optimizer),
        "losses": _named_as(task.request.loss),
        "plans": "none" if plan is None else f"{plan.model} {_hash(plan.to_dict())}",
    }


def _same_models(model: nn.Module, meeting: Meeting) -> None:
    """Raises UsageError where a rank's model has other tensors, or parts in another mode; it names the first
    of them.
    """
    mine = {name: _described(parameter, trained=True) for name, parameter in model.named_parameters()}
    mine |= {name: _described(buffer, trained=False) for name, buffer in model.named_buffers()}
    mine |= {name or "it": "in eval mode" for name, part in model.named_modules() if not part.training}
    if len(set(meeting.exchanged("models", _hash(list(mine.items()))))) == 1:
        return
    found = meeting.exchanged("their tensors", mine)
    every = dict.fromkeys(name for one in found for name in one)
    first = next((name for name in every if len({one.get(name) for one in found}) > 1), "")
    said = mine.get(first, "not there, or as usual") if first else f"the same in another order {_hash(mine)}"
    meeting.agree({"models": f"{first} is {said}" if first else said})


def _described(tensor: torch.Tensor, *, trained: bool) -> str:
    """What all ranks must have of a tensor in common, in words."""
    frozen = "" if tensor.requires_grad or not trained else ", frozen"
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{strides}{frozen}"


def _named_as(given: object) -> str:
    """A function or class, of a partial one with what is given to it, as every process names it."""
    if given is None:
        return "none"
    if isinstance(given, partial):
        said = re.sub(" at 0x[0-9a-f]+", "", repr((given.args, given.keywords)))
        return f"{_named_as(given.func)} {_hash(said)}"
    return f"{getattr(given, '__module__', '')}.{getattr(given, '__qualname__', type(given).__qualname__)}"


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def _same_examples(task: Task, place: Ranks, meeting: Meeting) -> None:
    """Raises UsageError where ranks that compute parts of one result have other examples than each other."""
    if place.place("tp")[1] * place.place("pp")[1] == 1:
        return
    tensors = [
        leaf for leaf in pytree.tree_leaves((task.args, dict(task.kwargs))) if isinstance(leaf, torch.Tensor)
    ]
    said = meeting.exchanged(
        "examples", [place.place("dp")[0], _hash([t.detach().cpu().numpy().tobytes() for t in tensors])]
    )
    first: dict[int, tuple[int, str]] = {}
    for rank, (row, digest) in zip(meeting.ranks, said, strict=True):
        other, known = first.setdefault(row, (rank, digest))
        if known != digest:
            raise UsageError(
                f"Ranks {other} and {rank} stand in one place along 'dp' and have different inputs. {SAMPLER}"
            )


def _made(task: Task, place: Ranks) -> Plan:
    """The plan, made by this rank alone."""
    along = passes_for(place.place("dp")[1], place.place("tp")[1])
    return plan_training(
        task.model, task.args, task.kwargs, **replace(task.request, passes=(*_but_ranks(task), *along)).asked
    )


def _but_ranks(task: Task) -> list[str]:
    """The passes that are asked for, without how many ranks there are, which the mesh says."""
    given = (
        f"{shard.Shard.name}.ranks",
        f"{tensor.TensorParallel.name}.rank",
        f"{pipeline.Pipeline.name}.ranks",
    )
    return [each for each in task.request.passes or () if not each.startswith(given)]


def _check_world(plan: Plan, place: Ranks) -> None:
    """Raises UsageError where the mesh has other ranks than a plan."""
    axes, here = axes_of(plan), {axis: place.place(axis)[1] for axis in ("dp", "tp", "pp")}
    axes = {**axes, "dp": here["dp"]} if beside_any(plan) else axes
    if axes != here:
        raise UsageError(
            f"The plan is for {_named(axes)}, and the mesh has {_named(here)}. {_start(axes)[:-1]} and give "
            "a mesh of these, or leave `plan` out to plan for what is there."
        )


def _named(axes: Mapping[str, int]) -> str:
    words = {"dp": "data-parallel", "tp": "tensor-parallel", "pp": "pipeline"}
    several = [f"{size} {words[axis]} ranks" for axis, size in axes.items() if size > 1]
    return " × ".join(several) or "one process"


def _start(axes: Mapping[str, int]) -> str:
    return f"Start {math.prod(axes.values())} with torchrun --nproc-per-node {math.prod(axes.values())}."


def _carried_out(found: Applied, place: Ranks, meeting: Meeting, make: AnyOptimizer) -> TrainingExecutable:
    """The model on this rank: sharded, its step run, compared and timed on all of them."""
    work, spread = found.work, found.prepared.step.spread
    assert spread is not None
    if found.prepared.case.scaled:
        raise UsageError(
            "A step in fp16 sees an overflow of its scaled loss on the rank that has the gradient. Plan "
            "in bf16 or fp32."
        )
    ranks = replace(place, spread=spread)
    with work.progress.step("run the original step"):
        original = own_step(work, found.plan.baseline.peak_bytes or 0, ranks, meeting)
    spread_parameters(work.model, ranks)
    around_ranks.prepare(work.model)
    runner = runner_of(work.model, found.prepared.case, found.emitted, ranks)
    runner.guarded = False
    constants = list(found.prepared.step.constants.values())
    return proven(work, runner, found.plan, original, constants, meeting, make)


def _in_stages(task: Task, place: Ranks, meeting: Meeting) -> TrainingExecutable:
    """The model on this rank of a pipeline."""
    if task.request.plan is not None:
        _check_world(task.request.plan, place)
    (at, tp), dp, pp = place.place("tp"), place.place("dp")[1], place.place("pp")[1]
    along = (
        f"{pipeline.Pipeline.name}.ranks={pp}",
        *passes_for(dp, tp),
        f"{tensor.TensorParallel.name}.rank={at}",
    )
    request = replace(task.request, passes=(*_but_ranks(task), *along))
    own = own_stages(replace(task, request=request), place, meeting)
    found, work = own.found, own.found.work
    ranks = replace(place, spread=found.spread)
    stages = Stages(shared=found.shared, draw=found.division.random)
    drawn = without_dropout() if stages.draw else contextlib.nullcontext()
    with work.progress.step("run the original step"), drawn:
        original = own_step(work, own.plan.baseline.peak_bytes or 0, ranks, meeting)
    names = found.parameters(place.place("pp")[0])
    original = original.of(names)
    everywhere = dict(work.model.named_parameters(remove_duplicate=False)).keys()
    left_with(work.model, names)
    spread_parameters(work.model, ranks)
    here = dict(work.model.named_parameters(remove_duplicate=False)).keys()
    around_ranks.prepare(work.model, everywhere - here)
    runner = stage_runner(own, ranks)
    runner.guarded = False
    constants = [value for chunk in runner.chunks.values() for value in chunk.runner.step.constants.values()]
    return proven(work, runner, own.plan, original, constants, meeting, task.request.optimizer, stages)
