"""Has the passes over a training step say its forms, and gives it those that a saved plan took.

A pass sees none of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from effcompile.core.cost import Cost
from effcompile.core.errors import FormatError
from effcompile.core.reasons import Reason, Unsupported
from effcompile.ir.figures import check_reasons
from effcompile.ir.footprint import Footprint
from effcompile.ir.plan import Decision, Declined
from effcompile.ir.roles import Leaving
from effcompile.ir.sane import objection
from effcompile.ir.step import Step
from effcompile.passes.training.base import (
    Case,
    Chosen,
    RequestError,
    StepChoice,
    StepContext,
    StepOption,
    StepOutcome,
    StepPass,
)
from effcompile.passes.training.step_edit import Refusal


@dataclass(kw_only=True)
class Forms:
    """The forms of a step, the step as it is first; what passes decline; and options that could not be had,
    with those before them.

    reserve: choices that have options in reserve have these alone.
    """

    cases: list[Case] = field(default_factory=list)
    declined: dict[Declined, None] = field(default_factory=dict)
    refused: list[tuple[dict[str, str], Reason]] = field(default_factory=list)
    reserve: bool = False

    def ask(self, each: StepPass, context: StepContext) -> None:
        """Have a pass change every form in all of its ways."""
        self.cases = [made for case in self.cases for made in self._of(each, case, context)]

    def _of(self, each: StepPass, case: Case, context: StepContext) -> list[Case]:
        """Every form of a step that one pass has.

        A pass that raises, or proposes what cannot be, is declined with the reason, and the step stays as it
        is; but what the user asked wrongly is raised.
        """
        try:
            choices = [self._of_choice(choice) for choice in proposed(each, case, context, self.declined)]
            found = [case]
            for choice in choices:
                found = [
                    made
                    for form in found
                    for option in _ordered(choice)
                    for made in self._tried(case, each, form, choice, option)
                ]
        except RequestError:
            raise
        except Exception as error:
            reason = Unsupported.of("it could not be asked: {}: {}", type(error).__name__, str(error))
            self.declined[
                Declined(site=each.name, kind="pass", option=each.name, by=each.name, reason=reason)
            ] = None
            return [case]
        return found

    def _of_choice(self, choice: StepChoice) -> StepChoice:
        return (
            replace(choice, options=choice.reserve, reserve=()) if self.reserve and choice.reserve else choice
        )

    def _tried(
        self, asked: Case, each: StepPass, form: Case, choice: StepChoice, option: StepOption
    ) -> Iterator[Case]:
        """The form with an option, if it can be had; what was made while proposing stands where the pass has
        not changed the step since.
        """
        try:
            yield applied(
                each,
                form,
                choice,
                option if form.step is asked.step else replace(option, made=None, make=None),
            )
        except Refusal as refusal:
            self.refused.append(({**form.options, choice.kind: option.name}, refusal.reason))


def forms(passes: Sequence[StepPass], case: Case, context: StepContext, *, reserve: bool = False) -> Forms:
    """Every form of a step that these passes have, one after the other; with what they have in reserve, or
    without.

    Raises:
        RequestError: the user wants what cannot be.
    """
    found = Forms(cases=[case], reserve=reserve)
    for each in passes:
        found.ask(each, context)
    found.cases = _finished(found.cases)
    return found


def _finished(cases: Sequence[Case]) -> list[Case]:
    """Cases with the last change of their graphs; those that have one step in common still have."""
    changed: dict[int, Step] = {}
    for case in cases:
        if id(case.step) not in changed:
            changed[id(case.step)] = case.step if case.last is None else case.last(case.step)
    return [replace(case, step=changed[id(case.step)], last=None) for case in cases]


def proposed(
    each: StepPass, case: Case, context: StepContext, declined: dict[Declined, None]
) -> list[StepChoice]:
    """The choices of a pass that may be taken; what it declines, and what is out of the question, is added to
    `declined`.
    """
    items = [part for item in each.propose(case, context) for part in _allowed(item, each, context)]
    choices = [item for item in items if not isinstance(item, Declined)]
    others = {chosen.choice.kind for chosen in case.taken if chosen.by != each.name}
    kinds = Counter([*others, *(choice.kind for choice in choices)])
    if twice := [kind for kind, times in kinds.items() if times > 1]:
        raise ValueError(f"it decides about {twice[0]!r}, which is decided already")
    declined |= dict.fromkeys(item for item in items if isinstance(item, Declined))
    return choices


def _allowed(
    item: StepChoice | Declined, each: StepPass, context: StepContext
) -> Iterator[StepChoice | Declined]:
    """A proposal, checked; options that are out of the question are declined."""
    if isinstance(item, Declined):
        yield item
        return
    choice = _checked(item)
    out = {
        option.name: context.forbidden.get((choice.kind, option.name))
        for option in (*choice.options, *choice.reserve)
    }
    for name, reason in out.items():
        if reason is not None:
            yield Declined(
                site=choice.site or choice.kind, kind=choice.kind, option=name, by=each.name, reason=reason
            )
    if left := tuple(option for option in choice.options if out[option.name] is None):
        yield replace(
            choice,
            options=left,
            reserve=tuple(option for option in choice.reserve if out[option.name] is None),
        )


def reapplied(passes: Sequence[StepPass], case: Case, decisions: Iterable[Decision]) -> Case:
    """The step with the options that a saved plan took.

    Raises:
        FormatError: a pass does not know one, or this step cannot have it.
    """
    made = [d for d in decisions if d.option != d.baseline or d.settings]
    for each in passes:
        kinds: dict[str, list[Decision]] = {}
        for decision in (d for d in made if d.by == each.name):
            kinds.setdefault(decision.kind, []).append(decision)
        for kind, told in kinds.items():
            settings = {name: value for d in told for name, value in d.settings.items()}
            option = StepOption(name=told[0].option, settings=settings, why=told[0].why)
            choice = StepChoice(site=told[0].site, kind=kind, baseline=told[0].baseline, options=(option,))
            try:
                case = applied(each, case, choice, option)
            except Refusal as refusal:
                raise FormatError(
                    f"The plan has {kind} = {option.name}, which this step cannot have: {refusal}. Plan "
                    "again."
                ) from refusal
    return _finished([case])[0]


def _ordered(choice: StepChoice) -> list[StepOption]:
    """The baseline first."""
    return sorted(choice.options, key=lambda option: option.name != choice.baseline)


def applied(each: StepPass, case: Case, choice: StepChoice, option: StepOption) -> Case:
    """A case with an option of a choice that this pass proposed, or a plan has: checked."""
    changed = case
    if option.name != choice.baseline or option.settings:
        changed = _sound(
            option.made or (option.make() if option.make is not None else each.apply(case, choice, option))
        )
        if changed.step is not case.step:
            changed.step.graph.lint()
        # of another part of the batch, or of the parameters, it has other shapes
        if changed.division is case.division and changed.step.spread is case.step.spread:
            _same_results(case.step, changed.step)
    light = {one.name: replace(one, made=None, make=None) for one in (*choice.options, option)}
    chosen = Chosen(
        choice=replace(choice, options=tuple(light.values())), option=light[option.name], by=each.name,
        exact=each.exact
    )  # fmt: skip
    return replace(changed, taken=(*case.taken, chosen))


def told(
    chosen: Chosen, outcome: StepOutcome, cost: Cost, baseline_cost: Cost, why: Reason | None
) -> list[Decision]:
    """What a plan says of an option: one decision at the choice's site, and what the option itself tells."""
    choice, option = chosen.choice, chosen.option
    own = [
        Decision(
            site=choice.site,
            kind=choice.kind,
            option=option.name,
            baseline=choice.baseline,
            by=chosen.by,
            cost=cost,
            baseline_cost=baseline_cost,
            why=option.why or why,
            note=option.note,
            settings=option.settings,
        )
    ]
    return [*own * bool(choice.site), *(option.told(outcome) if option.told is not None else ())]


def _checked(choice: StepChoice) -> StepChoice:
    if not isinstance(choice, StepChoice):
        raise TypeError(f"it proposes {choice!r}, which is neither a StepChoice nor a Declined")
    offered = (*choice.options, *choice.reserve)
    names = [option.name for option in offered]
    if len(set(names)) < len(names):
        raise ValueError(f"two options of {choice.site or choice.kind} have one name: {', '.join(names)}")
    if choice.baseline not in names and not choice.settled:
        raise ValueError(
            f"the baseline {choice.baseline!r} of {choice.site} is not among its options: "
            f"{', '.join(names) or 'none'}"
        )
    for option in offered:
        check_reasons(f"the option {option.name!r} at {choice.site!r}", option.why, option.note)
        if strange := [value for value in option.settings.values() if not _is_setting(value)]:
            raise TypeError(
                f"{strange[0]!r} is no setting, which a plan keeps: a whole number, a word, words"
            )
    return choice


def _is_setting(value: object) -> bool:
    return isinstance(value, int | str) or (
        isinstance(value, tuple) and all(isinstance(word, str) for word in value)
    )


def _sound(case: Case) -> Case:
    """The same case, whose figures can be added to a step's.

    Raises:
        TypeError: it is none. ValueError: a figure that is negative, or no number.
    """
    if not isinstance(case, Case) or not isinstance(case.beside, Footprint):
        raise TypeError(f"it makes {case!r:.80} of the step, which is no Case with a Footprint beside it")
    figures = {
        "repeats": case.repeats,
        "seconds_beside": case.seconds_beside,
        "beside": case.beside,
        "around": case.around,
    }
    if said := objection(figures):
        raise ValueError(f"of the form that it makes, {said.lstrip('.')}")
    return case


def _same_results(before: Step, after: Step) -> None:
    """A form returns what the step returns; gradients may be consumed instead."""
    if len(after.results) != len(after.roles.leaving):
        raise ValueError(
            f"the step it returned has other results: {len(after.results)}, with roles for "
            f"{len(after.roles.leaving)}"
        )
    for name, of in (("results", _returned), ("inputs", lambda step: [_shape(node) for node in step.inputs])):
        if of(before) != of(after):
            raise ValueError(f"the step it returned has other {name}")


def _returned(step: Step) -> tuple[object, ...]:
    """The shapes of what a step returns, of gradients that of their parameters."""
    parameters = {name: _shape(node) for node, name in step.parameters.items()}
    gradients = {
        name: _shape(node) for name, node in step.roles.results(Leaving.GRADIENT, step.results).items()
    }
    gradients |= {name: parameters[name] for name in step.consumed}
    return *map(_shape, step.forward_results), gradients, *map(_shape, step.having(Leaving.INPUT_GRADIENT))


def _shape(node: fx.Node | None) -> tuple[int, ...] | None:
    return None if node is None else tuple(node.meta["val"].shape)
