"""The error model after a plan whose error was over the limit: what was predicted too low, how much."""

from __future__ import annotations

from collections.abc import Callable

from effcompile.core.findings import Corrected
from effcompile.core.goal import Goal
from effcompile.ir.plan import Plan
from effcompile.search.refine import Constraints

#: A measured squared error is met by planning for this much more, its square's power of it in later rounds.
MARGIN = 1.05
#: Codes whose squared error would have to be more than this many times the predicted one are not all that is
#: off.
_MOST = 16.0


def corrected(
    constraints: Constraints,
    plan: Plan,
    measured: float,
    goal: Goal,
    *,
    emulated: bool = False,
    rounding: Callable[[], float | None] = lambda: None,
) -> Constraints:
    """The constraints after a round whose measured error was over the limit: predictions are scaled so that
    it would not be again.

    Squared errors add up: measured^2 = a * codes^2 + b * rounding^2, one equation for two scales. Rounding
    to 16 bits is the same arithmetic wherever it is done, while codes have scales and ranges that a backend
    takes in its own way: what is too much is theirs, as far as they can be that far off. Scaled alike, codes
    that were off would rule out 16 bits, too (ViT by OpenVINO within 1.0e-2: fp32 beside int8 at 267 ms was
    left, bf16 beside fewer in int8 takes 161).

    Args:
        constraints: that the plan was solved under.
        plan: what was carried out, its errors as predicted under the constraints.
        measured: its error.
        goal: has the limit.
        emulated: whether it is that of emulated arithmetic.
        rounding: emulates what the plan rounds, alone; asked where there is more than that.
    """
    predicted = plan.predicted.error or 0.0
    factor = (
        max((measured / predicted) ** 2, (measured / goal.tolerance) ** 2, 1.0) * MARGIN**constraints.round**2
    )
    squares = [(d.cost.error_squared, d.form is not None and d.form.rounds) for d in plan.decisions]
    by_rounding, codes = (
        sum(square for square, rounds in squares if rounds is kind) for kind in (True, False)
    )
    of_rounding = factor
    if by_rounding > 0 and codes > 0:
        found = rounding()
        of_rounding = 1.0 if found is None else MARGIN * found**2 / by_rounding
        of_codes = (factor * predicted**2 - of_rounding * by_rounding) / codes
        factor, of_rounding = (max(1.0, of_codes), of_rounding) if of_codes <= _MOST else (factor, factor)
    note = Corrected(
        round=constraints.round,
        measured=measured,
        predicted=predicted,
        factor=factor**0.5,
        emulated=emulated,
        rounding=of_rounding**0.5,
    )
    return constraints.with_errors_scaled(factor, note, of_rounding)
