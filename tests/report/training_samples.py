"""Training plans as the compiler makes them for a GPT-2-like model, with invented figures.

Run it to look at every report.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from effcompile.core.causes import Instant
from effcompile.core.cost import Cost
from effcompile.core.errors import InfeasibleError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because, Unsupported
from effcompile.ir.figures import Certificate, Check, Totals
from effcompile.ir.plan import Decision, Declined, Plan
from effcompile.ir.step_figures import MemoryTimeline

MIB = 2**20
LAYERS = 12
PARAMETERS = 475 * MIB
STEP = 4.31
KEEP = Cost(bytes_kept=61 * MIB, bytes_transient=84 * MIB)
OPTIONS = {
    "keep everything": KEEP,
    "recompute gelu": Cost(seconds=0.011, bytes_kept=49 * MIB, bytes_transient=84 * MIB),
    "recompute gelu, layer_norm": Cost(seconds=0.019, bytes_kept=37 * MIB, bytes_transient=84 * MIB),
    "recompute all": Cost(seconds=0.104, bytes_kept=3 * MIB, bytes_transient=96 * MIB),
}


def checkpoint(layer: int, option: str) -> Decision:
    why = (
        "its activations are the cheapest to compute again per byte"
        if option != "keep everything"
        else "it fits as it is"
    )
    return Decision(
        site=f"transformer.h.{layer}",
        kind="checkpoint",
        option=option,
        baseline="keep everything",
        by="checkpoint",
        cost=OPTIONS[option],
        baseline_cost=KEEP,
        why=Because(why),
        applied=option,
    )


def decisions() -> tuple[Decision, ...]:
    blocks = [
        checkpoint(
            i, "recompute all" if i < 2 else "recompute gelu, layer_norm" if i < 9 else "keep everything"
        )
        for i in range(LAYERS)
    ]
    head = Decision(
        site="lm_head",
        kind="loss head",
        option="8 chunks",
        baseline="whole",
        by="loss_head",
        cost=Cost(seconds=0.041, bytes_transient=74 * MIB),
        baseline_cost=Cost(bytes_transient=589 * MIB),
        why=Because("three times the logits do not fit"),
        applied="8 chunks",
    )
    tied = Decision(
        site="transformer.wte.weight",
        kind="gradient",
        option="in place",
        baseline="separate",
        by="accumulate",
        cost=Cost(),
        baseline_cost=Cost(bytes_transient=147 * MIB),
        why=Because("two uses of one weight"),
        applied="in place",
    )
    return (*blocks, head, tied)


def declined() -> tuple[Declined, ...]:
    found = []
    for layer in range(LAYERS):
        taken = decisions()[layer].option
        for option, cost in OPTIONS.items():
            if option != taken:
                kept = cost.bytes_kept - OPTIONS[taken].bytes_kept
                slower = (
                    f"{(cost.seconds - OPTIONS[taken].seconds) * 1e3:.0f} ms slower, and its "
                    f"{-kept // MIB} MiB are not needed"
                )
                reason = f"keeps {kept // MIB} MiB more, which does not fit" if kept > 0 else slower
                found.append(
                    Declined(
                        site=f"transformer.h.{layer}",
                        kind="checkpoint",
                        option=option,
                        by="checkpoint",
                        reason=Unsupported(reason),
                        cost=cost,
                    )
                )
    found.append(
        Declined(
            site="",
            kind="offload",
            option="host memory",
            by="offload",
            reason=Unsupported("the device is the host: there is no link"),
        )
    )
    return tuple(found)


def timeline() -> MemoryTimeline:
    """Forward: activations pile up; loss head: the peak; backward: activations go, gradients come."""
    kept = [0.0]
    for layer in range(LAYERS):
        for part in range(4):
            kept.append(
                kept[-1]
                + decisions()[layer].cost.bytes_kept / 4
                + (18 * MIB if part == 2 else 0) * math.sin(part)
            )
    forward = [PARAMETERS + 6 * MIB + int(k * 0.8) for k in kept]
    top = forward[-1]
    head = [top + int(step * MIB) for step in (40, 74, 74, 74, 60)]
    backward = []
    for step in range(90):
        left = 1 - step / 89
        gradients = int((147 + 351 * (step / 89)) * MIB)
        wave = int(26 * MIB * abs(math.sin(step * 0.7)))
        backward.append(PARAMETERS + gradients + int((top - PARAMETERS) * left * 0.85) + wave)
    points = (*forward, *head, *backward)
    peak = max(points)
    parts = {"parameters, buffers, inputs": PARAMETERS, "gradients": 249 * MIB, "kept activations": 121 * MIB}
    parts["working memory"] = peak - sum(parts.values())
    return MemoryTimeline(
        points=points,
        forward_points=len(forward) + len(head),
        parameter_bytes=PARAMETERS,
        peak_phase="backward",
        peak_site="transformer.h.8",
        peak_node="aten.mm.default",
        parts=parts,
    )


def gpt2(**changes: Any) -> Plan:
    """Applied, verified, within its budget."""
    peak = timeline().peak_bytes
    plan = Plan(
        model="GPT2LMHeadModel",
        fingerprint="c01dbeefc01dbeef",
        parameters=124_439_808,
        goal=Goal(mode="training", memory="1100MiB"),
        target="auto",
        target_line="this machine: 2 cores, 220 GFLOP/s fp32, 27 GB/s (calibrated 2026-11-21 02:10)",
        backend="torch-step",
        decisions=decisions(),
        declined=declined(),
        certificate=Certificate(
            status="optimal within gap",
            objective=4.6,
            bound=4.56,
            gap=0.01,
            sites=14,
            alternatives=51,
            seconds=0.42,
            solver="z3 5.4.0",
        ),
        baseline=Totals(seconds=STEP, peak_bytes=1889 * MIB, error=0.0),
        predicted=Totals(seconds=STEP + 0.382, peak_bytes=peak, error=0.0),
        measured=Totals(seconds=4.64, peak_bytes=peak + 4 * MIB, error=0.0),
        measured_baseline=Totals(seconds=4.29, peak_bytes=1890 * MIB, error=0.0),
        checks=(
            Check(name="loss", error=0.0, limit=0.0, note=Because("bit-identical, dropout on")),
            Check(name="gradients", error=0.0, limit=0.0, note=Because("bit-identical: 148 of 148")),
            Check(name="loss and gradients against eager", error=3.1e-7, limit=1e-5),
        ),
        inputs=("input_ids int64 2×512", "labels int64 2×512"),
        notes=(
            Because(
                "dropped: logits (196.3 MiB) are not returned beside the loss; keep_outputs=True keeps them"
            ),
            Because("proven: the emitted graphs were simulated allocation by allocation"),
        ),
        versions={"effcompile": "0.1.0", "torch": "2.13.0", "z3": "5.4.0"},
        memory_timeline=timeline(),
    )
    return replace(plan, **changes)


def planned_only() -> Plan:
    """Predicted for another machine, with a budget far above the need: nothing is recomputed."""
    plan = gpt2()
    return replace(
        plan,
        goal=Goal(mode="training", memory="80GiB"),
        target="h100-sxm",
        target_line="NVIDIA H100 SXM 80 GB (not calibrated: modelled from its data sheet)",
        decisions=tuple(
            replace(d, option=d.baseline, cost=d.baseline_cost, applied="") for d in plan.decisions
        ),
        declined=(),
        predicted=replace(plan.baseline, peak_bytes=timeline().peak_bytes),
        measured=None,
        measured_baseline=None,
        checks=(),
        notes=(),
    )


def over_budget() -> Plan:
    """A measured peak above the budget, a gradient that differs, a forward-only peak, and no parts."""
    points = (200 * MIB, 700 * MIB, 1000 * MIB, 500 * MIB)
    line = MemoryTimeline(
        points=points,
        forward_points=3,
        parameter_bytes=100 * MIB,
        peak_phase="forward",
        peak_site="<lm_head>",
        peak_node="aten.mm.default",
    )
    return gpt2(
        goal=Goal(mode="training", memory=900 * MIB),
        memory_timeline=line,
        predicted=Totals(seconds=1.0, peak_bytes=899 * MIB),
        measured=Totals(seconds=1.1, peak_bytes=1000 * MIB, error=2e-3),
        checks=(Check(name="gradients", error=2e-3, limit=0.0, note=Because("lm_head.weight differs")),),
    )


def infeasible() -> tuple[InfeasibleError, Goal]:
    error = InfeasibleError(
        Instant(
            budget=200 * MIB,
            phase="backward",
            site="lm_head",
            parts=(
                ("parameters, buffers, inputs", 474 * MIB),
                ("gradients and other storages", 474 * MIB),
                ("lm_head itself", 80 * MIB),
            ),
        ),
        binding=("memory", "backward lm_head"),
        nearest={"memory": 612_345_678.0},
    )
    return error, Goal(mode="training", memory="200MiB")


def front() -> list[Plan]:
    """Plans of a front, from the least memory to the unplanned step."""
    made = []
    for peak, slower in (
        (584, 0.31),
        (640, 0.19),
        (720, 0.122),
        (830, 0.083),
        (980, 0.046),
        (1240, 0.018),
        (1889, 0.0),
    ):
        totals = Totals(seconds=STEP * (1 + slower), peak_bytes=peak * MIB, error=0.0)
        made.append(
            gpt2(
                goal=Goal(mode="training", memory=(peak + 7) * MIB),
                predicted=totals,
                measured=None,
                measured_baseline=None,
            )
        )
    return made


OTHERS = (("HF checkpointing", 806 * MIB, 5.17), ("torch budget 0.5", 861 * MIB, 4.75))
