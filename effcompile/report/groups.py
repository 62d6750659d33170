"""Group equal decisions and equal refusals, so that a hundred sites print as a few rows.

Sums given figures, prices nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from effcompile.core.reasons import Reason, Requires
from effcompile.ir.plan import Decision, Declined, Plan
from effcompile.report.names import Template, collapse
from effcompile.report.reasons import alike, likeness, together


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionGroup:
    """Decisions of one kind that take the same option against the same baseline by the same pass."""

    kind: str
    option: str
    baseline: str
    by: str
    decisions: tuple[Decision, ...]

    @property
    def kept(self) -> bool:
        """True when the option is what the unplanned model has."""
        return self.option == self.baseline

    @property
    def notes(self) -> dict[str, int]:
        """What is known of the places, and of how many; notes that differ in figures only are one, with
        ranges.
        """
        return {
            together(notes): len(notes)
            for notes in alike(d.known for d in self.decisions if d.known is not None)
        }

    @property
    def error_squared(self) -> float:
        return sum(d.cost.error_squared for d in self.decisions)

    @property
    def sites(self) -> list[Template]:
        return collapse(d.site for d in self.decisions)

    @property
    def strayed(self) -> tuple[Decision, ...]:
        """Decisions where the artifact was found to hold something else."""
        return tuple(d for d in self.decisions if d.applied and d.applied != d.option)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalGroup:
    """Declined options of one kind with the same reason; figures that differ are printed as ranges."""

    kind: str
    option: str
    by: str
    reasons: tuple[Reason, ...]
    sites: tuple[str, ...]

    @property
    def reason(self) -> str:
        """All of them in one phrase."""
        return together(self.reasons)

    @property
    def follows(self) -> bool:
        """Whether it only follows from what was decided at other sites."""
        return isinstance(self.reasons[0], Requires)


def saved_seconds(decision: Decision) -> float:
    """Predicted seconds per call that the decision saves; negative where it costs time."""
    return decision.baseline_cost.seconds - decision.cost.seconds


def saved_weight_bytes(decision: Decision) -> int:
    """Weight bytes that the decision saves; negative where it adds."""
    return decision.baseline_cost.weight_bytes - decision.cost.weight_bytes


#: Kinds of training decisions whose options hold bytes beyond an instant, each its own; those of a form of
#: the whole step are the whole step's.
HOLDING = ("checkpoint", "optimizer states")


def saved_bytes(decision: Decision) -> int:
    """Bytes that a training decision saves; negative where it adds.

    Weights in another form save what is there throughout. A checkpoint saves what is no longer kept from
    forward to backward, and optimizer states what stays between steps; a loss head and a gradient save
    working memory.
    """
    kept = decision.baseline_cost.bytes_kept - decision.cost.bytes_kept
    working = decision.baseline_cost.bytes_transient - decision.cost.bytes_transient
    return saved_weight_bytes(decision) or (kept if decision.kind in HOLDING else working or kept)


def share(plan: Plan, error_squared: float) -> float | None:
    """Share of the error budget max_error² that a squared error takes; None for an exact goal."""
    return error_squared / plan.goal.max_error**2 if plan.goal.max_error else None


def groups(
    decisions: Iterable[Decision], worth: Callable[[Decision], float] = saved_seconds
) -> list[DecisionGroup]:
    """Groups, kinds together: changed before kept, then by what they are worth, among the kinds and within
    each.
    """
    found: dict[tuple[str, str, str, str], list[Decision]] = {}
    for d in decisions:
        found.setdefault((d.kind, d.option, d.baseline, d.by), []).append(d)
    result = [
        DecisionGroup(kind=k, option=o, baseline=b, by=by, decisions=tuple(ds))
        for (k, o, b, by), ds in found.items()
    ]
    worths = {group: sum(map(worth, group.decisions)) for group in result}
    saved: dict[str, float] = {}
    kept: dict[str, bool] = {}
    for group in result:
        saved[group.kind] = saved.get(group.kind, 0.0) + worths[group]
        kept[group.kind] = kept.get(group.kind, True) and group.kept
    order = {
        kind: rank for rank, kind in enumerate(sorted(saved, key=lambda kind: (kept[kind], -saved[kind])))
    }
    return sorted(result, key=lambda g: (order[g.kind], g.kept, -worths[g]))


def refusals(declined: Iterable[Declined]) -> list[RefusalGroup]:
    """Declined options with reasons that are alike, kinds together in order of first appearance."""
    found: dict[tuple[str, str, str, Hashable], list[Declined]] = {}
    for d in declined:
        found.setdefault((d.kind, d.option, d.by, likeness(d.reason)), []).append(d)
    kinds = list(dict.fromkeys(kind for kind, *_ in found))
    result = [
        RefusalGroup(
            kind=kind,
            option=option,
            by=by,
            reasons=tuple(d.reason for d in ds),
            sites=tuple(d.site for d in ds),
        )
        for (kind, option, by, _), ds in found.items()
    ]
    return sorted(result, key=lambda r: kinds.index(r.kind))
