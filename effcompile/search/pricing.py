"""What each option costs and how much error it makes, and the best plan of every backend under
these prices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from effcompile.backends import load_backend, refusal, told, usable_backends
from effcompile.backends.base import Backend
from effcompile.capture import short_texts, variants
from effcompile.capture.padding import padded_behind
from effcompile.capture.short import LENGTHS
from effcompile.core import effort
from effcompile.core.errors import EffcompileError, InfeasibleError, InternalError, LoweringError, UsageError
from effcompile.core.findings import Failed
from effcompile.core.goal import Goal
from effcompile.core.reasons import Reason, Unsupported
from effcompile.core.types import Inputs
from effcompile.estimate import kept, sensitivity
from effcompile.estimate.inputs import stress_inputs
from effcompile.estimate.sensitivity import Sensitivity
from effcompile.ir.figures import Candidate
from effcompile.ir.formats import FP32, Form, WeightFormat
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine.machines import load_target
from effcompile.machine.target import KernelCall, Target, linear_call
from effcompile.passes import Pass
from effcompile.search.bound import beyond
from effcompile.search.machine import Machine, is_here
from effcompile.search.progress import Progress
from effcompile.search.regimes import Regimes
from effcompile.search.search import Search, explain_infeasible, stored_notes

#: Columns and rows of a weight of which every format's groups and tiles are whole.
_EVEN = (4096, 4096)
#: Seconds for measuring how much each low-precision option changes the output.
SENSITIVITY_SECONDS = 15.0
#: Inputs that static quantisers take ranges from, and short texts that are made of them all.
_RANGED, _SHORT = 8, 256
#: The backend that is priced first.
_FIRST = "torch-eager"


def backends_for(
    target: str | Target, backend: str | None, place: torch.device, *, lowered: bool = True
) -> tuple[list[Backend], dict[str, Reason]]:
    """For this machine: what runs here. For another one: only what is named, else what would run there.

    `place`: where the model lies. `lowered`: the plan is carried out here, so that a backend that is named
    has to run here.
    """
    here = is_here(target, place)
    if backend is not None and not here and not lowered:
        return [load_backend(backend)], {}
    if here or backend is not None:
        return usable_backends(backend)
    device = (target if isinstance(target, Target) else load_target(target)).device
    return [
        load_backend(name)
        for name in (("onnxruntime", "torch-inductor") if device == "cpu" else ("torch-inductor",))
    ], {}


def steps_elsewhere(target: str | Target, place: torch.device, named: str | None) -> list[Backend]:
    """What would run a step of generation on a GPU that is not here, or that of it which is named; none where
    the target is this machine, or another processor.
    """
    if (
        is_here(target, place)
        or (target if isinstance(target, Target) else load_target(target)).device == "cpu"
    ):
        return []
    return [load_backend(name) for name in ("triton", "torch-eager") if named in (None, name)]


def standing_in(backends: list[Backend], program: Program, goal: Goal) -> list[Backend]:
    """Of backends that stand in for those of a machine that is not here: the first that takes the program."""
    return [backend for backend in backends if refusal(backend, program, goal) is None][:1] or backends


def search_for(
    program: Program,
    goal: Goal,
    machine: Machine,
    passes: tuple[Pass, ...],
    progress: Progress,
    backends: Sequence[Backend] = (),
) -> Search:
    """What may be decided, priced on this machine, with the errors of what is not exact measured.

    `backends`: that may carry it out; an attention that none of them has a kernel for is not measured.
    """
    options = {} if goal.exact else measured_options(passes)
    if backends and "attention" in options:
        options["attention"] = tuple(form for form in options["attention"] if is_had(form, backends))
    # as the best of them has it: a plan of another is found out when it is rehearsed
    rounds = not (machine.here and summing(backends))
    measured, text = _sensitivity(program, goal, passes, options, rounds, progress)
    notes = (*machine.notes, *stored_notes(program), *program.mends, *program.fixed)
    return Search(
        program=program, regimes=Regimes.of_call(program),
        goal=goal, machine=machine, passes=passes, sensitivity=measured, calibration_inputs=text, notes=notes,
        formats=formats(options),
    )  # fmt: skip


def is_had(form: Form, backends: Sequence[Backend], kind: str = "attention") -> bool:
    """Whether one of the backends has a kernel for it, of an attention, a linear or an embedding."""
    calls = [KernelCall(kernel=f"attention/{form.word}", dims=(1, 1, 1, 1, 1))]
    if (held := form.weights) is not None:  # few rows and many; K and N are what any kernel takes
        calls = [linear_call(held, (rows, *_EVEN)) for rows in (1, 512)]
    if held is not None and kind == "embedding":
        calls = [KernelCall(kernel=f"embedding/{held.family}", dims=_EVEN)]
    return any(backend.lacks(call) is None for backend in backends for call in calls)


def formats(options: Mapping[str, tuple[Form, ...]]) -> tuple[WeightFormat, ...]:
    """What a dense linear may be held in, fp32 first."""
    return (FP32, *(form.weights for form in options.get("linear", ()) if form.weights is not None))


def measured_options(passes: tuple[Pass, ...]) -> dict[str, tuple[Form, ...]]:
    """kind → options whose error has to be measured; several passes may add some to one kind of site."""
    options: dict[str, tuple[Form, ...]] = {}
    for each in passes:
        for kind, forms in each.measured_options().items():
            options[kind] = tuple(dict.fromkeys((*options.get(kind, ()), *forms)))
    return options


def summing(backends: Sequence[Backend]) -> frozenset[str]:
    """Names of those whose products of bf16 come out in fp32 here."""
    return frozenset(each.name for each in backends if getattr(each, "sums_bf16", bool)())


def replaced_weights(
    passes: tuple[Pass, ...], program: Program
) -> dict[tuple[str, str], Callable[[], torch.Tensor]]:
    """(site, option) → the weight that a linear has under an option that changes nothing else."""
    weights: dict[tuple[str, str], Callable[[], torch.Tensor]] = {}
    for each in passes:
        weights |= each.replaced_weights(program)
    return weights


def _sensitivity(
    program: Program,
    goal: Goal,
    passes: tuple[Pass, ...],
    options: Mapping[str, tuple[Form, ...]],
    rounds: bool,
    progress: Progress,
) -> tuple[Sensitivity, str]:
    """Errors of every low-precision option, where the goal allows any; and which inputs they were measured
    on.
    """
    if goal.exact:
        return Sensitivity(errors={}, method="the goal allows no error"), ""
    given = program.calibration
    inputs = [
        *(given or [(program.args, program.kwargs), *sensitivity.generate_inputs(program, 3)]),
        *stress_of(program, goal),
    ]
    text = (
        f"the user's: {len(given)} inputs"
        if given
        else f"the example and {sensitivity.describe_generated(3).partition(': ')[2]}"
    )
    weights = replaced_weights(passes, program)
    with progress.step("measure sensitivity"):
        tell = lambda _, share: progress.update("measure sensitivity", int(share * 100), 100)  # noqa: E731
        measured = kept.measured(
            program, inputs, options,
            weights=weights, rounds=rounds, budget_seconds=SENSITIVITY_SECONDS, progress=tell,
        )  # fmt: skip
    return measured, f"{text}; {measured.method}"


def plans_for(
    search: Search, backends: Sequence[Backend], absent: Mapping[str, Reason], progress: Progress
) -> tuple[list[tuple[Backend, Plan]], list[Candidate]]:
    """A plan per backend, best predicted first, and a candidate line for each backend.

    Raises:
        UsageError: no backend takes the model.
        InfeasibleError: no backend can meet the goal. InternalError, LoweringError: none can be priced; the
            first one's.
    """
    plans: list[tuple[Backend, Plan]] = []
    candidates = [Candidate(backend=name, note=reason) for name, reason in absent.items()]
    infeasible: dict[str, InfeasibleError] = {}
    failed: list[EffcompileError] = []
    # what takes least to price is priced first: others may be beyond its plan at once
    for backend in sorted(backends, key=lambda each: each.name != _FIRST):
        try:
            with progress.step(f"price and solve for {backend.name}"):
                reason = (
                    refusal(backend, search.program, search.goal)
                    or _beaten(backend, plans)
                    or beyond(search, backend, plans)
                )
                if reason is None:
                    plans.append((backend, search.plan_for(backend)))
                else:
                    candidates.append(Candidate(backend=backend.name, note=reason))
        except InfeasibleError as error:
            infeasible[backend.name] = error
            candidates.append(
                Candidate(backend=backend.name, note=Unsupported.of("infeasible: {}", str(error)))
            )
        except (InternalError, LoweringError) as error:  # the others are there
            failed.append(error)
            candidates.append(Candidate(backend=backend.name, note=Failed(message=str(error))))
    if not plans:
        if infeasible:
            raise explain_infeasible(infeasible)
        if failed:
            raise failed[0]
        raise UsageError(
            "No backend takes this model: " + "; ".join(f"{c.backend}: {c.note}" for c in candidates)
        )
    plans.sort(key=lambda pair: pair[1].certificate.objective)
    candidates = [
        Candidate(backend=b.name, predicted_seconds=p.predicted.seconds) for b, p in plans
    ] + candidates
    return plans, candidates


def _beaten(backend: Backend, plans: Sequence[tuple[Backend, Plan]]) -> Reason | None:
    """Why a backend is not priced beside those that are, by its own word."""
    said = getattr(backend, "beaten_by", None)
    if said is None or effort.is_high():
        return None
    reasons = (told(backend.name, said(plan)) for _, plan in plans)
    return next((reason for reason in reasons if reason is not None), None)


def stress_of(program: Program, goal: Goal) -> list[Inputs]:
    """What a robust goal also calibrates with."""
    return [(args, kwargs) for _, args, kwargs in stress_inputs(program)] if goal.robust else []


def generated(program: Program) -> list[Inputs]:
    """Inputs to calibrate static quantisers with: shaped like the example, and at the other sizes and
    paddings it will meet.

    Ranges taken from full sequences alone do not hold for padded ones: the error of NNCF's int8 BERT-base is
    2.8e-2 on inputs like its calibration's and 5.3e-2 with a padded mask.
    """
    like_example = sensitivity.generate_inputs(program, 4, seed=1)
    right = padded_behind(program)
    other = [variants(replace(program, args=args, kwargs=kwargs), right) for args, kwargs in like_example[:2]]
    return [*like_example, *((args, kwargs) for found in other for _, args, kwargs in found[1:])]


def ranged(program: Program, goal: Goal, inputs: Sequence[Inputs]) -> list[Inputs]:
    """What static quantisers take their ranges from: some of these inputs, and texts of a token out of them.

    SmoothQuant (Xiao et al. 2023, eq. 4) divides each channel by its largest number, which few rows do not
    show: a BERT whose ranges were of two such texts was off by 5.0e-2 there and by 1.2e-2 at 64 tokens; of
    32, by 1.1e-2 and 7.0e-3.
    """
    if goal.exact:
        return list(inputs[:_RANGED])
    few = inputs[:_RANGED]
    given = (replace(program, args=args, kwargs=dict(kwargs)) for args, kwargs in few)
    rows = max(1, _SHORT // len(few)) if few else 0
    short = [
        found for each in given for length in LENGTHS for found in short_texts(each, rows // length, length)
    ]
    return [*few, *short, *stress_of(program, goal)]
