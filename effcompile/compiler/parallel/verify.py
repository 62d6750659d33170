"""Whether a plan for many ranks is right.

A small copy of it is trained on gloo ranks of this machine, beside the same in one process.

Three steps: the first one alone hides weights that are not tied, or whose gradients are not summed. The plan
of the copy has the same decisions about the whole step, and a budget in the same place between its least and
all kept.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

from effcompile.capture.training import Loss
from effcompile.compiler.parallel.axes import axes_of, form_of, form_pass, passes_for, pipeline_of, ranks_of
from effcompile.compiler.parallel.lower import optimize_on_ranks
from effcompile.compiler.parallel.lower_stages import plan_parts
from effcompile.core import torch_compat_memory
from effcompile.core.errors import InfeasibleError, UsageError
from effcompile.core.goal import EXACT_TOLERANCE
from effcompile.core.torch_compat_aot import draws
from effcompile.core.types import Args, Inputs, Kwargs
from effcompile.ir.plan import Plan
from effcompile.passes.training import microbatch, shard, tensor
from effcompile.passes.training.pipeline import Pipeline
from effcompile.proof.parallel.errors import Errors
from effcompile.proof.parallel.processes import on_ranks
from effcompile.proof.parallel.shrink import shrunk
from effcompile.proof.training.alive import alive_bytes
from effcompile.proof.training.in_parts import without_dropout
from effcompile.runtime.training import TrainingExecutable
from effcompile.search.progress import QUIET, Progress
from effcompile.search.request import AnyOptimizer
from effcompile.search.training.work import loss_of

#: Steps, and examples of a rank.
STEPS, _EXAMPLES = 3, 2


@dataclass(frozen=True, kw_only=True)
class OnRank:
    """What one rank found in STEPS steps, against one process: relative errors with where they are largest,
    and its peaks.
    """

    loss: float
    gradient: tuple[float, str]
    parameter: tuple[float, str]
    peaks: tuple[int, ...]
    predicted: int
    undrawn: bool  # compared with nothing drawn at random, of which ranks draw other numbers

    @property
    def error(self) -> float:
        return max(self.loss, self.gradient[0], self.parameter[0])


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was run, and what every rank found."""

    subject: str
    form: str
    ranks: tuple[OnRank, ...]
    steps: int = STEPS
    limit: float = EXACT_TOLERANCE

    @property
    def passed(self) -> bool:
        """Whether every rank trains as one process does, and none takes more memory than was predicted, but
        for 2 %.
        """
        return all(
            rank.error <= self.limit and max(rank.peaks) <= 1.02 * rank.predicted for rank in self.ranks
        )


def verify_plan(
    plan: Plan,
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    *,
    ranks: int,
    loss: Loss | None = None,
    progress: Progress = QUIET,
) -> Proof:
    """Train a small copy of what was planned on so many ranks of this machine.

    Raises:
        UsageError: the plan is for one process, or there are as few ranks. RankError: a rank fell out.
    """
    if ranks_of(plan) < 2:
        raise UsageError(
            "The plan is for one process: there is nothing between ranks to verify. Plan with --devices 2 "
            "or more."
        )
    if ranks < 2:
        raise UsageError(f"ranks = {ranks}: give 2 or more, which need not be as many as the plan's.")
    axes = axes_of(plan)
    dp, rest = divmod(ranks, axes["tp"] * axes["pp"])
    if rest:
        which = " × ".join(["tensor-parallel"] * (axes["tp"] > 1) + ["pipeline"] * (axes["pp"] > 1))
        raise UsageError(
            f"ranks = {ranks} do not divide by the plan's {axes['tp'] * axes['pp']} {which} ranks. Give a "
            "multiple of these."
        )
    asked = pipeline_of(plan) if axes["pp"] > 1 else Pipeline()
    each = max(_EXAMPLES, axes["pp"])
    small, whole, said = shrunk(
        model, args, kwargs, dp * each, split=axes["tp"], layers=asked.ranks * asked.stages
    )
    with progress.step("plan the copy"):
        made = _planned_alike(plan, small, _part(whole, 0, dp), (dp, axes["tp"]), loss, asked)
    with progress.step("train the copy in one process"):
        wanted = _trained(small, whole, loss)
    with progress.step(f"train the copy on {ranks} ranks"):
        found = on_ranks(_prove, ranks, small, whole, made, wanted, loss, dp)
    among = [f"parameters {form_of(plan)}"] * (dp > 1) + [f"heads and neurons over {axes['tp']} ranks"] * (
        axes["tp"] > 1
    )
    among += [f"layers over {axes['pp']} ranks, {asked.schedule}"] * (axes["pp"] > 1)
    among += ["nothing drawn at random"] * any(rank.undrawn for rank in found)
    return Proof(subject=said, form=", ".join(among), ranks=tuple(found))


def _planned_alike(
    plan: Plan, small: nn.Module, inputs: Inputs, among: tuple[int, int], loss: Loss | None, asked: Pipeline
) -> Plan:
    """The copy's plan: the same form, the same share of the memory that the whole step takes unplanned."""
    by = {d.by for d in plan.decisions} - {
        shard.Shard.name,
        tensor.TensorParallel.name,
        microbatch.Microbatch.name,
        "states",
        Pipeline.name,
    }
    stages = [f"pipeline.{name}={getattr(asked, name)}" for name in ("ranks", "stages", "schedule")] * (
        asked.ranks > 1
    )
    spec = (
        *sorted((by if asked.ranks == 1 else set()) | {"checkpoint"}),
        *passes_for(*among),
        form_pass(plan),
        *stages,
    )
    goal, given = replace(plan.goal, memory=None), _planned_with(plan)
    free = plan_parts(small, *inputs, goal=goal, passes=spec, loss=loss, optimizer=given)
    most, whole, unplanned = free.predicted.peak_bytes, plan.predicted.peak_bytes, plan.baseline.peak_bytes
    if plan.goal.memory is None or not (most and whole and unplanned):
        return free
    try:
        return plan_parts(
            small,
            *inputs,
            goal=replace(goal, memory=int(most * min(1.0, whole / unplanned))),
            passes=spec,
            loss=loss,
            optimizer=given,
        )
    except InfeasibleError as error:
        if not error.needed:
            raise
        goal = replace(goal, memory=error.needed)
        return plan_parts(small, *inputs, goal=goal, passes=spec, loss=loss, optimizer=given)


def _part(inputs: Inputs, rank: int, ranks: int) -> Inputs:
    """The examples of one of so many data-parallel ranks."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    size = max((int(leaf.shape[0]) for leaf in leaves), default=0)
    each = size // ranks
    cut: Inputs = pytree.tree_map_only(
        Tensor,
        lambda t: t.narrow(0, rank * each, each).clone() if t.dim() and t.shape[0] == size else t,
        inputs,
    )
    return cut


@dataclass(frozen=True, kw_only=True)
class _Trained:
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: list[dict[str, Tensor]]


def _sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return _sgd([p for p in model.parameters() if p.requires_grad])


def _planned_with(plan: Plan) -> AnyOptimizer:
    """What is planned beside a copy: the optimizer, where its states are divided."""
    return _sgd if form_of(plan) == shard.STATES_DIVIDED else None


def _trained(model: nn.Module, inputs: Inputs, loss: Loss | None) -> _Trained:
    """The oracle: a copy of the model in one process, on the whole batch."""
    model = copy.deepcopy(model)
    optimizer = _optimizer(model)
    found = _Trained(losses=[], gradients=[], parameters=[])
    for step in range(STEPS):
        torch.manual_seed(step)
        with without_dropout():  # ranks draw other numbers
            value = _eager_loss(model, inputs, loss)
            value.backward()
        found.losses.append(float(value.detach()))
        found.gradients.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
        optimizer.step()
        optimizer.zero_grad()
        found.parameters.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def _eager_loss(model: nn.Module, inputs: Inputs, loss: Loss | None) -> Tensor:
    args, kwargs = inputs
    taken = inspect.signature(model.forward).parameters
    named = dict(kwargs)
    if loss is not None and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        named = {name: value for name, value in named.items() if name in taken}
    return loss_of(model(*args, **named), inputs if args and kwargs else args or dict(kwargs), loss)


def _mesh_of(plan: Plan, dp: int) -> DeviceMesh:
    """The mesh of a copy's plan, beside so many data-parallel ranks, which the plan of a pipeline does not
    know of.
    """
    axes = {axis: size for axis, size in {**axes_of(plan), "dp": dp}.items() if size > 1}
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def _prove(
    rank: int, model: nn.Module, whole: Inputs, plan: Plan, wanted: _Trained, loss: Loss | None, dp: int
) -> OnRank:
    """STEPS steps on this rank, by the user's own way in."""
    ranks, mesh = dist.get_world_size(), _mesh_of(plan, dp)
    args, kwargs = _part(whole, mesh.get_local_rank("dp") if dp > 1 else 0, dp)
    planned = optimize_on_ranks(
        model, args, kwargs, goal=plan.goal, plan=plan, mesh=mesh, loss=loss, optimizer=_planned_with(plan)
    )
    optimizer = planned.optimizer or _optimizer(planned)
    base = alive_bytes("cpu", model, args, dict(kwargs), list(planned.runner.step.constants.values()))
    found = Errors(), Errors(), list[int]()
    apart, random = 0.0, any(map(draws, planned.runner.step.graph.nodes))
    if random:  # without its draws a step takes other bytes
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        found[2].append(base + _step(planned, args, kwargs)[1])
        optimizer.zero_grad()
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    for step in range(STEPS):
        torch.manual_seed(step)
        with without_dropout() if random else contextlib.nullcontext():
            value, peak = _step(planned, args, kwargs)
        if not random:
            found[2].append(base + peak)
        dist.all_reduce(value)
        apart = max(apart, abs(float(value) / ranks - wanted.losses[step]) / abs(wanted.losses[step]))
        own = dict(planned.named_parameters())
        found[0].add(
            {n: p.grad for n, p in own.items() if p.grad is not None}, _those(wanted.gradients[step], own)
        )
        optimizer.step()
        optimizer.zero_grad()
        found[1].add(own, _those(wanted.parameters[step], own))
    predicted = planned.plan.predicted.peak_bytes or 0
    return OnRank(
        loss=apart,
        gradient=found[0].worst,
        parameter=found[1].worst,
        peaks=tuple(found[2]),
        predicted=predicted,
        undrawn=random,
    )


def _step(planned: TrainingExecutable, args: Args, kwargs: Kwargs) -> tuple[Tensor, int]:
    """The loss of a forward and backward, and the most bytes beside what was there."""
    with torch_compat_memory.watched_memory("cpu") as peak:
        value = planned.runner.loss(args, kwargs)
        value.backward()
    return value.detach().clone(), peak()


def _those(wanted: Mapping[str, Tensor], own: Container[str]) -> dict[str, Tensor]:
    """Of the parameters that a rank has."""
    return {name: value for name, value in wanted.items() if name in own}
