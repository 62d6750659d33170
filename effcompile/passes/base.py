"""The contract of a pass: propose choices, then apply the plan. A pass knows no backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from torch import fx

from effcompile.core.cost import Cost
from effcompile.core.goal import Goal
from effcompile.core.reasons import Reason
from effcompile.estimate.perturb import Weights
from effcompile.ir.formats import FP32, Form, WeightFormat
from effcompile.ir.plan import Declined, Plan
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall, Target

__all__ = ["Choice", "Context", "Declined", "Option", "Pass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One alternative at a site.

    Its form says what it means; its name is what that is printed as, unique among a site's options.

    `requires` maps other sites to the names of the options they must take for this one to be possible; the
    solver enforces it.
    """

    form: Form
    cost: Cost
    by: str
    note: Reason | None = None
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.form.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A site and its options.

    `baseline` names the option that the unplanned model has; it is always among them.

    `covers`: nodes of the program whose time is in the options' costs.
    """

    site: str
    kind: str
    baseline: str
    options: tuple[Option, ...]
    covers: frozenset[fx.Node] = field(default=frozenset(), compare=False, repr=False)

    def option(self, name: str) -> Option:
        return next(o for o in self.options if o.name == name)


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a proposal is made for: one backend on one target, under one goal.

    Attributes:
        sensitivity: (site, option) → squared relative error at the model's output that the option alone
            causes, measured on the calibration inputs. Absent for a site that no error-making option asked
            for.
        formats: what a dense linear may be held in under this goal, fp32 first.
        stored: the format that stands behind "fp32" here: what the model's own linears are held in.
        lacks: says why the backend has no such kernel on any machine; None where it may have.
        elsewhere: storages that other graphs of the model read → whether one of them counts their bytes.
    """

    goal: Goal
    target: Target
    backend: str
    sensitivity: Mapping[tuple[str, str], float] = field(default_factory=dict)
    formats: tuple[WeightFormat, ...] = (FP32,)
    stored: WeightFormat = FP32
    lacks: Callable[[KernelCall], Reason | None] = lambda call: None
    elsewhere: Mapping[int, bool] = field(default_factory=dict)


@runtime_checkable
class Pass(Protocol):
    """A frozen dataclass; its fields are its options, also on the CLI (`--pass quantize.group_size=64`).

    `exact` is False for passes that change numerics; those propose only where the goal allows error. What a
    pass inherits is right for one whose options make no error that has to be measured.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]

    def propose(self, program: Program, context: Context) -> Iterable[Choice | Declined]:
        """Choices and refusals for this program; pure."""
        ...

    def apply(self, program: Program, plan: Plan) -> Program:
        """The program with this pass's decisions carried out, on a copy."""
        ...

    def measured_options(self) -> dict[str, tuple[Form, ...]]:
        """kind → options whose error has to be measured, as `estimate.sensitivity.measure` takes them."""
        return {}

    def replaced_weights(self, program: Program) -> Weights:
        """(site, option) → makes the weight that the option has there; its error is measured with it."""
        return {}
