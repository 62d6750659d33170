"""Why no plan meets a goal: what is needed, what is there at the instant that binds, and what was not tried.

No sentences.

An `InfeasibleError` carries causes, that of the whole before that of its part; `report/infeasible.py` makes
the words of its message.
"""

from __future__ import annotations

from dataclasses import dataclass

from effcompile.core.reasons import Reason


class Cause:
    """One of the classes below."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Said(Cause):
    """In the caller's own words, which are a sentence or several."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Cause):
    """No plan is within these limits, together where there are several.

    `beside`: how many others there are.
    """

    limits: tuple[tuple[str, float], ...]
    beside: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction(Cause):
    """Whatever the limits, no options (site, option) satisfy what they require of each other."""

    options: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant(Cause):
    """The instant that is above the budget even with the least kept: its phase and block, and what is alive →
    bytes.
    """

    budget: int
    phase: str
    site: str
    parts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory(Cause):
    """With so much host memory nothing is within the budget; it takes `needed` of it, or a budget of
    `instead`.
    """

    budget: int
    host: int
    needed: int
    instead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(Cause):
    """The optimizer's step alone needs more than the budget, with what is beside it: parameters, gradients,
    states, working memory.
    """

    beside: tuple[str, ...]
    needed: int
    parts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom(Cause):
    """Beside what stays for the whole step → bytes, there is no room for forward and backward."""

    beside: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverWhenRun(Cause):
    """A plan for the budget was run, and the allocator took so many bytes more than that."""

    budget: int
    over: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TookMore(Cause):
    """Plans took so many bytes more when they were run than was foreseen, which the whole counts."""

    over: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReached(Cause):
    """In so many rounds the simulated peak stayed above the budget, lastly by `over` bytes at an operator."""

    rounds: int
    over: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTooSmall(Cause):
    """The machine has less memory than the leanest plan needs, where that is known.

    `between`: the least and the most it may need, by the model's error. `certain`: even the least is more
    than there is.
    """

    target: str
    memory_bytes: int
    needed: int | None
    between: tuple[int, int] | None = None
    certain: bool = True


# ------------------------------------------------------------------ what was not tried


@dataclass(frozen=True, slots=True, kw_only=True)
class NotTried(Cause):
    """Options that were left out, with the reasons."""

    options: tuple[tuple[str, Reason], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Others(Cause):
    """What became of the other options of a whole choice, `of` a kind."""

    of: str
    options: tuple[tuple[str, Reason], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Undivided(Cause):
    """The batch of so many examples could be divided, which was not asked for."""

    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuted(Cause):
    """A choice was run and did not hold: what is therefore not done, and what was found."""

    therefore: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestContext(Cause):
    """The longest context whose cache fits beside the smallest weights; 0: none does."""

    context: int
    weights: int
