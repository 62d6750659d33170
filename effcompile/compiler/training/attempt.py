"""A step's plan, run: what running shows to be wrong is a constraint of the next solve."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace

from effcompile.core.causes import OverWhenRun, Refuted
from effcompile.core.errors import InfeasibleError
from effcompile.core.reasons import Because
from effcompile.ir.plan import Plan
from effcompile.machine.load import busy
from effcompile.machine.room import Room, device_of
from effcompile.passes.training.base import Case
from effcompile.proof.training.confirm import Verified, verified
from effcompile.proof.training.in_parts import runner_of
from effcompile.proof.training.verify import Result
from effcompile.search.refine import Constraints
from effcompile.search.training import segments
from effcompile.search.training.branches import Branches
from effcompile.search.training.build import build_plan
from effcompile.search.training.cases import Joint
from effcompile.search.training.fit import limit
from effcompile.search.training.moved import RefutedError
from effcompile.search.training.work import Work

#: Solves at the most: choices that do not hold, times and bytes that were others than foreseen.
ROUNDS = 9
#: What a plan says that was found by prices of a second measurement.
PRICED_AGAIN = "predicted ÷ measured time was {}: operators were timed again and the plan was solved again"
_LESS = "the allocator's peak was {bytes} above the budget: solved again with so much less"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a schedule became.

    `first`: its plan as it was decided, where that held at once.
    """

    made: Verified
    joint: Joint
    first: Plan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A plan that was run and held, and what it was chosen from."""

    work: Work
    branches: Branches
    joint: Joint


@dataclass(kw_only=True)
class Attempt:
    """The step as it is prepared now: anew where a choice turned out to be out of the question, or prices to
    be others.

    Attributes:
        originals: the model's own step, run once (`verified`).
        held: what was run within the budget before prices were taken anew. With others a block's search may
            end, when its time is up, without what is lean enough.
    """

    work: Work
    case: Case
    branches: Branches = field(init=False)
    refuted: RefutedError | None = None
    held: _Held | None = None
    originals: dict[bool, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.branches = Branches(work=self.work, case=self.case)

    def start(self) -> Constraints:
        """The budget: what the user allows and the machine has, see fit.py."""
        whole, work = self.branches.whole, self.work
        beside = max(variant.case.beside.resident_bytes for variant in whole.variants)
        return Constraints(
            budget=limit(work.goal.memory, whole.footprint.peak_bytes + beside, work.figures.target)
        )

    def solve(self, constraints: Constraints) -> Joint:
        """The best schedule within the budget; what was run and held before, where none is found any more.

        Raises:
            InfeasibleError: there is none; it says what was refuted on the way, and the budget that it names
                was run where only running shows whether it holds.
        """
        try:
            return self.branches.solve(constraints.budget)
        except InfeasibleError as error:
            if self._least_refuted(error):
                return self.solve(constraints)
            if (held := self.held) is not None:
                self.work, self.branches, self.held = held.work, held.branches, None
                return held.joint
            if constraints.less and constraints.budget is not None:
                asked = constraints.budget + constraints.less
                error = error.needing(
                    error.needed + constraints.less, OverWhenRun(budget=asked, over=constraints.less)
                )
            refuted = self.refuted
            raise (
                error
                if refuted is None
                else error.with_untried(Refuted(therefore=refuted.said, found=str(refuted)))
            ) from refuted

    def _least_refuted(self, error: InfeasibleError) -> bool:
        """Whether the least budget rests on micro-batches that, once run, are not the whole batch: there are
        none from now on.
        """
        work, least = self.work, int(error.nearest.get("memory", 0))
        divided = any(
            variant.case.division is not None for made in self.branches.made for variant in made.variants
        )
        if (
            not divided
            or not least
            or Room.of(device_of(work.model), least, None).refusal(least, least) is not None
        ):
            return False
        with suppress(InfeasibleError):
            joint = self.branches.solve(least)
            if joint.case.division is None:
                return False
            plan = build_plan(
                joint,
                self.branches.chosen_from(joint),
                work.figures,
                replace(work.goal, memory=least),
                work.notes,
            )
            try:
                verified(
                    work,
                    joint.schedule.prepared,
                    runner_of(work.model, joint.case, joint.schedule.emitted),
                    plan,
                    None,
                    self.originals,
                )
            except RefutedError as refuted:
                self._prepare(work.without(refuted))
                self.refuted = refuted
                return True
        return False

    def run(self, joint: Joint, constraints: Constraints) -> tuple[Ran | None, Constraints | None]:
        """Build, verify, measure. That may teach: a choice does not keep what it promises; operators take
        other times than they were measured to take (once); the allocator takes more than the simulated peak.
        """
        work, notes = self.work, [*self.work.notes, *constraints.notes]
        plan = build_plan(joint, self.branches.chosen_from(joint), work.figures, work.goal, notes)
        try:
            runner = runner_of(work.model, joint.case, joint.schedule.emitted)
            foreseen = segments.foreseen(joint, work.figures.target)
            made = verified(work, joint.schedule.prepared, runner, plan, foreseen, self.originals)
        except RefutedError as error:
            if constraints.round == ROUNDS:
                raise
            self._prepare(work.without(error))
            self.refuted = error
            return None, constraints.without((error.kind, error.option), error.reason)
        at_once = constraints.round == 1 and self.refuted is None
        ran, misjudged = (
            Ran(made=made, joint=joint, first=plan if at_once else None),
            made.executable.plan.misjudged,
        )
        if made.over and constraints.budget is not None:
            return ran, constraints.with_less(made.over, Because(_LESS, (made.over,)))
        # where memory is what is minimized, other times would change little but ties; and times of a busy
        # minute are no better than those that there are
        if misjudged is None or constraints.priced_again or work.goal.minimize != "time" or busy():
            return ran, None
        work.forget(self.branches.whole)
        self.held = _Held(work=work, branches=self.branches, joint=joint)
        self._prepare(work)
        return ran, constraints.with_new_prices(Because(PRICED_AGAIN, (round(misjudged, 2),)))

    def _prepare(self, work: Work) -> None:
        self.work, self.branches = work, Branches(work=work, case=self.case)
