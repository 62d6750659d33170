"""The contract of a pass over a whole training step: propose forms of it, and give it one of them.

Ours and those of installed packages (entry point group `effcompile.training_passes`) are asked alike: each
form is priced, cut into blocks and scheduled, the fastest that fits is taken, and the plan says what was
decided and why the others were not. A saved plan is applied by the same `apply`, from the settings in its
decisions. A pass knows no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar

from torch import fx

from effcompile.capture.source import Source
from effcompile.core.cost import Cost
from effcompile.core.errors import FormatError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Reason
from effcompile.ir.footprint import Footprint
from effcompile.ir.plan import Decision, Declined, Setting
from effcompile.ir.step import DividedStep, Step
from effcompile.machine.target import Target
from effcompile.passes.training.optimizer_ways import GivenOptimizer, StatesOption
from effcompile.schedules.blocks import Blocks

T = TypeVar("T", bound=Setting)


class RequestError(UsageError):
    """The user wants of a pass what cannot be.

    It is raised to them; any other error only leaves the pass out.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step with what stands beside it, and the options by which it has become what it is.

    Attributes:
        step: its graph. taken: the options, in the order in which they were applied.
        source: captures the step anew, as the passes that change the forward before autograd do; None where
            it cannot be.
        front: the forward that autograd was traced through, as it was exported; None where there is none, or
            it was changed.
        scaled: whether the loss is scaled, so that small gradients do not vanish: an overflow must be seen
            before any update.
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
    notes: tuple[Reason, ...] = ()

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
        """Of each step the seconds of its operators, and the bytes that the largest of them reads, makes and
        needs for itself.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What a proposal is made for.

    Attributes:
        goal, target, prices: what for, and what operators take there. here: the target is this machine.
        forbidden: (kind, option) → why it is out of the question: it was run, and did not hold.
    """

    goal: Goal
    target: Target
    here: bool
    prices: Prices
    forbidden: Mapping[tuple[str, str], Reason] = field(default_factory=dict)


def setting_of(settings: Mapping[str, object], decision: str, name: str, kind: type[T]) -> T:
    """One of a decision's settings, which may come from a file; `decision` names it.

    Raises:
        FormatError: it is not there, or of another type.
    """
    value = settings.get(name)
    if type(value) is not kind:
        raise FormatError(
            f"The plan's decision {decision} has {name} = {value!r}, where a {kind.__name__} is wanted. "
            "Plan again, or restore the file."
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOption:
    """One form of the step.

    Attributes:
        settings: what the pass needs to make it again; a baseline that has some is made like the others.
        why: what it gains, in one line. note: what else is to be known of it.
        told: what the plan says of it, beside the decision at the choice's site.
        made: the form, where it was made to be proposed. make: makes it with what was known then, instead of
            `apply`.
    """

    name: str
    settings: Mapping[str, Setting] = field(default_factory=dict, hash=False)
    why: Reason | None = None
    note: Reason | None = None
    told: Callable[[StepOutcome], Iterable[Decision]] | None = field(default=None, compare=False, repr=False)
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
        baseline: the option that the step has as it is; among the options or in reserve, unless it is out of
            the question (`settled`).
        reserve: options that take the place of the others where nothing is within the budget with those.
        tells: its options tell all decisions themselves, that at the site too: they stand beside the step,
            and know what they cost.
    """

    site: str
    kind: str
    baseline: str
    options: tuple[StepOption, ...]
    reserve: tuple[StepOption, ...] = ()
    settled: bool = False
    tells: bool = False

    def option(self, name: str) -> StepOption:
        return next(option for option in self.options if option.name == name)


class StepPass(Protocol):
    """A frozen dataclass; its fields are its options, also on the CLI.

    `exact` is False for one that changes numbers.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]

    def propose(self, case: Case, context: StepContext) -> Iterable[StepChoice | Declined]:
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
        return (
            f"{self.choice.kind} {self.option.name}" if self.changes and len(self.choice.options) > 1 else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The plan that an option became part of.

    Attributes:
        case: the form that was taken. cut: its step in blocks.
        seconds: of the whole step as planned, the update left out. unplanned_seconds: of one forward and
            backward with all kept.
        unplanned: the bytes of these.
        captured: seconds, and the peak as transient bytes, of the step as it was captured with all kept.
    """

    case: Case
    cut: Blocks
    seconds: float
    unplanned_seconds: float
    unplanned: Callable[[], Footprint]
    captured: Cost
