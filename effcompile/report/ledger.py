"""What decisions save and cost, as columns: one ledger for inference, one for training.

Sums given figures, prices nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from effcompile.core.cost import Cost
from effcompile.core.units import format_bytes, format_error, format_seconds
from effcompile.ir.plan import Decision, Plan
from effcompile.report import figures as f
from effcompile.report.groups import saved_bytes, saved_seconds, saved_weight_bytes, share


@dataclass(frozen=True, slots=True)
class LedgerFigure:
    """One figure as text; `worse` where it is worse than the baseline's."""

    text: str
    worse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The columns of one mode.

    Attributes:
        headers: of the figures of a group of decisions, at most two lines each.
        figures: those figures, of one decision or of the sum of several.
        worth: by which decisions are ordered, most first.
        option_headers, option_figures: of one option, for comparing it with others at the same site.
        changes: what a decision changes against its baseline, as phrases.
        refusals: how many rows of declined options are printed unless all are asked for.
    """

    headers: tuple[str, ...]
    figures: Callable[[Plan, Sequence[Decision]], list[LedgerFigure]]
    worth: Callable[[Decision], float]
    option_headers: tuple[str, ...]
    option_figures: Callable[[Plan, Cost], list[str]]
    changes: Callable[[Plan, Decision], list[str]]
    refusals: int


def ledger_of(plan: Plan) -> Ledger:
    """The ledger of the plan's mode."""
    return TRAINING if plan.goal.mode == "training" else INFERENCE


def choice(kind: str, option: str, baseline: str) -> str:
    """`fp32 → int8`; a block's checkpoint says itself what it does, without the arrow."""
    return option if kind == "checkpoint" else f.format_choice(option, baseline)


def _inference_figures(plan: Plan, decisions: Sequence[Decision]) -> list[LedgerFigure]:
    seconds, size = sum(map(saved_seconds, decisions)), sum(map(saved_weight_bytes, decisions))
    part = share(plan, sum(d.cost.error_squared for d in decisions))
    return [
        LedgerFigure(f.format_saved_seconds(seconds), seconds < 0),
        LedgerFigure(f.format_saved_bytes(size), size < 0),
        LedgerFigure(f.format_share(part)),
    ]


def _inference_option(plan: Plan, cost: Cost) -> list[str]:
    size = format_bytes(cost.weight_bytes) if cost.weight_bytes else f.NONE
    return [
        format_seconds(cost.seconds),
        size,
        format_error(cost.error),
        f.format_share(share(plan, cost.error_squared)),
    ]


def _inference_changes(plan: Plan, decision: Decision) -> list[str]:
    seconds, size = saved_seconds(decision), saved_weight_bytes(decision)
    part = share(plan, decision.cost.error_squared)
    error = f"error {format_error(decision.cost.error)}" + (
        f" ({f.format_share(part)} of the budget)" if part else ""
    )
    return [
        _change("time", seconds, format_seconds(abs(seconds))),
        _change("weights", size, format_bytes(abs(size))),
        error,
    ]


def _training_figures(plan: Plan, decisions: Sequence[Decision]) -> list[LedgerFigure]:
    seconds, size = -sum(map(saved_seconds, decisions)), sum(map(saved_bytes, decisions))
    return [
        LedgerFigure(f.format_saved_bytes(size), size < 0),
        LedgerFigure(f.format_extra_seconds(seconds), seconds > 0),
        LedgerFigure(_of_step(plan, seconds), seconds > 0),
    ]


def _training_option(_: Plan, cost: Cost) -> list[str]:
    sizes = [format_bytes(size) if size else f.NONE for size in (cost.bytes_kept, cost.bytes_transient)]
    return [f.format_extra_seconds(cost.seconds), *sizes]


def _training_changes(plan: Plan, decision: Decision) -> list[str]:
    seconds, size = saved_seconds(decision), saved_bytes(decision)
    part = _of_step(plan, -seconds)
    of_step = f" ({part} of the step)" if seconds and part != f.NONE else ""
    return [
        _change("memory", size, format_bytes(abs(size))),
        _change("time", seconds, format_seconds(abs(seconds))) + of_step,
    ]


def _of_step(plan: Plan, seconds: float) -> str:
    """Extra time as a part of the unplanned step, both predicted."""
    part = f.ratio(seconds, plan.baseline.seconds)
    return f.NONE if not part else f.format_extra(part)


def _change(name: str, saved: float, size: str) -> str:
    return f"{name} unchanged" if not saved else f"{name} {'−' if saved > 0 else '+'}{size}"


INFERENCE = Ledger(
    headers=("saves\ntime", "saves\nweights", "share of\nerror"),
    figures=_inference_figures,
    worth=saved_seconds,
    option_headers=("time", "weights", "error", "share"),
    option_figures=_inference_option,
    changes=_inference_changes,
    refusals=10,
)
TRAINING = Ledger(
    headers=("saves\nmemory", "extra\ntime", "of the\nstep"),
    figures=_training_figures,
    worth=saved_bytes,
    option_headers=("extra\ntime", "keeps", "needs"),
    option_figures=_training_option,
    changes=_training_changes,
    refusals=4,
)
