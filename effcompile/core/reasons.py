"""Why an option was taken, or was not, and what is known of a place: figures and names, no sentences.

The words are made in `report/reasons.py`, where equal reasons of many sites are put together and their
figures become ranges. A plan keeps a reason under its `kind`. The set is closed; a pass that has something
else to say uses `Because` or `Unsupported`, whose text may have holes for figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter
from typing import Literal, Self

from effcompile.core import spoken

#: What may stand in a hole of a text, and so how it is printed: a plain number, bytes, seconds, an error, a
#: share, the name of a place, any other name or somebody else's words.
HOLES = ("", "bytes", "seconds", "error", "share", "site", "name")
_NAMES = ("site", "name")

Figure = int | float | str


class Reason:
    """One of the classes below, a frozen dataclass with its `kind` as the first field.

    It is printed in the report's words.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return spoken.of_reason(self)


@dataclass(frozen=True, slots=True)
class _Text(Reason):
    """A text, and the figures in its holes: `Because("{} of {} stay", (3, 4))`, `"needs {bytes}"`; a text
    without figures has no holes.

    Raises:
        ValueError: other holes than figures, an unknown hole, or a figure of another type than its hole is
            for.
    """

    text: str
    figures: tuple[Figure, ...] = ()

    def __post_init__(self) -> None:
        if self.figures:
            _fill(self.text, self.figures)

    @classmethod
    def of(cls, text: str, *figures: object) -> Self:
        """Holes `{}` filled with numbers and names alike: `Unsupported.of("{} holds {} heads", node, 12)`;
        what is neither, as its text.
        """
        kept = tuple(
            value if isinstance(value, (int, float, str)) and not isinstance(value, bool) else str(value)
            for value in figures
        )
        return cls(
            text.format(*("{name}" if isinstance(value, str) else "{}" for value in kept)) if kept else text,
            kept,
        )

    @property
    def parts(self) -> tuple[tuple[str, str | None, Figure], ...]:
        """(text before, hole, figure) of each hole; hole None for the text behind the last one."""
        return _fill(self.text, self.figures) if self.figures else ((self.text, None, ""),)


def _fill(text: str, figures: tuple[Figure, ...]) -> tuple[tuple[str, str | None, Figure], ...]:
    try:
        parsed = [(before, hole) for before, hole, _, _ in Formatter().parse(text)]
    except ValueError as error:
        raise ValueError(f"The reason {text!r} is no text with holes: {error}.") from error
    holes = [hole for _, hole in parsed if hole is not None]
    if len(holes) != len(figures) or not set(holes) <= set(HOLES):
        known = ", ".join(f"{{{hole}}}" for hole in HOLES)
        raise ValueError(
            f"The reason {text!r} has {len(holes)} holes for {len(figures)} figures. One hole for each; "
            f"they are: {known}."
        )
    for hole, figure in zip(holes, figures, strict=True):
        if isinstance(figure, bool) or isinstance(figure, str) != (hole in _NAMES):
            raise ValueError(
                f"The reason {text!r} has {figure!r} in the hole {{{hole}}}: sites and names are words, "
                "all else a number."
            )
    left = iter(figures)
    return tuple((before, hole, next(left) if hole is not None else "") for before, hole in parsed)


@dataclass(frozen=True, slots=True)
class Because(_Text):
    """Why an option was taken, or what is known of its place, in a pass's own words."""

    kind: Literal["because"] = "because"


@dataclass(frozen=True, slots=True)
class Unsupported(_Text):
    """It cannot be had, or was not looked at, in a pass's own words."""

    kind: Literal["unsupported"] = "unsupported"


class ReasonError(Exception):
    """Left a computation with a reason: a text with holes `{}`, and what stands in them."""

    def __init__(self, said: str | Unsupported, *figures: object) -> None:
        """`said`: the text, or a reason that is there already."""
        self.reason = Unsupported.of(said, *figures) if isinstance(said, str) else said
        super().__init__(self.reason)


# ------------------------------------------------------------------ why an option was not taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Slower(Reason):
    """The fastest plan with it takes so many seconds more; `at_least`: by a bound, it was not solved for
    that.
    """

    kind: Literal["slower"] = "slower"
    seconds: float
    at_least: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFaster(Reason):
    """It takes so many seconds where another option of its site, `than`, takes so many; below 0: it shortens
    other sites' work.
    """

    kind: Literal["not faster"] = "not faster"
    seconds: float
    against: float
    than: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotSmaller(Reason):
    """It takes so many bytes where another option of its site, `than`, takes so many."""

    kind: Literal["not smaller"] = "not smaller"
    bytes: int
    against: int
    than: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OverBudget(Reason):
    """A plan with it needs so many bytes, which is above the budget, where that is given.

    `saves`: seconds of a call, were it within.
    """

    kind: Literal["over budget"] = "over budget"
    needed: int
    budget: int | None = None
    saves: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverError(Reason):
    """The plan with it would have this error, above the limit."""

    kind: Literal["over error"] = "over error"
    error: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WithinGap(Reason):
    """It would be within the limits and may save something: less than the proof leaves open."""

    kind: Literal["within gap"] = "within gap"
    gap: float | None = None
    saves: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoKernel(Reason):
    """The backend has no such kernel on this machine.

    `because`: what is known of it; `others`: backends that have one.
    """

    kind: Literal["no kernel"] = "no kernel"
    backend: str
    kernel: str
    because: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAllowed(Reason):
    """The user has not allowed it.

    `because`: what it would do; `allow`: what to say to have it, nothing: an error has to be allowed.
    """

    kind: Literal["not allowed"] = "not allowed"
    because: str = ""
    allow: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Requires(Reason):
    """It needs another site to have one of these options.

    `offered`: it could have, and that costs more than this gains.
    """

    kind: Literal["requires"] = "requires"
    site: str
    options: tuple[str, ...]
    offered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed(Reason):
    """With it another site could not have the option that it has."""

    kind: Literal["needed"] = "needed"
    site: str
    option: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMeasured(Reason):
    """Its error at the model's output is not known.

    `also`: nor that of this; `setting`: what limited the measuring, and the limit.
    """

    kind: Literal["not measured"] = "not measured"
    also: str = ""
    setting: str = ""
    seconds: float | None = None


# ------------------------------------------------------------------ why an option was taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains(Reason):
    """Against the site's baseline it saves seconds (below 0: it costs some) and bytes of weights, and adds an
    error.
    """

    kind: Literal["gains"] = "gains"
    seconds: float = 0.0
    bytes: int = 0
    error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faster(Reason):
    """The fastest plan without it takes so many seconds more; None: none is within the budget.

    `than`: what it would be instead.
    """

    kind: Literal["faster"] = "faster"
    seconds: float | None
    than: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(Reason):
    """It stays as the model has it: one of so many options, and no other is worth its cost; or all of its
    bytes fit.
    """

    kind: Literal["kept"] = "kept"
    options: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frees(Reason):
    """It frees bytes for seconds. `throughout`: at every instant, else between forward and backward.

    `host_bytes`: so many are held on the host instead. `link_bytes`: what goes over the link in every step
    for it.
    """

    kind: Literal["frees"] = "frees"
    bytes: int
    seconds: float
    throughout: bool = False
    host_bytes: int = 0
    link_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided(Reason):
    """Activations are of so many examples at a time, beside summed gradients; the step takes this share
    longer than the unplanned one.
    """

    kind: Literal["divided"] = "divided"
    examples: int
    batch: int
    gradient_bytes: int
    slower: float


# ------------------------------------------------------------------ what is known of a place


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseSpeed(Reason):
    """Time per sparse FLOP over time per dense FLOP, and what it has to be below for a gain.

    `gains`: whether it was worth it.

    `bits`: of the dense product that it is held against, 0 for the model's own. `over_stock`: the same over
    F.linear, where that is another figure. `published`: the gain that a publication has, with its `source`.
    """

    kind: Literal["sparse speed"] = "sparse speed"
    epsilon: float
    break_even: float
    gains: bool
    bits: int = 0
    over_stock: float | None = None
    published: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall(Reason):
    """A predictor of attention's tiles keeps this part of the softmax mass at this share of them.

    `but`: why it was not taken.
    """

    kind: Literal["recall"] = "recall"
    recall: float
    share: float
    but: Reason | None = None
