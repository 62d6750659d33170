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
from effcompile.core.errors import FormatError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Decision, Declined, Setting
from effcompile.ir.step import Step
from effcompile.machine.target import Target
from effcompile.schedule.blocks import Blocks

T = TypeVar("T", bound=Setting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step, and the options by which it has become what it is.

    Attributes:
        step: its graph. taken: the options, in the order in which they were applied.
        source: captures the step anew, as the passes that change the forward before autograd do; None where it cannot be.
        front: the forward that autograd was traced through, as it was exported; None where there is none, or it was changed.
        scaled: whether the loss is scaled, so that small gradients do not vanish: an overflow must be seen before any update.
    """

    step: Step
    taken: tuple[Chosen, ...] = ()
    scaled: bool = False
    source: Source | None = None
    front: fx.GraphModule | None = None

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
        settings: what the pass needs to make it again. why: what it gains, in one line. note: what else is to be known of it.
        told: what the plan says of the blocks, beside the decision at the choice's site.
        made: the form, where it was made to be proposed.
    """

    name: str
    settings: Mapping[str, Setting] = field(default_factory=dict, hash=False)
    why: str = ""
    note: str = ""
    told: Callable[[Blocks], Iterable[Decision]] | None = field(default=None, compare=False, repr=False)
    made: Case | None = field(default=None, compare=False, repr=False)

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
    """

    site: str
    kind: str
    baseline: str
    options: tuple[StepOption, ...]
    settled: bool = False

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


def forms(passes: Sequence[StepPass], case: Case, context: Context) -> tuple[list[Case], list[Declined]]:
    """Every form of a step that these passes have, one after the other, the step as it is first; and what they decline."""
    found, declined = [case], dict[Declined, None]()
    for each in passes:
        items = [item for form in found for item in _forms(each, form, context)]
        found = [item for item in items if isinstance(item, Case)]
        declined |= dict.fromkeys(item for item in items if isinstance(item, Declined))
    return found, list(declined)


def _forms(each: StepPass, case: Case, context: Context) -> Iterator[Case | Declined]:
    """Every form of a step that one pass has.

    A pass that raises, or proposes what cannot be, is declined with the reason, and the step stays as it is.
    """
    try:
        proposed = [part for item in each.propose(case, context) for part in _allowed(item, each, context)]
        found = [case]
        for choice in (item for item in proposed if not isinstance(item, Declined)):
            found = [_applied_to(case, each, form, choice, option) for form in found for option in _ordered(choice)]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        yield case
        yield Declined(site=each.name, kind="pass", option=each.name, by=each.name, reason=f"it could not be asked: {reason}")
        return
    yield from found
    yield from (item for item in proposed if isinstance(item, Declined))


def _allowed(item: StepChoice | Declined, each: StepPass, context: Context) -> Iterator[StepChoice | Declined]:
    """A proposal, checked; options that are out of the question are declined."""
    if isinstance(item, Declined):
        yield item
        return
    choice = _checked(item)
    out = {option.name: context.forbidden.get((choice.kind, option.name)) for option in choice.options}
    for name, reason in out.items():
        if reason is not None:
            yield Declined(site=choice.site or choice.kind, kind=choice.kind, option=name, by=each.name, reason=reason)
    if left := tuple(option for option in choice.options if out[option.name] is None):
        yield replace(choice, options=left)


def reapplied(passes: Sequence[StepPass], case: Case, decisions: Iterable[Decision]) -> Case:
    """The step with the options that a saved plan took.

    Raises:
        FormatError: a pass does not know one, or this step cannot have it.
    """
    changed = [d for d in decisions if d.option != d.baseline]
    for each in passes:
        kinds: dict[str, list[Decision]] = {}
        for decision in (d for d in changed if d.by == each.name):
            kinds.setdefault(decision.kind, []).append(decision)
        for kind, told in kinds.items():
            settings = {name: value for d in told for name, value in d.settings.items()}
            option = StepOption(name=told[0].option, settings=settings, why=told[0].why)
            choice = StepChoice(site=told[0].site, kind=kind, baseline=told[0].baseline, options=(option,))
            case = applied(each, case, choice, option)
    return case


def _ordered(choice: StepChoice) -> list[StepOption]:
    """The baseline first."""
    return sorted(choice.options, key=lambda option: option.name != choice.baseline)


def _applied_to(proposed: Case, each: StepPass, form: Case, choice: StepChoice, option: StepOption) -> Case:
    """`applied`; what was made while proposing stands where nothing of this pass has changed the step since."""
    return applied(each, form, choice, option if form.step is proposed.step else replace(option, made=None))


def applied(each: StepPass, case: Case, choice: StepChoice, option: StepOption) -> Case:
    """A case with an option of a choice that this pass proposed, or a plan has: checked."""
    changed = case
    if option.name != choice.baseline:
        changed = option.made or each.apply(case, choice, option)
        changed.step.graph.lint()
        _same_results(case.step, changed.step)
    light = {one.name: replace(one, made=None) for one in choice.options}
    chosen = Chosen(
        choice=replace(choice, options=tuple(light.values())), option=light[option.name], by=each.name, exact=each.exact
    )  # fmt: skip
    return replace(changed, taken=(*case.taken, chosen))


def told(chosen: Chosen, cut: Blocks, cost: Cost, baseline_cost: Cost, why: str) -> list[Decision]:
    """What a plan says of an option: one decision at the choice's site, and what the option itself tells of the blocks."""
    choice, option = chosen.choice, chosen.option
    own = [
        Decision(
            site=choice.site, kind=choice.kind, option=option.name, baseline=choice.baseline, by=chosen.by, cost=cost,
            baseline_cost=baseline_cost, why=option.why or why, note=option.note, settings=option.settings,
        )
    ]  # fmt: skip
    return [*own * bool(choice.site), *(option.told(cut) if option.told is not None else ())]


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
    """A form returns what the step returns."""
    same: tuple[tuple[str, Callable[[Step], object]], ...] = (
        ("results", lambda step: [None if node is None else tuple(node.meta["val"].shape) for node in step.results]),
        ("inputs", lambda step: [tuple(node.meta["val"].shape) for node in step.inputs]),
        ("gradients", lambda step: step.differentiated),
    )
    for name, of in same:
        if of(before) != of(after):
            raise ValueError(f"the step it returned has other {name}")
