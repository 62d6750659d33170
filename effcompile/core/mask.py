"""Which keys a query sees: the fields that every mask has, whatever they are made of, and how a plan keeps
one. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from effcompile.core.reasons import Reason

Ids = TypeVar("Ids")
Condition = TypeVar("Condition")
Limit = TypeVar("Limit")
_Other = TypeVar("_Other")
_From = TypeVar("_From")

#: Inputs of a program that a term of a mask is read from.
Names = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mask(Generic[Ids, Condition, Limit]):
    """Query i of batch b sees key j when every term holds; a term that is None (chunk: 0) holds everywhere.

    Attributes:
        lo, hi: the band lo ≤ j − i ≤ hi. Causal: hi = 0, or Sk − Sq where the last query sees all keys;
            window of w: lo = hi − w + 1.
        chunk: i // chunk == j // chunk.
        q_ids, k_ids: documents, integers [B or 1, Sq] and [B or 1, Sk]: q_ids[b, i] == k_ids[b, j].
        valid: padding, bool [B or 1, Sk]: valid[b, j].
        mask: anything else, bool [B or 1, H or 1, Sq or 1, Sk or 1]: mask[b, h, i, j].
        uniform_empty: a query that sees nothing attends to all keys alike (the lowest finite number was
            added), not to none.
    """

    lo: Limit | None = None
    hi: Limit | None = None
    chunk: int = 0
    q_ids: Ids | None = None
    k_ids: Ids | None = None
    valid: Condition | None = None
    mask: Condition | None = None
    uniform_empty: bool = False

    def told(
        self,
        kind: Callable[..., _Other],
        *,
        ids: Callable[[Ids], object],
        condition: Callable[[Condition], object],
        limit: Callable[[Limit], object],
        **more: object,
    ) -> _Other:
        """The same mask made of something else: each term that it has, put into other words; `more` are
        fields that only those have.
        """
        return kind(
            lo=_put(limit, self.lo), hi=_put(limit, self.hi), chunk=self.chunk, q_ids=_put(ids, self.q_ids),
            k_ids=_put(ids, self.k_ids), valid=_put(condition, self.valid), mask=_put(condition, self.mask),
            uniform_empty=self.uniform_empty, **more,
        )  # fmt: skip


def _put(how: Callable[[_From], object], term: _From | None) -> object:
    return None if term is None else how(term)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A limit of j − i: `offset`, or Sk − Sq + offset when `aligned` (the last query's position is the last
    key's).
    """

    offset: int
    aligned: bool = False

    def at(self, q_len: int, k_len: int) -> int:
        return self.offset + (k_len - q_len if self.aligned else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskForm(Mask[Names, Names, Edge]):
    """A mask as an option carries it and a plan keeps it: ids, padding and dense conditions are the names of
    the inputs behind them.

    Attributes:
        ahead: Sk − Sq at the example.
        flags: the ids are flags: queries are padded as keys are.
        guards: what inputs have to be for this to be the mask; every call checks it, and reads the dense mask
            where it is not.
    """

    ahead: int = 0
    flags: bool = False
    guards: tuple[Reason, ...] = ()

    def same_terms(self, other: MaskForm) -> bool:
        """Whether the same bands, chunks and kinds of ids and conditions are in both, at the sizes that each
        is known for.
        """
        return self._terms() == other._terms()

    def _terms(self) -> tuple[object, ...]:
        conditions = [term is not None for term in (self.q_ids, self.k_ids, self.valid, self.mask)]
        return self._at(self.lo), self._at(self.hi), self.chunk, *conditions

    def _at(self, edge: Edge | None) -> int | None:
        return None if edge is None else edge.at(0, self.ahead)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """The limits of j − i at the example."""
        return self._at(self.lo), self._at(self.hi)


# ------------------------------------------------------------------ what is said of a mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Sees(Reason):
    """An attention's mask, None where the form of the decision has it, and the share of the scores in its
    tiles.
    """

    kind: Literal["sees"] = "sees"
    form: MaskForm | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StaysDense(Reason):
    """A mask has no closed form, and why."""

    kind: Literal["stays dense"] = "stays dense"
    because: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlyWhere(Reason):
    """A mask has its form under guards alone, which would not be looked at there; `unmet`: the example inputs
    break them.
    """

    kind: Literal["only where"] = "only where"
    form: MaskForm
    unmet: bool = False
