"""The contract of a pass over a whole training step: propose forms of it, and give it one of them.

Whoever registers a class of this kind under the entry point group `effcompile.training_passes` has its options in the same
search as all of ours: each form is priced, cut into blocks and scheduled like the step itself, the fastest that fits is
taken, and the plan says what was decided and why the others were not. A pass knows no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from effcompile.core.goal import Goal
from effcompile.ir.plan import Declined, Setting
from effcompile.ir.step import Step
from effcompile.machine.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a proposal is made for. `here`: the target is this machine."""

    goal: Goal
    target: Target
    here: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOption:
    """One form of the step. `settings`: what the pass needs to make it again; `why`: what it gains, in one line."""

    name: str
    settings: Mapping[str, Setting] = field(default_factory=dict, hash=False)
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """The forms that a step may have at one place. Its scope is the whole step.

    Attributes:
        site: the place. kind: what is decided there, which is the lever's name in the report too.
        baseline: the option that the step has as it is; it is among the options.
    """

    site: str
    kind: str
    baseline: str
    options: tuple[StepOption, ...]

    def option(self, name: str) -> StepOption:
        return next(option for option in self.options if option.name == name)


class StepPass(Protocol):
    """A frozen dataclass; its fields are its options, also on the CLI. `exact` is False for one that changes numbers."""

    name: ClassVar[str]
    exact: ClassVar[bool]

    def propose(self, step: Step, context: Context) -> Iterable[StepChoice | Declined]:
        """Choices and refusals for this step; pure."""
        ...

    def apply(self, step: Step, choice: StepChoice, option: StepOption) -> Step:
        """A copy of the step in this form."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An option of a choice, and the pass that proposed it."""

    choice: StepChoice
    option: StepOption
    by: str


def keys(taken: Iterable[Chosen]) -> tuple[tuple[str, str, str], ...]:
    """(site, kind, option) of what was taken otherwise than as the step is, in a plan's order."""
    return tuple(
        sorted((c.choice.site, c.choice.kind, c.option.name) for c in taken if c.option.name != c.choice.baseline)
    )  # fmt: skip


#: A step, and the options by which it has become what it is.
StepForm = tuple[Step, tuple[Chosen, ...]]


def all_forms(passes: Sequence[StepPass], step: Step, context: Context) -> list[StepForm | Declined]:
    """Every form of a step that these passes have, one after the other, the step as it is first; and what they decline."""
    found: list[StepForm] = [(step, ())]
    declined: list[Declined] = []
    for each in passes:
        items = [(taken, item) for form, taken in found for item in forms(each, form, context)]
        found = [(item[0], (*taken, *item[1])) for taken, item in items if not isinstance(item, Declined)]
        declined += [item for _, item in items if isinstance(item, Declined)]
    return [*found, *declined]


def forms(each: StepPass, step: Step, context: Context) -> Iterator[StepForm | Declined]:
    """Every form of a step that one pass has.

    A pass that raises, or proposes what cannot be, is declined with the reason, and the step stays as it is.
    """
    try:
        proposed = list(each.propose(step, context))
        choices = [_checked(item) for item in proposed if not isinstance(item, Declined)]
        found: list[StepForm] = [(step, ())]
        for choice in choices:
            found = [_applied(each, form, choice, option, taken) for form, taken in found for option in _ordered(choice)]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        yield step, ()
        yield Declined(site=each.name, kind="pass", option=each.name, by=each.name, reason=f"it could not be asked: {reason}")
        return
    yield from found
    yield from (item for item in proposed if isinstance(item, Declined))


def _ordered(choice: StepChoice) -> list[StepOption]:
    """The baseline first."""
    return sorted(choice.options, key=lambda option: option.name != choice.baseline)


def _applied(each: StepPass, step: Step, choice: StepChoice, option: StepOption, taken: tuple[Chosen, ...]) -> StepForm:
    changed = step if option.name == choice.baseline else each.apply(step, choice, option)
    changed.graph.lint()
    _same_results(step, changed)
    return changed, (*taken, Chosen(choice=choice, option=option, by=each.name))


def _checked(choice: StepChoice) -> StepChoice:
    if not isinstance(choice, StepChoice):
        raise TypeError(f"it proposes {choice!r}, which is neither a StepChoice nor a Declined")
    names = [option.name for option in choice.options]
    if len(set(names)) < len(names):
        raise ValueError(f"two options of {choice.site} have one name: {', '.join(names)}")
    if choice.baseline not in names:
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
