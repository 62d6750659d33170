"""Closed forms of what depends on sizes alone, fitted to its values at several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from effcompile.core.mask import Edge
from effcompile.core.reasons import ReasonError
from effcompile.ops.visibility import Visibility


class UnfittedError(ReasonError):
    """No closed form holds at all the sizes; says which."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """What was recovered at one size."""

    q_len: int
    k_len: int
    form: Visibility


def fitted(samples: Sequence[Sample]) -> tuple[Edge | None, Edge | None, int]:
    """lo, hi and chunk that hold at every sampled size.

    Raises:
        UnfittedError: a sample has a term that is not among these, or they follow no rule of the sizes.
    """
    for s in samples:
        if s.form.mask is not None or s.form.valid is not None or s.form.q_ids is not None:
            raise UnfittedError("at some sizes it is no band")
    chunks = {s.form.chunk for s in samples if s.form.chunk}
    longest = {max(s.q_len, s.k_len) for s in samples if not s.form.chunk}
    if len(chunks) > 1 or (chunks and max(longest, default=0) > min(chunks)):
        raise UnfittedError("chunks of {} at different sizes", sorted(chunks))
    lo = _edge([(s.q_len, s.k_len, s.form.lo, -(s.q_len - 1)) for s in samples], lower=True)
    hi = _edge([(s.q_len, s.k_len, s.form.hi, s.k_len - 1) for s in samples], lower=False)
    return lo, hi, min(chunks, default=0)


def _edge(limits: Sequence[tuple[int, int, int | None, int]], *, lower: bool) -> Edge | None:
    """One rule for all (Sq, Sk, limit, the limit that hides nothing); a sample without limit may be one that
    it does not reach.
    """
    known = [(q, k, limit) for q, k, limit, _ in limits if limit is not None]
    if not known:
        return None
    for aligned in (False, True):
        offsets = {limit - (k - q if aligned else 0) for q, k, limit in known}
        edge = Edge(offset=min(offsets), aligned=aligned)
        unlimited = [(edge.at(q, k), loosest) for q, k, limit, loosest in limits if limit is None]
        if len(offsets) == 1 and all(
            here <= loosest if lower else here >= loosest for here, loosest in unlimited
        ):
            return edge
    said = ", ".join(["{} at {} × {}"] * len(known))
    raise UnfittedError(
        "its band follows no rule: " + said, *(part for q, k, limit in known for part in (limit, q, k))
    )
