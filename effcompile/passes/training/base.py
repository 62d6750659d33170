"""The contract of a pass over a whole training step: propose forms of it, and give it one of them.

Ours and those of installed packages (entry point group `effcompile.training_passes`) are asked alike: each form is priced, cut
into blocks and scheduled, the fastest that fits is taken, and the plan says what was decided and why the others were not. A
saved plan is applied by the same `apply`, from the settings in its decisions. A pass knows no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, TypeVar

from torch import fx

from effcompile.capture.source import Source
from effcompile.core.cost import Cost
from effcompile.core.errors import FormatError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Reason, Unsupported
from effcompile.ir.footprint import Footprint
from effcompile.ir.plan import Decision, Declined, Setting
from effcompile.ir.step import DividedStep, Step
from effcompile.machine.target import Target
from effcompile.passes.training.optimizer_ways import GivenOptimizer, StatesOption
from effcompile.passes.training.step_edit import Refusal
from effcompile.schedule.blocks import Blocks

T = TypeVar("T", bound=Setting)


class RequestError(UsageError):
    """The user wants of a pass what cannot be. It is raised to them; any other error only leaves the pass out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step with what stands beside it, and the options by which it has become what it is.

    Attributes:
        step: its graph. taken: the options, in the order in which they were applied.
        source: captures the step anew, as the passes that change the forward before autograd do; None where it cannot be.
        front: the forward that autograd was traced through, as it was exported; None where there is none, or it was changed.
        scaled: whether the loss is scaled, so that small gradients do not vanish: an overflow must be seen before any update.
        optimizer: the user's, None without one. states: how its states are held, and its update is made.
        division: of the batch, where the step is of one micro-batch.
        last: a change of the graph that comes after those of all passes.
        beside: bytes that stand beside forward and backward. repeats: how often a step runs these two.
        seconds_beside: of a whole step's time, what they do not take.
        around: what stands beside them → bytes. notes: what the user must know of it.
    """

    step: Step
    taken: tuple[Chosen, ...] = ()
    scaled: bool = False
    source: Source | None = None
    front: fx.GraphModule | None = None
    optimizer: GivenOptimizer | None = None
    states: StatesOption | None = None
    division: DividedStep | None = None
    last: Callable[[Step], Step] | None = None
    beside: Footprint = field(default_factory=Footprint)
    repeats: float = 1.0
    seconds_beside: float = 0.0
    around: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, str]:
        """What was decided → the option's name."""
        return {chosen.choice.kind: chosen.option.name for chosen in self.taken}

    @property
    def exact(self) -> bool:
        """Whether nothing that changes numbers was taken."""
        return all(chosen.exact or not chosen.changes for chosen in self.taken)

    @property
    def label(self) -> str:
        """What the report calls it: all that is otherwise than in the step as it was captured."""
        return ", ".join(chosen.label for chosen in reversed(self.taken) if chosen.label) or "as captured"

    @property
    def levers(self) -> frozenset[str]:
        """What is decided otherwise than in the step as it was given, where there was a choice."""
        return frozenset(chosen.choice.kind for chosen in self.taken if chosen.label)

    def seconds(self, of_step: float) -> float:
        """Of a whole step, from those of one forward and backward."""
        return self.repeats * of_step + self.seconds_beside

    def seconds_before_update(self, of_step: float) -> float:
        """The same without the optimizer's step."""
        return self.seconds(of_step) - (self.states.seconds if self.states is not None else 0.0)


class Prices(Protocol):
    """What operators take on the target: measured where it is this machine, modelled elsewhere."""

    def priced(self, nodes: Sequence[fx.Node]) -> Sequence[float]:
        """Seconds of each operator, which may be in no plan."""
        ...

    def unplanned(self, *steps: Step) -> list[tuple[float, int]]:
        """Of each step the seconds of its operators, and the bytes that the largest of them reads, makes and needs for itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a proposal is made for.

    Attributes:
        goal, target, prices: what for, and what operators take there. here: the target is this machine.
        forbidden: (kind, option) → why it is out of the question: it was run, and did not hold.
    """

    goal: Goal
    target: Target
    here: bool
    prices: Prices
    forbidden: Mapping[tuple[str, str], str] = field(default_factory=dict)


def setting_of(settings: Mapping[str, object], decision: str, name: str, kind: type[T]) -> T:
    """One of a decision's settings, which may come from a file; `decision` names it.

    Raises:
        FormatError: it is not there, or of another type.
    """
    value = settings.get(name)
    if type(value) is not kind:
        raise FormatError(
            f"The plan's decision {decision} has {name} = {value!r}, where a {kind.__name__} is wanted. Plan again, or restore the file."
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOption:
    """One form of the step.

    Attributes:
        settings: what the pass needs to make it again; a baseline that has some is made like the others.
        why: what it gains, in one line. note: what else is to be known of it.
        told: what the plan says of it, beside the decision at the choice's site.
        made: the form, where it was made to be proposed. make: makes it with what was known then, instead of `apply`.
    """

    name: str
    settings: Mapping[str, Setting] = field(default_factory=dict, hash=False)
    why: Reason | None = None
    note: Reason | None = None
    told: Callable[[Outcome], Iterable[Decision]] | None = field(default=None, compare=False, repr=False)
    made: Case | None = field(default=None, compare=False, repr=False)
    make: Callable[[], Case] | None = field(default=None, compare=False, repr=False)

    def setting(self, name: str, kind: type[T]) -> T:
        """One of the settings, which may come from a file.

        Raises:
            FormatError: it is not there, or of another type.
        """
        return setting_of(self.settings, repr(self.name), name, kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """The forms that a step may have at one place. Its scope is the whole step.

    Attributes:
        site: the place; "" where its options tell the places themselves.
        kind: what is decided there, which is the lever's name in the report too.
        baseline: the option that the step has as it is; it is among the options, unless it is out of the question (`settled`).
        tells: its options tell all decisions themselves, that at the site too: they stand beside the step, and know what they cost.
    """

    site: str
    kind: str
    baseline: str
    options: tuple[StepOption, ...]
    settled: bool = False
    tells: bool = False

    def option(self, name: str) -> StepOption:
        return next(option for option in self.options if option.name == name)


class StepPass(Protocol):
    """A frozen dataclass; its fields are its options, also on the CLI. `exact` is False for one that changes numbers."""

    name: ClassVar[str]
    exact: ClassVar[bool]

    def propose(self, case: Case, context: Context) -> Iterable[StepChoice | Declined]:
        """Choices and refusals for this step; pure."""
        ...

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """A copy of the case in this form; what was `taken` is noted by the caller.

        Raises:
            Refusal: this step cannot have it, as shows only now.
            FormatError: the option comes from a saved plan, and this step cannot have it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An option of a choice, and the pass that proposed it. `exact`: the pass changes no numbers."""

    choice: StepChoice
    option: StepOption
    by: str
    exact: bool

    @property
    def changes(self) -> bool:
        return self.option.name != self.choice.baseline

    @property
    def label(self) -> str:
        """What the report calls a step with it; "" for one as it was."""
        return f"{self.choice.kind} {self.option.name}" if self.changes and len(self.choice.options) > 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The plan that an option became part of.

    Attributes:
        case: the form that was taken. cut: its step in blocks.
        seconds: of the whole step as planned, the update left out. unplanned_seconds: of one forward and backward with all kept.
        unplanned: the bytes of these.
        captured: seconds, and the peak as transient bytes, of the step as it was captured with all kept.
    """

    case: Case
    cut: Blocks
    seconds: float
    unplanned_seconds: float
    unplanned: Callable[[], Footprint]
    captured: Cost


@dataclass(kw_only=True)
class Forms:
    """The forms of a step, the step as it is first; what passes decline; and options that could not be had, with those before them."""

    cases: list[Case] = field(default_factory=list)
    declined: dict[Declined, None] = field(default_factory=dict)
    refused: list[tuple[dict[str, str], str]] = field(default_factory=list)

    def ask(self, each: StepPass, context: Context) -> None:
        """Have a pass change every form in all of its ways."""
        self.cases = [made for case in self.cases for made in self._of(each, case, context)]

    def _of(self, each: StepPass, case: Case, context: Context) -> list[Case]:
        """Every form of a step that one pass has.

        A pass that raises, or proposes what cannot be, is declined with the reason, and the step stays as it is; but what the user
        asked wrongly is raised.
        """
        try:
            choices = proposed(each, case, context, self.declined)
            found = [case]
            for choice in choices:
                found = [made for form in found for option in _ordered(choice) for made in self._tried(case, each, form, choice, option)]
        except RequestError:
            raise
        except Exception as error:
            reason = f"it could not be asked: {type(error).__name__}: {error}"
            self.declined[Declined(site=each.name, kind="pass", option=each.name, by=each.name, reason=Unsupported(reason))] = None
            return [case]
        return found

    def _tried(self, asked: Case, each: StepPass, form: Case, choice: StepChoice, option: StepOption) -> Iterator[Case]:
        """The form with an option, if it can be had; what was made while proposing stands where the pass has not changed the step since."""
        try:
            yield applied(each, form, choice, option if form.step is asked.step else replace(option, made=None, make=None))
        except Refusal as refusal:
            self.refused.append(({**form.options, choice.kind: option.name}, str(refusal)))


def forms(passes: Sequence[StepPass], case: Case, context: Context) -> Forms:
    """Every form of a step that these passes have, one after the other.

    Raises:
        RequestError: the user wants what cannot be.
    """
    found = Forms(cases=[case])
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


def proposed(each: StepPass, case: Case, context: Context, declined: dict[Declined, None]) -> list[StepChoice]:
    """The choices of a pass that may be taken; what it declines, and what is out of the question, is added to `declined`."""
    items = [part for item in each.propose(case, context) for part in _allowed(item, each, context)]
    declined |= dict.fromkeys(item for item in items if isinstance(item, Declined))
    return [item for item in items if not isinstance(item, Declined)]


def _allowed(item: StepChoice | Declined, each: StepPass, context: Context) -> Iterator[StepChoice | Declined]:
    """A proposal, checked; options that are out of the question are declined."""
    if isinstance(item, Declined):
        yield item
        return
    choice = _checked(item)
    out = {option.name: context.forbidden.get((choice.kind, option.name)) for option in choice.options}
    for name, reason in out.items():
        if reason is not None:
            yield Declined(site=choice.site or choice.kind, kind=choice.kind, option=name, by=each.name, reason=Unsupported(reason))
    if left := tuple(option for option in choice.options if out[option.name] is None):
        yield replace(choice, options=left)


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
                raise FormatError(f"The plan has {kind} = {option.name}, which this step cannot have: {refusal}. Plan again.") from refusal
    return _finished([case])[0]


def _ordered(choice: StepChoice) -> list[StepOption]:
    """The baseline first."""
    return sorted(choice.options, key=lambda option: option.name != choice.baseline)


def applied(each: StepPass, case: Case, choice: StepChoice, option: StepOption) -> Case:
    """A case with an option of a choice that this pass proposed, or a plan has: checked."""
    changed = case
    if option.name != choice.baseline or option.settings:
        changed = option.made or (option.make() if option.make is not None else each.apply(case, choice, option))
        if changed.step is not case.step:
            changed.step.graph.lint()
        if changed.division is case.division:  # of another part of the batch it has other shapes
            _same_results(case.step, changed.step)
    light = {one.name: replace(one, made=None, make=None) for one in (*choice.options, option)}
    chosen = Chosen(
        choice=replace(choice, options=tuple(light.values())), option=light[option.name], by=each.name, exact=each.exact
    )  # fmt: skip
    return replace(changed, taken=(*case.taken, chosen))


def told(chosen: Chosen, outcome: Outcome, cost: Cost, baseline_cost: Cost, why: Reason | None) -> list[Decision]:
    """What a plan says of an option: one decision at the choice's site, and what the option itself tells."""
    choice, option = chosen.choice, chosen.option
    own = [
        Decision(
            site=choice.site, kind=choice.kind, option=option.name, baseline=choice.baseline, by=chosen.by, cost=cost,
            baseline_cost=baseline_cost, why=option.why or why, note=option.note, settings=option.settings,
        )
    ]  # fmt: skip
    return [*own * bool(choice.site), *(option.told(outcome) if option.told is not None else ())]


def _checked(choice: StepChoice) -> StepChoice:
    if not isinstance(choice, StepChoice):
        raise TypeError(f"it proposes {choice!r}, which is neither a StepChoice nor a Declined")
    names = [option.name for option in choice.options]
    if len(set(names)) < len(names):
        raise ValueError(f"two options of {choice.site or choice.kind} have one name: {', '.join(names)}")
    if choice.baseline not in names and not choice.settled:
        raise ValueError(f"the baseline {choice.baseline!r} of {choice.site} is not among its options: {', '.join(names) or 'none'}")
    return choice


def _same_results(before: Step, after: Step) -> None:
    """A form returns what the step returns; gradients may be consumed instead."""
    for name, of in (("results", _returned), ("inputs", lambda step: [_shape(node) for node in step.inputs])):
        if of(before) != of(after):
            raise ValueError(f"the step it returned has other {name}")


def _returned(step: Step) -> tuple[object, ...]:
    """The shapes of what a step returns, of gradients that of their parameters."""
    first = 1 + step.shown + len(step.updated)
    end = first + len(step.differentiated)
    parameters = {name: _shape(node) for node, name in step.parameters.items()}
    gradients = {name: _shape(node) for name, node in zip(step.differentiated, step.results[first:end], strict=False)}
    gradients |= {name: parameters[name] for name in step.consumed}
    return *map(_shape, step.results[:first]), gradients, *map(_shape, step.results[end:])


def _shape(node: fx.Node | None) -> tuple[int, ...] | None:
    return None if node is None else tuple(node.meta["val"].shape)
