"""What the user declares: minimise time or memory, under limits."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypedDict, get_args

from effcompile.core.errors import UnknownNameError, UsageError, clipped
from effcompile.core.units import format_bytes, format_error, parse_bytes

Mode = Literal["inference", "training", "generation"]
Objective = Literal["time", "memory"]
Reads = Literal["all", "last"]

#: What fp32 re-ordering alone may change: relative L2 allowed when no error was granted.
EXACT_TOLERANCE = 1e-5


class GoalLimits(TypedDict, total=False):
    """The fields of a goal but its mode, as keyword arguments."""

    minimize: Objective
    memory: int | str | None
    max_error: float | None
    reads: Reads
    robust: bool
    context: int | None
    prompt: int | None
    new: int | None


class GoalFields(GoalLimits, total=False):
    """The fields of a goal, as keyword arguments."""

    mode: Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A declared goal. All limits hold together; `minimize` breaks the tie.

    Attributes:
        mode: "inference" (a forward call), "training" (forward, loss and backward) or "generation" (prefill
            of a prompt, and decoding token by token with a cache).
        minimize: "time" (seconds per call or step) or "memory" (weight bytes in inference, peak bytes in
            training).
        memory: peak bytes live on the device during the call or step, or None for no limit. Accepts "6GiB".
            In training parameters, buffers, inputs, gradients, kept activations and workspace count; in
            generation weights, the cache of the whole context and workspace.
        max_error: largest relative L2 error of the output, ‖y − y₀‖ / ‖y₀‖, of texts of one or two tokens
            of each; None or 0 allows only exact choices (verified to EXACT_TOLERANCE).
        reads: which positions of the output's sequence axis are read: "all", or "last" for a generator
            that reads only the last token's logits (inference only).
        robust: the limit on the error holds for stress inputs too: scaled, one outlier channel, zeros
            (inference only).
        context: tokens of a row at the most, prompt and new ones; `batch`: rows. `prompt` and `new`: tokens
            that time is predicted for, by default half of the context each (generation only). A context that
            is not given is `prompt` and `new` together.
    """

    mode: Mode = "inference"
    minimize: Objective = "time"
    memory: int | None = None
    max_error: float | None = None
    reads: Reads = "all"
    robust: bool = False
    context: int | None = None
    batch: int = 1
    prompt: int | None = None
    new: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("mode", get_args(Mode)),
            ("minimize", get_args(Objective)),
            ("reads", get_args(Reads)),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"{name} = {getattr(self, name)!r} is not allowed. Choose one of: {', '.join(allowed)}."
                )
        if self.mode == "training" and self.reads != "all":
            raise UsageError(
                "reads = 'last' is for inference: a training step reads every position. Leave it out."
            )
        if not isinstance(self.robust, bool):
            raise UsageError(f"robust = {self.robust!r} must be True or False.")
        if self.mode == "training" and self.robust:
            raise UsageError(
                "robust = True is for inference: a training step is compared on the inputs that it is "
                "given. Leave it out."
            )
        self._check_tokens()
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_bytes(self.memory))
        if self.max_error is not None:
            _check_error(self.max_error)
            object.__setattr__(self, "max_error", float(self.max_error))

    def _check_tokens(self) -> None:
        """What generation says of tokens.

        Raises:
            UsageError: no count, more prompt and new tokens than context, or another mode.
        """
        given = {name: getattr(self, name) for name in ("context", "prompt", "new")}
        for name, count in {**given, "batch": self.batch}.items():
            if count is not None and (
                isinstance(count, bool) or not isinstance(count, int) or not 1 <= count < 1 << 31
            ):
                raise UsageError(f"{name} = {clipped(repr(count))} must be a whole number of at least 1.")
        if self.mode != "generation":
            named = next(
                (name for name, count in given.items() if count is not None),
                "batch" if self.batch != 1 else None,
            )
            if named is not None:
                raise UsageError(f"{named} is for mode = 'generation'. Leave it out, or ask for that mode.")
            return
        if self.reads != "all" or self.robust:
            raise UsageError("reads and robust are for mode = 'inference'. Leave them out.")
        if self.context is None and (self.prompt is None or self.new is None):
            raise UsageError(
                "mode = 'generation' needs context: the tokens of a row at the most, prompt and new ones, "
                "e.g. context=2048."
            )
        if self.context is not None and (self.prompt or 0) + (self.new or 0) > self.context:
            raise UsageError(
                f"prompt = {self.prompt or 0} and new = {self.new or 0} are more tokens than context = "
                f"{self.context}. Give a longer context."
            )

    @property
    def tokens(self) -> tuple[int, int, int]:
        """(context, prompt, new) of generation, with what was not given."""
        context = self.context if self.context is not None else (self.prompt or 0) + (self.new or 0)
        prompt = self.prompt if self.prompt is not None else max(1, context - (self.new or context // 2))
        return context, prompt, self.new if self.new is not None else max(1, context - prompt)

    @classmethod
    def of(cls, goal: Goal | None = None, /, **changes: object) -> Goal:
        """A goal from another one and keyword changes; unknown keywords get a "did you mean".

        Raises:
            UnknownNameError: a keyword that is no field of Goal.
            UsageError: a value that is not allowed, or a goal that is none.
        """
        if not isinstance(goal, Goal | None):
            raise UsageError(
                f"goal = {clipped(repr(goal))} is not a goal. Give effcompile.Goal(...) or a dict of its "
                f"fields: {{'memory': '6GiB'}}."
            )
        known = [f.name for f in fields(cls)]
        for name in changes:
            if name not in known:
                raise UnknownNameError("goal field", name, known)
        given: dict[str, Any] = {**(asdict(goal) if goal else {}), **changes}  # each is checked
        return cls(**given)

    @property
    def exact(self) -> bool:
        """True when no error was granted."""
        return not self.max_error

    @property
    def tolerance(self) -> float:
        """Largest relative L2 error that verification accepts."""
        return max(self.max_error or 0.0, EXACT_TOLERANCE)

    def describe(self) -> str:
        """The goal in one line, as the report prints it."""
        limits = [f"error ≤ {format_error(self.max_error)}" if self.max_error else "exact"]
        if self.memory is not None:
            limits.append(f"peak memory ≤ {format_bytes(self.memory)}")
        if self.reads == "last":
            limits.append("last token read")
        if self.robust:
            limits.append("under stress inputs too")
        if self.mode == "training":
            return ", ".join([*reversed(limits), f"least {self.minimize}"])
        if self.mode == "generation":
            context, prompt, new = self.tokens
            rows = f", batch {self.batch}" if self.batch > 1 else ""
            limits.append(f"prompt {prompt} + {new} new tokens, context {context}{rows}")
        return f"least {self.minimize}, " + ", ".join(limits)


def _check_error(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < sys.float_info.max:
        raise UsageError(
            f"max_error = {clipped(repr(value))} must be a number ≥ 0: the largest relative L2 error of the "
            "output, e.g. 0.01. Leave it out for an exact plan."
        )
