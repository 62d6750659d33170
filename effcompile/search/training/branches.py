"""The forms of one request's step, prepared when the search takes them up.

Most forms are prepared together. An option that is captured late (passes/__init__.py) is a branch: a step of
its own, captured and priced when it is its turn. Its pass proposes the options in the order in which
unplanned steps take longer, so that once one fits with nothing recomputed the others are not looked at.

Options that passes have in reserve are prepared once all that was prepared without them is above the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from effcompile.core.causes import Cause, NotTried, Others, Undivided
from effcompile.core.errors import InfeasibleError
from effcompile.core.reasons import Reason, Unsupported
from effcompile.ir.plan import Declined
from effcompile.passes.training.base import Case, StepChoice, StepOption, StepPass
from effcompile.passes.training.forms import applied, proposed
from effcompile.passes.training.microbatch import undivided
from effcompile.passes.training.step_edit import Refusal
from effcompile.search.training.cases import Joint, StepRecord, recorded
from effcompile.search.training.prepare import Preparation
from effcompile.search.training.segments import that_goes
from effcompile.search.training.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """An option that is captured late, of a choice of a pass."""

    by: StepPass
    choice: StepChoice
    option: StepOption

    @property
    def changes(self) -> bool:
        return self.option.name != self.choice.baseline


#: One option of each choice.
Branch = tuple[Late, ...]


@dataclass(kw_only=True)
class Branches:
    """The branches of one request, each prepared once when it is first asked for.

    Attributes:
        work: the request. case: its step, as it was captured.
        cases: branch → the step with what is captured late. known: (whether in reserve, branch) → its forms.
    """

    work: Work
    case: Case
    declined: dict[Declined, None] = field(default_factory=dict)
    cases: dict[tuple[str, ...], Case | Reason] = field(default_factory=dict)
    known: dict[tuple[bool, tuple[str, ...]], Preparation | Reason] = field(default_factory=dict)

    @cached_property
    def choices(self) -> list[tuple[StepPass, StepChoice]]:
        """What is captured late.

        Raises:
            RequestError: the user wants what cannot be.
        """
        context = self.work.context
        return [
            (each, choice)
            for each in self.work.passes.late
            for choice in proposed(each, self.case, context, self.declined)
        ]

    @cached_property
    def all(self) -> list[Branch]:
        """Every branch; the step as it was captured too where nothing else that is wanted can be had."""
        wanted = [
            tuple(Late(by=by, choice=choice, option=option) for option in choice.options)
            for by, choice in self.choices
        ]
        found = list(product(*wanted))
        return (
            found
            if any(isinstance(self.prepared(branch), Preparation) for branch in found[:1])
            else [self._plain, *found]
        )

    @cached_property
    def _plain(self) -> Branch:
        """The branch in which nothing is captured anew."""
        return tuple(
            Late(
                by=by,
                choice=choice,
                option=next(
                    (o for o in choice.options if o.name == choice.baseline), StepOption(name=choice.baseline)
                ),
            )
            for by, choice in self.choices
        )

    @cached_property
    def whole(self) -> Preparation:
        """The step as it was captured, prepared."""
        found = self.prepared(self._plain)
        assert isinstance(found, Preparation)
        return found

    def prepared(self, branch: Branch, *, reserve: bool = False) -> Preparation | Reason:
        """The forms of a branch with their options, or why there are none.

        What stock torch would run is the whole step in each.

        reserve: those that passes have in reserve.
        """
        key = reserve, _names(branch)
        if key not in self.known:
            self.known[key] = self._prepared(branch, reserve)
        return self.known[key]

    def _prepared(self, branch: Branch, reserve: bool) -> Preparation | Reason:
        key = _names(branch)
        if key not in self.cases:
            self.cases[key] = self._captured(branch)
        if isinstance(case := self.cases[key], Reason):
            return case
        found = self.work.prepare(case, reserve=reserve)
        found = replace(found, declined=(*self.declined, *found.declined))
        if not any(late.changes for late in branch):
            return found
        whole = self.whole
        return replace(found, captured=whole.captured, seconds=whole.seconds, footprint=whole.footprint)

    def _captured(self, branch: Branch) -> Case | Reason:
        """The step with what is captured late, or why it cannot be had."""
        case = self.case
        for late in branch:
            kind = late.choice.kind
            reason = (
                self.work.forbidden.get((kind, late.option.name)) or self.work.forbidden.get((kind, ""))
                if late.changes
                else None
            )
            if reason is not None:
                return reason
            try:
                with (
                    self.work.progress.step(f"capture {late.option.name}") if late.changes else nullcontext()
                ):
                    case = applied(late.by, case, late.choice, late.option)
            except Refusal as refusal:
                return refusal.reason
        return case

    @property
    def made(self) -> list[Preparation]:
        """What was prepared so far, and may be taken."""
        wanted = set(map(_names, self.all))
        return [
            made
            for (_, names), made in self.known.items()
            if names in wanted and isinstance(made, Preparation)
        ]

    def every(self) -> Iterator[Preparation]:
        """All that can be had without what passes have in reserve."""
        yield from (made for branch in self.all if isinstance(made := self.prepared(branch), Preparation))

    def in_reserve(self) -> Iterator[Preparation]:
        """What passes have in reserve, of the branches in which they have."""
        for branch in self.all:
            found = self.prepared(branch)
            if isinstance(found, Preparation) and any(
                chosen.choice.reserve for made in found.variants for chosen in made.case.taken
            ):
                held = self.prepared(branch, reserve=True)
                yield from [held] if isinstance(held, Preparation) else []

    def chosen_from(self, joint: Joint) -> Preparation:
        """What a plan was chosen from."""
        return next(
            (made for made in self.made if any(p.case is joint.case for p in made.variants)), self.whole
        )

    def solve(self, budget: int | None) -> Joint:
        """The fastest plan within the budget; where the goal is least memory, within the least that anything
        fits.

        What passes have in reserve is for a budget that nothing else is within: it is slower by far, so that
        no least is looked for there.

        Raises:
            InfeasibleError: nothing fits. RequestError: the user wants what cannot be.
        """
        return that_goes(self._best(budget), self.work.figures.target, self._best)

    def _best(self, budget: int | None) -> Joint:
        """Whether or not an allocator finds room for it."""
        if self.work.goal.minimize == "time":
            return self._fastest(budget)
        try:
            least = self._without_reserve(1).best.peak_bytes
        except InfeasibleError as error:  # a step takes more than a byte
            least = error.needed
        return self._fastest(least if budget is None else min(least, budget))

    def _fastest(self, budget: int | None) -> Joint:
        record = self._without_reserve(budget)
        for found in () if record.solutions else self.in_reserve():
            record.search(found.variants)
        try:
            return replace(record.best, record=record, bound=record.bound)
        except InfeasibleError as error:
            raise error.with_untried(*self._untried(record)) from error

    def _without_reserve(self, budget: int | None) -> StepRecord:
        record, late = (
            recorded(budget, self.work.progress),
            [branch for branch in self.all if any(each.changes for each in branch)],
        )
        for branch in self.all:
            options = {each.choice.kind: each.option.name for each in branch}
            if record.exhausted is not None and len(late) > 1:
                fits = ", ".join(record.exhausted[each.choice.kind] for each in branch)
                record.refuse(options, Unsupported("not tried: {name} fits with nothing recomputed", (fits,)))
            elif isinstance(found := self.prepared(branch), Reason):
                record.refuse(options, found)
            else:
                for refused, reason in found.refused:
                    record.refuse(refused, reason)
                record.search(found.variants)
        return record

    def _untried(self, record: StepRecord) -> Iterator[Cause]:
        """What else there might be."""
        beside = {chosen.by for chosen in self.whole.variants[0].case.taken if chosen.choice.tells}
        if refused := [d for d in self.whole.declined if d.by in beside]:
            yield NotTried(options=tuple((d.option, d.reason) for d in refused))
        for _, choice in self.choices:
            if told := tuple(record.declined(choice.kind)):
                yield Others(of=choice.kind, options=told)
        if (
            not self.work.passes.late
            and self.case.source is not None
            and (batch := undivided(self.case.source))
        ):
            yield Undivided(batch=batch)


def _names(branch: Branch) -> tuple[str, ...]:
    return tuple(late.option.name for late in branch)
