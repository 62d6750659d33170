"""Speculation in generation: tokens are drafted from the text before, and one step checks several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from effcompile.core.errors import FormatError, UsageError
from effcompile.core.reasons import Unsupported
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.passes.base import Choice, Context, Declined, Pass
from effcompile.passes.training.base import setting_of

#: The decision's site and kind, and the option that drafts nothing.
SITE, KIND, NONE, LOOK_UP = "tokens", "speculation", "one a step", "look-up"
#: Drafts of a step at the most.
MOST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculate(Pass):
    """Drafts what followed the last tokens where they stood before, as prompt look-up decoding does (Saxena
    2023; the draft of Leviathan et al. 2023, arXiv 2211.17192, without a model).

    A step reads the weights once for the last token and all its drafts; those that are what the model itself
    says are kept, so that greedy text is the same. What it gains is a matter of the text: it is measured on
    the calibration text, once the step is lowered (proof/generation/speculation.py). It takes part only where
    it is named.

    Attributes:
        drafts: tokens that a step may draft; the fastest is taken, none among them.
    """

    drafts: tuple[int, ...] = (2, 3, 5, 7)

    name: ClassVar[str] = "speculate"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing.

        Raises:
            UsageError: one is.
        """
        if not self.drafts or not all(1 <= count <= MOST for count in self.drafts):
            raise UsageError(
                f"speculate.drafts = {self.drafts!r}: give numbers of tokens that a step drafts, 1 to "
                f"{MOST}, as speculate.drafts=2,3,5."
            )

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        if context.goal.mode != "generation":
            reason = Unsupported("a forward call writes no text; ask for mode = 'generation'")
            yield Declined(site=SITE, kind=KIND, option=LOOK_UP, by=self.name, reason=reason)

    def apply(self, program: Program, plan: Plan) -> Program:
        return program


def drafts_tried(passes: Iterable[Pass]) -> tuple[int, ...]:
    """The numbers that are tried; none where speculation is not asked for."""
    return next((each.drafts for each in passes if isinstance(each, Speculate)), ())


def without_drafts(plan: Plan) -> Plan:
    """The plan with nothing said of drafts."""
    decisions = tuple(d for d in plan.decisions if d.by != Speculate.name)
    declined = tuple(d for d in plan.declined if d.by != Speculate.name)
    return replace(plan, decisions=decisions, declined=declined)


def option_of(drafts: int) -> str:
    """What a plan calls so many drafts a step."""
    return f"{LOOK_UP} of {drafts}" if drafts else NONE


def drafts_in(plan: Plan) -> int:
    """Drafts a step that a plan decided on; 0 for none.

    Raises:
        FormatError: a number that is none, or not that of the option.
    """
    found = next((d for d in plan.decisions if d.by == Speculate.name), None)
    if found is None:
        return 0
    settings: Mapping[str, object] = found.settings
    drafts = setting_of(settings, f"{SITE}: {KIND}", "drafts", int)
    if not 0 <= drafts <= MOST or found.option != option_of(drafts):
        raise FormatError(
            f"The plan's decision {SITE}: {KIND} has drafts = {drafts} for {found.option!r}; 0 to {MOST} are "
            "wanted. Plan again, or restore the file."
        )
    return drafts
