"""One loop for inference and training: solve, run what was solved, and solve again under what running it
taught.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from effcompile.core.reasons import Reason
from effcompile.ir.formats import Form

Choice = tuple[str, str]
_Made = TypeVar("_Made")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the next solve has to hold to, beyond the goal.

    Attributes:
        round: which solve it is, from 1.
        error_scale: measured over predicted squared error: predictions are multiplied by it.
        rounding_scale: the same of options that round to 16 bits and do no more (`Form.rounds`).
        budget: bytes, None for no limit. less: bytes that it is smaller than the first, for what the
            allocator took beside.
        forbidden: (kind, option) → why it is out of the question: it was run, and did not hold.
        priced_again: how often prices were forgotten and taken anew.
        notes: what was found on the way.
    """

    round: int = 1
    error_scale: float = 1.0
    rounding_scale: float = 1.0
    budget: int | None = None
    less: int = 0
    forbidden: Mapping[Choice, Reason] = field(default_factory=dict)
    priced_again: int = 0
    notes: tuple[Reason, ...] = ()

    def with_errors_scaled(self, factor: float, note: Reason, rounding: float | None = None) -> Constraints:
        """Errors are larger, or smaller, than they were predicted; those of 16 bits by `rounding`, if any."""
        return replace(
            self,
            error_scale=self.error_scale * factor,
            rounding_scale=self.rounding_scale * (factor if rounding is None else rounding),
            notes=(*self.notes, note),
        )

    def scale_of(self, form: Form) -> float:
        """What an option's predicted squared error is multiplied by."""
        return self.rounding_scale if form.rounds else self.error_scale

    def with_less(self, excess: int, note: Reason) -> Constraints:
        """The allocator took so many bytes more than were simulated: the budget is as much smaller.

        There has to be a budget.
        """
        assert self.budget is not None, "nothing is above no budget"
        return replace(self, budget=self.budget - excess, less=self.less + excess, notes=(*self.notes, note))

    def without(self, choice: Choice, why: Reason) -> Constraints:
        """A choice did not keep what it promises."""
        return replace(self, forbidden={**self.forbidden, choice: why})

    def with_new_prices(self, note: Reason) -> Constraints:
        """What was measured of the kernels does not agree with what the whole takes."""
        return replace(self, priced_again=self.priced_again + 1, notes=(*self.notes, note))


def refine(
    solve: Callable[[Constraints], _Made],
    run: Callable[[_Made, Constraints], tuple[_Result, Constraints | None]],
    *,
    rounds: int,
    start: Constraints | None = None,
) -> _Result:
    """Solve and run, until what was run holds or there have been so many rounds; the last result.

    Args:
        solve: decides under constraints; what it raises leaves the loop.
        run: carries a decision out; what became of it, and the constraints for the next solve, None where it
            holds.
        rounds: solves at the most, the first one included.
        start: what the first solve holds to.
    """
    constraints = start or Constraints()
    while True:
        result, learned = run(solve(constraints), constraints)
        if learned is None or constraints.round >= rounds:
            return result
        del result  # the next is made without the memory of this one
        constraints = replace(learned, round=constraints.round + 1)
