"""What a field of a Stage does.

A new field is a subclass in a file of its own, a line in `FIELDS`, and a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from effcompile.core.errors import UsageError
from effcompile.core.types import Example
from effcompile.runs.carry import Origins
from effcompile.runs.fields.values import StageValues


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One of the graphs that a stage's steps run: `share` of the steps run it, `named` so in the report;
    `dropped` layers are left out.
    """

    named: str
    share: float
    dropped: frozenset[int] = frozenset()


@dataclass(kw_only=True)
class Effect:
    """What a field's value does while its stage lasts. Each method does nothing here.

    Attributes:
        stage: whose field it is. first: whether it is the run's first stage.
        layers: qualified name of the model's list of layers, "" where no field needs it.
        notes: what the report says below its table, once the stage was entered.
    """

    name: ClassVar[str]
    #: Whether it moves the optimizer's states itself.
    moves_states: ClassVar[bool] = False
    stage: StageValues
    first: bool
    layers: str = ""
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Subclasses begin here."""

    @property
    def value(self) -> Any:
        return getattr(self.stage, self.name)

    @classmethod
    def check(cls, stage: StageValues) -> None:
        """Raise UsageError for a value that is none. It is not None."""

    @classmethod
    def check_order(cls, stages: Sequence[StageValues]) -> None:
        """Raise UsageError for values that cannot follow each other."""

    @property
    def passes(self) -> tuple[str, ...]:
        """How the stage is planned, beside what the user asked."""
        return ()

    def change(self, model: nn.Module, example: Example) -> Origins:
        """Change the model in place when the stage is entered; returns where parameters that are new or
        changed come from.
        """
        return {}

    def rates(self, model: nn.Module) -> Mapping[str, float]:
        """Qualified name of a parameter → what its learning rate is multiplied with from now on."""
        return {}

    def around(self, model: nn.Module) -> AbstractContextManager[None]:
        """What holds while the stage is planned, and while its steps run."""
        return nullcontext()

    def graphs(self, model: nn.Module) -> tuple[Graph, ...]:
        """The graphs that the steps run by turns, the largest first; () for the model's own."""
        return ()

    def bytes_beside(self, model: nn.Module) -> int:
        """What it keeps on the device beside the step."""
        return 0

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        """The stage begins: the model is in its form, the optimizer of its parameters and has
        their moments.
        """

    def stepped(self, model: nn.Module) -> None:
        """A step was taken."""

    def end(self) -> None:
        """The stage is over."""

    def state(self) -> Mapping[str, object]:
        """What the further course depends on: tensors and plain values."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""


def check_share(stage: StageValues, name: str, *, one: bool = True) -> None:
    """Check a share.

    Raises:
        UsageError: not a number above 0 and at most (below, without `one`) 1.
    """
    value = getattr(stage, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value <= 1 or (value == 1 and not one):
        raise UsageError(
            f"Stage({name}={value!r}): a share above 0 and {'at most' if one else 'below'} 1 is wanted, "
            "such as 0.5."
        )


def check_count(stage: StageValues, name: str) -> None:
    """Check a number.

    Raises:
        UsageError: not a whole number of at least 1.
    """
    value = getattr(stage, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"Stage({name}={value!r}): a number of at least 1 is wanted.")
