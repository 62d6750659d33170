"""Every error effcompile raises on purpose, as one tree, and the exit status each maps to.

EffcompileError                 anything below; the CLI prints it without a traceback
├── UsageError (ValueError)     exit 2: the request is wrong; says what is allowed and how to mend it
│   ├── UnknownNameError        a pass, target, backend or site that does not exist ("did you mean")
│   ├── InputsError             inputs that the model cannot take
│   ├── FormatError             a plan.json, target or calibration file that is not one of ours
│   ├── CaptureError            a model that torch.export cannot trace; names file, line and known fix
│   └── MissingPackageError     an optional package is absent; prints the install line
├── InfeasibleError             exit 1: no plan meets the goal; carries the explanation
├── LoweringError               exit 1: a backend could not build what the plan says
└── VerificationError           exit 1: the result is not within the declared error
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class EffcompileError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what the CLI returns."""

    exit_code = 1


class UsageError(EffcompileError, ValueError):
    """The request cannot be carried out as it was made."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that is not in a registry."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        begins = [k for k in known if name and k.startswith(name)]  # h100 means h100-sxm, though h200 is spelled closer
        close = begins or get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"No {kind} is named {name!r}.{hint} Known: {', '.join(known) or 'none'}.")
        self.kind, self.name, self.known = kind, name, known


class InputsError(UsageError):
    """The given inputs do not fit the model."""


class FormatError(UsageError):
    """A file is not what it should be: corrupted, foreign, or of another version."""


class CaptureError(UsageError):
    """torch.export cannot capture the model."""


class MissingPackageError(UsageError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, needed_for: str, install: str) -> None:
        super().__init__(f"{needed_for} needs the package {package!r}, which is not installed. Install it with: {install}")
        self.package = package


class InfeasibleError(EffcompileError):
    """No plan meets the goal.

    `binding` names the limits that cannot hold together (the unsat core, in the user's words);
    `nearest` maps each limit to the smallest value that would be feasible with the others unchanged.
    """

    def __init__(self, message: str, *, binding: tuple[str, ...] = (), nearest: dict[str, float] | None = None) -> None:
        super().__init__(message)
        self.binding = binding
        self.nearest = dict(nearest or {})


class LoweringError(EffcompileError):
    """A backend failed to build, load or run what the plan says."""


class VerificationError(EffcompileError):
    """The lowered model differs from the original by more than the goal allows."""
