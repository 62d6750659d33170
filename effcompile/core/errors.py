"""Every error effcompile raises on purpose, as one tree, and the exit status each maps to.

EffcompileError                 anything below; the CLI prints it without a traceback
├── UsageError (ValueError)     exit 2: the request is wrong; says what is allowed and how to mend it
│   ├── UnknownNameError        a pass, target, backend or site that does not exist ("did you mean")
│   ├── InputsError             inputs that the model cannot take
│   │   └── GuardError          a call, or a model, that is not as it was when the plan was made
│   │       └── AutocastError   a call within another torch.autocast
│   ├── FormatError             a plan.json, target or calibration file that is not one of ours
│   ├── CaptureError            a model that torch.export cannot trace; names file, line and known fix
│   └── MissingPackageError     an optional package is absent; prints the install line
├── InfeasibleError             exit 1: no plan meets the goal; carries the explanation
├── LoweringError               exit 1: a backend could not build what the plan says
├── VerificationError           exit 1: the result is not within the declared error
├── RankError                   exit 1: a rank of a run on many devices fell out; names it
├── OutOfMemoryError            exit 1: this machine has not the memory for planning or verifying
└── InternalError               exit 1: an error that nobody foresaw; names the stage, keeps its cause
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from effcompile.core import spoken

if TYPE_CHECKING:
    from effcompile.core.causes import Cause

#: How alike two spellings are (difflib's ratio) from which on one may be meant by the other.
_ALIKE = 0.6


def clipped(said: object, most: int = 300) -> str:
    """A text that may hold a file's content, without the middle where it is long."""
    text = str(said)
    return text if len(text) <= most else f"{text[: most - 100]} … {text[-97:]}"


class EffcompileError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what the CLI returns."""

    exit_code = 1


class UsageError(EffcompileError, ValueError):
    """The request cannot be carried out as it was made."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that is not in a registry. `otherwise`: what others call those that are → their names."""

    def __init__(
        self, kind: str, name: str, known: Iterable[str], otherwise: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        known = sorted(set(known))
        # h100 means h100-sxm, though h200 is spelled closer
        begins = [k for k in known if name and k.startswith(name)]
        others = [other for other, is_called in otherwise.items() if is_called in known]
        close = begins or get_close_matches(name, [*known, *others], n=1, cutoff=_ALIKE)
        hint = f" Did you mean {otherwise.get(close[0], close[0])!r}?" if close else ""
        super().__init__(f"No {kind} is named {clipped(name)!r}.{hint} Known: {', '.join(known) or 'none'}.")
        self.kind, self.name, self.known = kind, name, known


class InputsError(UsageError):
    """The given inputs do not fit the model."""


class GuardError(InputsError):
    """Something that the plan took for granted is not so at this call. `place` says what.

    `of_model`: it is the model that changed; otherwise these inputs are others than those that were planned
    for.
    """

    def __init__(self, message: str, *, place: str, of_model: bool = False) -> None:
        super().__init__(message)
        self.place, self.of_model = place, of_model

    def saying(self, more: str) -> GuardError:
        """The same with one more sentence, where it is not said yet."""
        if more and not str(self).endswith(more):
            self.args = (f"{self} {more}",)
        return self


class AutocastError(GuardError):
    """The call is within another torch.autocast than the plan was made in."""


#: What is run in the place of a call that a guard refused, with its arguments.
Fallback = Callable[[GuardError, tuple[Any, ...], Mapping[str, Any]], Any]


class FormatError(UsageError):
    """A file is not what it should be: corrupted, foreign, or of another version."""


class CaptureError(UsageError):
    """torch.export cannot capture the model."""


class MissingPackageError(UsageError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, needed_for: str, install: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed. Install it with: {install}"
        )
        self.package = package


class InfeasibleError(EffcompileError):
    """No plan meets the goal. Its message is made of its data where it is printed.

    Attributes:
        why: the causes, that of the whole before that of its part.
        binding: the limits that cannot hold together (the unsat core, in the user's words), and the instant
            that binds.
        nearest: limit → the smallest value of it that would be feasible with the others unchanged.
        untried: what was not tried, and the like.
    """

    def __init__(
        self,
        *why: Cause,
        binding: tuple[str, ...] = (),
        nearest: Mapping[str, float] | None = None,
        untried: tuple[Cause, ...] = (),
    ) -> None:
        super().__init__(*why)
        self.why, self.binding, self.nearest, self.untried = why, binding, dict(nearest or {}), untried

    def __str__(self) -> str:
        return spoken.of_infeasible(self)

    @property
    def needed(self) -> int:
        """The smallest budget in bytes that is known to be feasible; 0 where none is known."""
        return int(self.nearest.get("memory", 0))

    def with_untried(self, *untried: Cause) -> InfeasibleError:
        """The same with more that was not tried."""
        return InfeasibleError(
            *self.why, binding=self.binding, nearest=self.nearest, untried=(*self.untried, *untried)
        )

    def needing(self, needed: int, *around: Cause) -> InfeasibleError:
        """The same for a whole that it is a part of: the whole's causes before its own, and what the whole
        needs.
        """
        nearest = {**self.nearest, "memory": float(needed)}
        return InfeasibleError(
            *around, *self.why, binding=self.binding, nearest=nearest, untried=self.untried
        )


class OutOfMemoryError(EffcompileError, MemoryError):
    """Planning or verifying itself ran out of memory."""


class LoweringError(EffcompileError):
    """A backend failed to build, load or run what the plan says."""


class VerificationError(EffcompileError):
    """The lowered model differs from the original by more than the goal allows."""


class RankError(EffcompileError):
    """A rank of a run on many devices did not answer, or ended. Its number is in the message."""


class InternalError(EffcompileError):
    """effcompile itself failed where it should not have: `__cause__` is what was raised, `stage` where."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage
