"""The planned step is run on all ranks before the user gets it, and compared with the model's own where that
fits beside.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from effcompile.backends.torch.divided_states import with_divided_states
from effcompile.backends.torch.ranks import Ranks, made_alike
from effcompile.backends.torch.training import StepRunner
from effcompile.core import torch_compat_memory
from effcompile.core.errors import VerificationError
from effcompile.core.reasons import Because
from effcompile.core.torch_compat_aot import draws
from effcompile.ir.figures import Check, Totals
from effcompile.ir.footprint import excess
from effcompile.ir.plan import Plan
from effcompile.machine.room import Room, device_of
from effcompile.ops.messages import answered
from effcompile.proof.training import verify
from effcompile.proof.training.alive import alive_bytes
from effcompile.proof.training.exact import in_float64
from effcompile.proof.training.in_parts import without_dropout
from effcompile.runtime.agreement import Agreement
from effcompile.runtime.meeting import Meeting
from effcompile.runtime.training import TrainingExecutable, planned
from effcompile.search.request import AnyOptimizer
from effcompile.search.training.work import Work, as_optimizer

#: What the original step takes beside what is predicted of it (confirm.py).
_UNPLANNED = 1.25
#: Steps that are timed.
_TIMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Of a pipeline: the parameters that several stages have, and whether they draw random numbers, which are
    others than the model's own.
    """

    shared: Collection[str] = ()
    draw: bool = False


def proven(
    work: Work, runner: StepRunner, plan: Plan, original: OwnStep, constants: Sequence[torch.Tensor],
    meeting: Meeting, make: AnyOptimizer = None, stages: Stages | None = None,
) -> TrainingExecutable:  # fmt: skip
    """The planned model, run, compared and timed on all ranks, which from then on watch each other.

    `make`: its optimizer, of what this rank has of the parameters. `stages`: of a pipeline.
    """
    base = alive_bytes(device_of(work.model), work.model, work.args, dict(work.kwargs), work.loss, constants)
    with work.progress.step("run the planned step"):
        ran = verify.run(lambda: runner.loss(work.args, work.kwargs), work.model, work.leaves)
    peak = None if ran.peak_bytes is None else base + ran.peak_bytes
    check, refusal = None, original.refusal
    if (wanted := original.wanted) is not None:
        truth = original.truth
        if stages is not None and stages.draw:
            with without_dropout():
                ran = verify.run(lambda: runner.loss(work.args, work.kwargs), work.model, work.leaves)
        check = verify.compare(
            replace(ran, gradients=_local(ran.gradients)), wanted, work.goal.max_error, lambda: truth
        )
    with work.progress.step("time the steps"):
        seconds = _timed(work, runner)
    if make is not None and peak is not None:
        peak = max(peak, base + _with_updates(work, runner, make))
    said = meeting.exchanged("measured", [peak, seconds, None if check is None else check.error])
    measured, ranks = _measured(plan, said, check, refusal, meeting), runner.ranks
    assert ranks is not None
    optimizer = with_divided_states(as_optimizer(make, work.model), work.model, ranks)
    stages = stages or Stages()
    random = stages.draw or any(map(draws, runner.step.graph.nodes))
    runner.agreement = Agreement(
        work.model, ranks, meeting, optimizer=optimizer, shared=stages.shared, draws=random
    )
    return planned(work.model, runner, measured, optimizer)


def _with_updates(work: Work, runner: StepRunner, make: AnyOptimizer) -> int:
    """The most bytes of two whole steps beside what was there; parameters and buffers are put back, the
    optimizer is not kept.
    """
    model = work.model
    before = {
        n: (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
        for n, p in model.named_parameters()
    }
    with verify.restored(model, work.leaves), torch_compat_memory.watched_memory(device_of(model)) as peak:
        assert runner.ranks is not None
        optimizer = with_divided_states(as_optimizer(make, model), model, runner.ranks)
        assert optimizer is not None
        for _ in range(2):
            runner.loss(work.args, work.kwargs).backward()
            optimizer.step()
            optimizer.zero_grad()
        del optimizer
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).copy_(before[name])
    return peak()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStep:
    """The model's own step, its gradients averaged, of which this rank's part is left.

    Attributes:
        wanted: what it makes; None where it was not run: `refusal` says why, on which rank.
        truth: the same in float64, of a model in 16 bits whose sums tensor-parallel ranks round otherwise.
    """

    wanted: verify.Result | None
    truth: verify.Result | None = None
    refusal: str = ""

    def of(self, names: Container[str]) -> OwnStep:
        """Of some parameters alone."""

        def cut(found: verify.Result | None) -> verify.Result | None:
            return found and replace(
                found, gradients={name: g for name, g in found.gradients.items() if name in names}
            )

        return replace(self, wanted=cut(self.wanted), truth=cut(self.truth))


def own_step(work: Work, whole: int, ranks: Ranks, meeting: Meeting) -> OwnStep:
    """The model's own step, or why it is not run, on all ranks."""
    made_alike(work.model, ranks)
    room = Room.of(device_of(work.model), whole, work.goal.memory)
    refusals = meeting.exchanged("room for the original step", room.refusal(int(_UNPLANNED * whole), whole))
    refusal = next(
        (f"on rank {rank} it {said}" for rank, said in zip(meeting.ranks, refusals, strict=True) if said), ""
    )
    if refusal:
        return OwnStep(wanted=None, refusal=refusal)
    wanted, truth = verify.run(work.eager_loss, work.model, work.leaves), None
    if ranks.place("tp")[1] > 1 and any(p.dtype in verify.NARROW for p in work.model.parameters()):
        truth = in_float64(work, room, wanted, whole)
        if not all(meeting.exchanged("the original step in float64", truth is not None)):
            truth = None
    return OwnStep(wanted=_mine(wanted, ranks), truth=truth and _mine(truth, ranks))


def _mine(found: verify.Result, ranks: Ranks) -> verify.Result:
    """What this rank has of the gradients, averaged."""
    kept, group = dict[str, torch.Tensor | None](), ranks.group("dp")
    for name, gradient in found.gradients.items():
        if gradient is not None and not name.startswith("input "):
            if group is not None:
                with answered(group):
                    dist.all_reduce(gradient, group=group)
                gradient = gradient.div_(group.size())
            mine = ranks.mine(name, gradient)
            gradient = mine if mine is gradient else mine.clone()
        kept[name] = gradient
    return replace(found, gradients=kept)


def _local(gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: g.to_local() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def _timed(work: Work, runner: StepRunner) -> float:
    """Seconds of a step, all ranks at once: the fastest of a few."""
    runs = (
        verify.seconds(lambda: runner.loss(work.args, work.kwargs), work.model, work.leaves)
        for _ in range(_TIMED)
    )
    return min(runs)


def _measured(
    plan: Plan, said: list[list[float | None]], check: Check | None, refusal: str, meeting: Meeting
) -> Plan:
    """The plan with what all ranks measured.

    Raises:
        VerificationError: on some rank the step is not the model's own.
    """
    peaks, seconds = (
        [int(each[0]) for each in said if each[0] is not None],
        [float(each[1] or 0.0) for each in said],
    )
    errors = [float(each[2]) for each in said if each[2] is not None]
    checks: tuple[Check, ...] = ()
    if check is not None:
        worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
        checks = (
            replace(
                check, error=worst, name="loss and all gradients on every rank, as eager averaged over ranks"
            ),
        )
        if not checks[0].passed:
            raise VerificationError(
                "The planned step differs from the model's own on rank "
                f"{meeting.ranks[errors.index(worst)]}: relative error {worst:.3e} > {check.limit:.3e} "
                f"({check.note}). Please report it."
            )
    notes = [
        Because(
            "the original step was not run: {name}; `effcompile verify` compares a small copy of it",
            (str(refusal),),
        )
    ] * bool(refusal)
    notes.append(Because("measured peak of each rank: " + ", ".join(["{bytes}"] * len(peaks)), tuple(peaks)))
    if over := [(r, p) for r, p in zip(meeting.ranks, peaks, strict=False) if excess(p, plan.goal.memory)]:
        each = ", ".join(["rank {} at {bytes}"] * len(over))
        notes.append(Because("above the budget: " + each, tuple(figure for pair in over for figure in pair)))
    measured = Totals(
        seconds=max(seconds), peak_bytes=max(peaks, default=None), error=max(errors, default=None)
    )
    return plan.with_changes(checks=checks, measured=measured, notes=(*plan.notes, *notes))
