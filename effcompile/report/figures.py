"""The plan's figures as text: totals side by side, ratios, the verdict, the proof.

Shared by terminal and HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from effcompile.core.goal import Goal
from effcompile.core.units import format_bytes, format_error, format_seconds
from effcompile.ir.figures import Certificate, Totals
from effcompile.ir.plan import Plan
from effcompile.ir.step_figures import Fit

NONE = "–"


class PlanVerdict(Enum):
    """Whether the goal is met, and how we know."""

    MET = "✔ met"
    NOT_MET = "✘ not met"
    UNVERIFIED = "? not verified"
    PREDICTED = "◌ predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One row of the totals: the same figure before and after, predicted and measured."""

    name: str
    before: tuple[float | None, float | None]  # predicted, measured
    after: tuple[float | None, float | None]
    show: Callable[[float], str]
    comparable: bool = True  # False for a figure that is a ratio itself

    @property
    def change(self) -> float | None:
        """After ÷ before: of the measured figures where both are there, else of the predicted ones."""
        measured = ratio(self.after[1], self.before[1])
        return measured if measured is not None else ratio(self.after[0], self.before[0])

    @property
    def accuracy(self) -> float | None:
        """Predicted ÷ measured of the result; None where nothing was predicted to compare with."""
        return ratio(*self.after) if self.after[0] and self.comparable else None

    def text(self, value: float | None) -> str:
        return NONE if value is None else self.show(value)


def target_text(plan: Plan) -> str:
    """The target's line, its name in front unless it is this machine."""
    return (
        plan.target_line
        if plan.target in ("auto", *plan.target_line.split())
        else f"{plan.target}: {plan.target_line}"
    )


def measures(plan: Plan) -> list[Measure]:
    """The rows of the totals: time, weight bytes, peak memory, error; of a training step: time, extra time,
    peak memory, error.
    """
    rows: list[tuple[str, Callable[[Totals], float | None], Callable[[float], str]]] = [
        ("time per step" if _training(plan) else "time", lambda t: t.seconds, format_seconds),
        ("weight bytes", lambda t: t.weight_bytes, format_bytes),
        ("peak memory", lambda t: t.peak_bytes, format_bytes),
        ("error", lambda t: t.error, format_error),
    ]
    before, after = (
        (plan.baseline, plan.measured_baseline or Totals()),
        (plan.predicted, plan.measured or Totals()),
    )
    found = [
        Measure(
            name=name,
            before=(get(before[0]), get(before[1])),
            after=(get(after[0]), get(after[1])),
            show=show,
        )
        for name, get, show in rows
    ]
    if _training(plan):
        time = found[0]
        extras = extra(time.after[0], time.before[0]), extra(time.after[1], time.before[1])
        found[1] = Measure(
            name="extra time", before=(None, None), after=extras, show=format_extra, comparable=False
        )
    return found


def _training(plan: Plan) -> bool:
    return plan.goal.mode == "training"


def verdict(plan: Plan) -> PlanVerdict:
    """Met only when something was measured and every check passed; predictions alone are never "met"."""
    if not plan.met or _over_tolerance(plan):
        return PlanVerdict.NOT_MET
    if plan.measured is None:
        return PlanVerdict.PREDICTED
    return PlanVerdict.MET if plan.checks or plan.measured.error is not None else PlanVerdict.UNVERIFIED


def fit_line(fit: Fit) -> str:
    """`FITS in 22.4 GiB: 17.1 GiB to 20.9 GiB, highest in the backward model.layers.3`."""
    interval = f"{format_bytes(fit.low_bytes)} to {format_bytes(fit.high_bytes)}"
    return f"{fit.verdict} in {format_bytes(fit.limit_bytes)}: peak {interval}, highest at {fit.instant}"


def shortfalls(plan: Plan) -> list[str]:
    """Why the goal is not met, one line each; empty when it is."""
    lines = [
        f"check {c.name!r} failed: error {format_error(c.error)} > {format_error(c.limit)}"
        for c in plan.checks
        if not c.passed
    ]
    if _over_tolerance(plan) and plan.measured is not None and plan.measured.error is not None:
        lines.append(f"measured error {format_error(plan.measured.error)} > {format_error(_accepted(plan))}")
    if plan.over_memory is not None and plan.goal.memory is not None:
        how, peak = plan.over_memory
        lines.append(f"{how} peak memory {_more(peak, plan.goal.memory)}")
    return lines


def _more(size: int, limit: int) -> str:
    """`1.20 GiB > 900.0 MiB`; in bytes where both would print alike."""
    left, right = format_bytes(size), format_bytes(limit)
    return f"{left} > {right}" if left != right else f"{size:,} B > {limit:,} B"


def _over_tolerance(plan: Plan) -> bool:
    error = plan.measured.error if plan.measured else None
    return error is not None and error > _accepted(plan)


def _accepted(plan: Plan) -> float:
    """What the checks accept, where there were any: of an exact goal as much as the model itself rounds,
    which in 16 bits is more than an exact goal's own tolerance.
    """
    return max((plan.goal.tolerance, *(check.limit for check in plan.checks)))


#: A kind of work that takes less than this part of a call is not told of.
_SEEN = 0.005
#: Times the peak that a kernel may have run at where that is noise.
_NOISE = 1.1


def where_time_goes(plan: Plan) -> str:
    """`linear 36.6 ms (68 % of peak) · norm 2.10 ms · whole 38.7 ms (64 %)`, predicted, most first.

    Linears with what is merged, attention, then what memory binds. The part: what the arithmetic of its
    products takes at the machine's peak rates, of its time; at the end, of the whole. No part is told where
    one is more than all by more than noise: then the rates were taken when the machine was slower. Empty
    where no peak rate is known.
    """
    whole, roof = plan.predicted.seconds, plan.predicted.roof_seconds
    if not whole or not roof:
        return ""
    kinds: dict[str, tuple[float, float]] = {}
    for each in plan.decisions:
        kind = "linear" if each.kind == "merge" else each.kind
        seconds, own = kinds.get(kind, (0.0, 0.0))
        kinds[kind] = seconds + each.cost.seconds, own + each.cost.roof_seconds
    decided, least = (sum(pair[at] for pair in kinds.values()) for at in (0, 1))
    kinds["the rest"] = whole - decided, roof - least
    shown = sorted(  # sums differ in their last bits from one Python to the next
        ((seconds, own, kind) for kind, (seconds, own) in kinds.items() if seconds >= _SEEN * whole),
        key=lambda each: (-float(f"{each[0]:.2e}"), each[2] == "the rest", each[2]),
    )
    texts, named, true = [], False, all(own <= _NOISE * seconds for seconds, own, _ in shown)
    for seconds, own, kind in shown:
        part = (
            f" ({format_share(min(own / seconds, 1.0))}{'' if named else ' of peak'})"
            if true and own > _SEEN * seconds
            else ""
        )
        named = named or bool(part)
        texts.append(f"{kind} {format_seconds(seconds)}{part}")
    if named:
        texts.append(f"whole {format_seconds(whole)} ({format_share(min(roof / whole, 1.0))})")
    return " · ".join(texts)


def headline(plan: Plan) -> str:
    """What was gained, in one line: `3.83× faster: 175 ms → 45.8 ms · weights 0.25×`; of a training step, its
    memory first.
    """
    time, weights, peak, error = measures(plan)
    how = 1 if plan.measured and plan.measured_baseline and None not in (time.before[1], time.after[1]) else 0
    if _training(plan):
        return " · ".join(
            part for part in (_less_memory(peak), _step_time(time, how), _exactness(plan)) if part
        )
    parts = []
    if (speed := ratio(time.before[how], time.after[how])) is not None:
        parts.append(f"{_speed(speed)}: {time.text(time.before[how])} → {time.text(time.after[how])}")
    if weights.change is not None:
        parts.append(f"weights {format_ratio(weights.change)}")
    if plan.goal.minimize == "memory":
        parts.reverse()
    value = error.after[1] if error.after[1] is not None else error.after[0]
    if value is not None:
        parts.append(f"error {format_error(value)}")
    return " · ".join(parts)


def _less_memory(peak: Measure) -> str:
    """`0.49× the memory`: of the measured peaks where both are there, else of the predicted."""
    return "" if peak.change is None else f"{format_ratio(peak.change)} the memory"


def _step_time(time: Measure, how: int) -> str:
    """`step +6.1 %: 4.31 s → 4.57 s`; where the original was not run, both as they are known: that one
    prediction is below the other says nothing of a step that then took longer.
    """
    if not how and time.after[1] is not None and time.before[0] is not None:
        ours, theirs = time.text(time.after[1]), time.text(time.before[0])
        return f"step {ours} measured · the original's {theirs} predicted"
    change = extra(time.after[how], time.before[how])
    return (
        ""
        if change is None
        else f"step {format_extra(change)}: {time.text(time.before[how])} → {time.text(time.after[how])}"
    )


def _exactness(plan: Plan) -> str:
    """What was verified of the numbers, else what is promised."""
    if plan.measured is not None and plan.measured.error is not None:
        return "bit-identical" if plan.measured.error == 0 else f"error {format_error(plan.measured.error)}"
    return (
        ""
        if plan.predicted.error is None
        else "exact"
        if plan.predicted.error == 0
        else f"error {format_error(plan.predicted.error)}"
    )


def _speed(speed: float) -> str:
    """`3.83× faster`, `1.20× slower`, `as fast` within half a per cent."""
    if 0.995 < speed < 1.005:
        return "as fast"
    return f"{format_ratio(speed)} faster" if speed > 1 else f"{format_ratio(1 / speed)} slower"


def borne_out(plan: Plan) -> list[str]:
    """Nothing where the measured time agrees with the predicted one; else what that means for the proof."""
    if (ratio := plan.misjudged) is None:
        return []
    return [
        f"predicted ÷ measured time is {format_ratio(ratio)}: the proof is of the predicted times, which "
        "this run does not bear out"
    ]


def proof(certificate: Certificate, goal: Goal) -> list[str]:
    """What the certificate says, no more than it says; one line per statement."""
    # first the least bytes are found, then the fastest step within them
    leanest = goal.mode == "training" and goal.minimize == "memory"
    better = "faster" if goal.minimize == "time" or leanest else "smaller"
    within = "within the least memory that was found to do" if leanest else "within this budget"
    facts = (
        f"({certificate.solver}, {certificate.seconds:.1f} s, {certificate.sites} sites, "
        f"{certificate.alternatives} alternatives)"
    )
    if certificate.status == "only one alternative":
        lines = [f"there was only one alternative at every site: nothing to choose {facts}"]
    elif certificate.status == "optimal within gap":
        by = (
            f"more than {math.ceil(1000 * certificate.gap - 1e-6) / 10:.1f} % "
            if certificate.gap > 1e-9
            else ""
        )
        lines = [f"no plan is {by}{better} {within} {facts}"]
    else:
        lines = [f"{certificate.status}: the best plan found {facts}"]
        slack = 1 - certificate.bound / certificate.objective if certificate.objective > 0 else None
        if slack is not None and slack > 0:
            lines.append(f"a plan up to {100 * slack:.1f} % {better} is not ruled out")
    if certificate.error_scale != 1.0:
        scale = format_ratio(certificate.error_scale)
        lines.append(
            f"solved {certificate.rounds}×, at last with squared errors scaled by the measured {scale}"
        )
    elif certificate.rounds > 1:
        lines.append(
            f"solved {certificate.rounds}×, at last with what simulating the plan found above the budget"
        )
    return lines


def ratio(a: float | None, b: float | None) -> float | None:
    """a ÷ b; None where either is missing or b is 0."""
    return None if a is None or not b else a / b


def extra(after: float | None, before: float | None) -> float | None:
    """after ÷ before − 1."""
    part = ratio(after, before)
    return None if part is None else part - 1


def format_extra(value: float) -> str:
    """A part more or less: `+6.1 %`, `−2.0 %`, `+120 %`, `±0 %`."""
    if abs(value) < 0.0005:
        return "±0 %"
    text = f"{100 * value:+.0f} %" if abs(value) >= 1 else f"{100 * value:+.1f} %"
    return text.replace("-", "−")


def format_extra_seconds(seconds: float) -> str:
    """Time added: `+128 ms`; `−` in front where it is saved, a dash for nothing."""
    return NONE if abs(seconds) < 5e-9 else ("+" if seconds > 0 else "−") + format_seconds(abs(seconds))


def format_ratio(value: float | None) -> str:
    """`0.26×`, `12.3×`, `120×`."""
    if value is None:
        return NONE
    if 0 < value < 0.01:
        return "<0.01×"
    return f"{value:.0f}×" if value >= 100 else f"{value:.1f}×" if value >= 10 else f"{value:.2f}×"


def format_share(value: float | None) -> str:
    """`82 %`, `3.2 %`, `<0.1 %`; `−11 %` of what takes some away; a dash for nothing."""
    if not value:
        return NONE
    if value < 0:
        return f"−{format_share(-value)}"
    if value < 0.001:
        return "<0.1 %"
    return f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.1f} %"


def format_saved_seconds(seconds: float) -> str:
    """Time saved; `−` in front where it costs, a dash for nothing."""
    return NONE if abs(seconds) < 5e-9 else format_seconds(seconds).replace("-", "−")


def format_saved_bytes(size: float) -> str:
    """Bytes saved; `−` in front where it costs, a dash for nothing."""
    return NONE if size == 0 else format_bytes(size)


def format_choice(option: str, baseline: str) -> str:
    """`fp32 → bf16`, or `fp32` when it is kept."""
    return option if option == baseline else f"{baseline} → {option}"
