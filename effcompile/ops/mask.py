"""Which keys a query sees: the fields that every mask has, whatever they are made of, and the declarations of the operators' arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Ids = TypeVar("Ids")
Condition = TypeVar("Condition")
Limit = TypeVar("Limit")
_Other = TypeVar("_Other")
_From = TypeVar("_From")

#: What the operators for attention take beside q, k and v: name → declaration. Their schemas and all lists of names are made of it.
ARGUMENTS = {
    "bias": "Tensor? bias=None", "sink": "Tensor? sink=None", "mask": "Tensor? mask=None", "q_ids": "Tensor? q_ids=None",
    "k_ids": "Tensor? k_ids=None", "valid": "Tensor? valid=None", "tiles": "Tensor[]? tiles=None",
    "scale": "float scale", "softcap": "float softcap=0.0", "lo": "SymInt? lo=None", "hi": "SymInt? hi=None", "chunk": "SymInt chunk=0",
    "block_q": "int block_q=0", "block_k": "int block_k=0", "uniform_empty": "bool uniform_empty=False", "fills": "bool fills=False",
}  # fmt: skip
#: The tensors among them, in order; those that say who sees whom beside `mask`; and the numbers that do.
OPERANDS = tuple(name for name, declared in ARGUMENTS.items() if declared.startswith("Tensor? "))
IDS = ("q_ids", "k_ids", "valid")
BAND = ("lo", "hi", "chunk")
#: The arguments by keyword.
FORM = tuple(name for name in ARGUMENTS if name not in (*OPERANDS, "tiles"))
#: The four tensors of a list of tiles that the forward reads.
TILES = ("partial_count", "partial_index", "full_count", "full_index")


def declared(*names: str) -> str:
    """The declarations of these arguments, for a schema."""
    return ", ".join(ARGUMENTS[name] for name in names)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mask(Generic[Ids, Condition, Limit]):
    """Query i of batch b sees key j when every term holds; a term that is None (chunk: 0) holds everywhere.

    Attributes:
        lo, hi: the band lo ≤ j − i ≤ hi. Causal: hi = 0, or Sk − Sq where the last query sees all keys; window of w: lo = hi − w + 1.
        chunk: i // chunk == j // chunk.
        q_ids, k_ids: documents, integers [B or 1, Sq] and [B or 1, Sk]: q_ids[b, i] == k_ids[b, j].
        valid: padding, bool [B or 1, Sk]: valid[b, j].
        mask: anything else, bool [B or 1, H or 1, Sq or 1, Sk or 1]: mask[b, h, i, j].
        uniform_empty: a query that sees nothing attends to all keys alike (the lowest finite number was added), not to none.
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
        """The same mask made of something else: each term that it has, put into other words; `more` are fields that only those have."""
        return kind(
            lo=_put(limit, self.lo), hi=_put(limit, self.hi), chunk=self.chunk, q_ids=_put(ids, self.q_ids), k_ids=_put(ids, self.k_ids),
            valid=_put(condition, self.valid), mask=_put(condition, self.mask), uniform_empty=self.uniform_empty, **more,
        )  # fmt: skip


def _put(how: Callable[[_From], object], term: _From | None) -> object:
    return None if term is None else how(term)
