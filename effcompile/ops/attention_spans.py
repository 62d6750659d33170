"""Which keys a block of query rows has to visit: derived from the closed forms, the ids, the padding or the
tile lists, never by S² work.

Rows and keys are first cut into rectangles in which ids, chunks and padding hold everywhere (or are left to a
mask), then rectangles into blocks of rows by the band. Every visible pair lies in exactly one span.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from effcompile.ops.attention_terms import Terms, part, visible

Shape = tuple[int, int, int, int]  # B, H, Sq, Sk


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRun:
    """Keys start to stop. `free`: all of them are seen, whatever the terms say (full tiles)."""

    start: int
    stop: int
    free: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Rows and the keys that they visit, for these batch entries and query heads; every slice has its bounds.

    Attributes:
        runs: keys, ascending and disjoint.
        whole: every pair is visible. causal: exactly the pairs j − runs[0].start ≤ i − rows.start are.
        banded: only the band hides anything. When none of the three holds, `hidden_of` tells.
    """

    batch: slice
    heads: slice
    rows: slice
    runs: tuple[SpanRun, ...]
    whole: bool = False
    causal: bool = False
    banded: bool = False

    @property
    def keys(self) -> int:
        """How many keys are visited."""
        return sum(run.stop - run.start for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanGroup:
    """`count` spans of one form, of which each begins `step` rows and keys after the one before it; `span` is
    the first.
    """

    span: Span
    count: int = 1
    step: int = 0


def groups(found: Iterable[Span], most: int) -> list[SpanGroup]:
    """Spans of one run that only differ in where they lie, as groups of at most so many keys; the others
    alone.
    """
    alike: dict[object, list[Span]] = {}
    result: list[SpanGroup] = []
    for span in found:
        if len(span.runs) > 1 or not (span.whole or span.causal or span.banded):
            result.append(SpanGroup(span=span))
            continue
        rows, keys = span.rows, span.runs[0]
        form = (
            span.batch.start,
            span.heads.start,
            rows.stop - rows.start,
            span.keys,
            keys.start - rows.start,
            span.whole,
            span.causal,
        )
        alike.setdefault(form, []).append(span)
    for members in alike.values():
        result += _progressions(members, max(1, most // members[0].keys))
    return result


def _progressions(members: list[Span], most: int) -> Iterator[SpanGroup]:
    """Members of one form, ascending, in groups of equal steps."""
    at = 0
    while at < len(members):
        step = members[at + 1].rows.start - members[at].rows.start if at + 1 < len(members) else 0
        stop = at + 1
        while (
            stop < len(members)
            and stop - at < most
            and members[stop].rows.start - members[stop - 1].rows.start == step
        ):
            stop += 1
        yield SpanGroup(span=members[at], count=stop - at, step=step)
        at = stop


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """Rows and keys; `exact`: ids, chunk and padding let all of its pairs through."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    exact: bool


def spans(terms: Terms, shape: Shape, rows: int, *, whole: bool, causal_from: int = 0) -> Iterator[Span]:
    """The spans of one call; rows that visit nothing are in none, every other row is in one per batch entry
    and head.

    A span has at most `rows` rows, except for tiles (block_q); with `whole`, full rectangles stay one span,
    and causal ones of `causal_from` rows or more.
    """
    b, h, sq, sk = shape
    if not (b and h and sq and sk):
        return
    if terms.tiles:
        yield from _tile_spans(terms, shape)
        return
    heads = slice(0, h)
    for batch, rectangles in _by_batch(terms, b, sq, sk):
        for rectangle in rectangles:
            one = _whole(terms, rectangle, batch, heads, causal_from) if whole else None
            yield from (one,) if one is not None else _blocks(terms, rectangle, batch, heads, rows)


def key_heads(heads: slice, group: int) -> slice:
    """The key heads that these query heads read: all, or one."""
    return slice(heads.start // group, -(-heads.stop // group))


def hidden_of(terms: Terms, span: Span, device: torch.device) -> Tensor | None:
    """True where a pair of the span is not visible, broadcastable to (b, h, rows, keys); None
    when all are.
    """
    if span.whole:
        return None
    seen = [
        None
        if run.free
        else visible(terms, span.batch, span.heads, span.rows, slice(run.start, run.stop), device)
        for run in span.runs
    ]
    if all(part is None for part in seen):
        return None
    if len(seen) == 1 and seen[0] is not None:
        return ~seen[0]
    parts = [torch.ones((1,) * 4, dtype=torch.bool, device=device) if s is None else s for s in seen]
    lead = torch.broadcast_shapes(*(p.shape[:3] for p in parts))
    return ~torch.cat(
        [p.expand(*lead, run.stop - run.start) for p, run in zip(parts, span.runs, strict=True)], 3
    )


def _by_batch(terms: Terms, b: int, sq: int, sk: int) -> Iterator[tuple[slice, tuple[_Rectangle, ...]]]:
    """Rectangles per run of batch entries that have the same."""
    per_entry = (terms.q_ids, terms.k_ids, terms.valid, terms.mask)
    if all(t is None or t.shape[0] == 1 for t in per_entry):
        yield slice(0, b), _rectangles(terms, 0, sq, sk)
        return
    masked = terms.mask is not None and terms.mask.shape[0] > 1  # blocks are trimmed by the entry's own mask
    found = [(_rectangles(terms, entry, sq, sk), entry if masked else 0) for entry in range(b)]
    at = 0
    for (rectangles, _), same in groupby(found):
        stop = at + len(list(same))
        yield slice(at, stop), rectangles
        at = stop


def _rectangles(terms: Terms, entry: int, sq: int, sk: int) -> tuple[_Rectangle, ...]:
    found = [_Rectangle((0, sq), (0, sk), True)]
    if terms.chunk:
        c = int(terms.chunk)
        found = [
            _Rectangle((at, min(at + c, sq)), (at, min(at + c, sk)), True) for at in range(0, min(sq, sk), c)
        ]
    if terms.q_ids is not None and terms.k_ids is not None:
        documents = _documents(_row(terms.q_ids, entry), _row(terms.k_ids, entry))
        found = [
            both for one in found for other in documents if (both := _intersection(one, other)) is not None
        ]
    if terms.valid is not None:
        valid = _row(terms.valid, entry)
        found = [trimmed for one in found if (trimmed := _trimmed(one, valid)) is not None]
    return tuple(found)


def _row(per_batch: Tensor, entry: int) -> Tensor:
    return per_batch[entry if per_batch.shape[0] > 1 else 0]


def _documents(q_ids: Tensor, k_ids: Tensor) -> list[_Rectangle]:
    """One rectangle per run of equal query ids; all rows in one, to be masked, when the runs are too short to
    pay.
    """
    starts, stops = _run_bounds(q_ids)
    if len(starts) > 8 + q_ids.shape[0] // 32:
        return [_Rectangle((0, q_ids.shape[0]), (0, k_ids.shape[0]), False)]
    found = []
    for start, stop in zip(starts, stops, strict=True):
        same = (k_ids == q_ids[start]).nonzero()
        if same.shape[0]:
            first, last = int(same[0]), int(same[-1]) + 1
            found.append(_Rectangle((start, stop), (first, last), last - first == same.shape[0]))
    return found


def _run_bounds(ids: Tensor) -> tuple[list[int], list[int]]:
    cuts = ((ids[1:] != ids[:-1]).nonzero().flatten() + 1).tolist()
    return [0, *cuts], [*cuts, ids.shape[0]]


def _intersection(a: _Rectangle, b: _Rectangle) -> _Rectangle | None:
    rows = max(a.rows[0], b.rows[0]), min(a.rows[1], b.rows[1])
    keys = max(a.keys[0], b.keys[0]), min(a.keys[1], b.keys[1])
    return _Rectangle(rows, keys, a.exact and b.exact) if rows[0] < rows[1] and keys[0] < keys[1] else None


def _trimmed(rectangle: _Rectangle, valid: Tensor) -> _Rectangle | None:
    """Without the padding before the first and after the last key that is valid."""
    start, stop = rectangle.keys
    there = valid[start:stop].nonzero()
    if not there.shape[0]:
        return None
    first, last = start + int(there[0]), start + int(there[-1]) + 1
    return _Rectangle(rectangle.rows, (first, last), rectangle.exact and last - first == there.shape[0])


def _whole(terms: Terms, rectangle: _Rectangle, batch: slice, heads: slice, causal_from: int) -> Span | None:
    """A rectangle as one span, where it is full, or causal and long."""
    (q0, q1), (k0, k1) = rectangle.rows, rectangle.keys
    if not rectangle.exact or terms.mask is not None:
        return None
    full = _open(terms, rectangle.rows, rectangle.keys)
    # full; or the band is j − k0 ≤ i − q0 and no more
    if full or (
        q1 - q0 >= causal_from and terms.hi == k0 - q0 and (terms.lo is None or k0 - (q1 - 1) >= terms.lo)
    ):
        return Span(
            batch=batch,
            heads=heads,
            rows=slice(q0, q1),
            runs=(SpanRun(start=k0, stop=k1),),
            whole=full,
            causal=not full,
        )
    return None


def _blocks(terms: Terms, rectangle: _Rectangle, batch: slice, heads: slice, rows: int) -> Iterator[Span]:
    """A rectangle, cut into blocks of rows that each visit what the band lets them."""
    (q0, q1), (k0, k1) = rectangle.rows, rectangle.keys
    exact = rectangle.exact and terms.mask is None
    for start in range(q0, q1, rows):
        stop = min(start + rows, q1)
        first = k0 if terms.lo is None else max(k0, start + int(terms.lo))
        last = k1 if terms.hi is None else min(k1, stop + int(terms.hi))
        if not exact and first < last:
            first, last = _bounds(terms, batch, heads, slice(start, stop), first, last)
        if first < last:
            free = exact and _open(terms, (start, stop), (first, last))
            runs = (SpanRun(start=first, stop=last),)
            yield Span(
                batch=batch,
                heads=heads,
                rows=slice(start, stop),
                runs=runs,
                whole=free,
                banded=exact and not free,
            )


def _open(terms: Terms, rows: tuple[int, int], keys: tuple[int, int]) -> bool:
    """Whether the band lets every pair through."""
    return (terms.lo is None or keys[0] - (rows[1] - 1) >= terms.lo) and (
        terms.hi is None or keys[1] - 1 - rows[0] <= terms.hi
    )


def _bounds(terms: Terms, batch: slice, heads: slice, rows: slice, first: int, last: int) -> tuple[int, int]:
    """The first key and the one after the last that any of the rows may see by the mask and the ids; (0, 0)
    for none.
    """
    seen = torch.ones(last - first, dtype=torch.bool)
    if terms.mask is not None:
        seen = seen & part(terms.mask, batch, heads, rows, slice(first, last)).any(2).any(1).any(0).cpu()
    if terms.q_ids is not None and terms.k_ids is not None:
        of_keys = part(terms.k_ids, batch, slice(first, last))
        seen = (
            seen & torch.isin(of_keys.contiguous(), part(terms.q_ids, batch, rows).contiguous()).any(0).cpu()
        )
    there = seen.nonzero()
    return (first + int(there[0]), first + int(there[-1]) + 1) if there.shape[0] else (0, 0)


def _tile_spans(terms: Terms, shape: Shape) -> Iterator[Span]:
    """One span per row of tiles; neighbouring tiles of one kind are one run."""
    b, h, sq, sk = shape
    lists = [tensor.tolist() for tensor in terms.tiles]
    batches, heads = terms.tiles[0].shape[:2]
    for entry in range(batches):
        for head in range(heads):
            place = (
                slice(entry, entry + 1) if batches > 1 else slice(0, b),
                slice(head, head + 1) if heads > 1 else slice(0, h),
            )
            for row, start in enumerate(range(0, sq, terms.block_q)):
                kinds = {}
                for free, (count, index) in ((False, lists[0:2]), (True, lists[2:4])):
                    kinds.update(dict.fromkeys(index[entry][head][row][: count[entry][head][row]], free))
                runs = _runs(kinds, terms.block_k, sk)
                if runs:
                    rows = slice(start, min(start + terms.block_q, sq))
                    yield Span(
                        batch=place[0],
                        heads=place[1],
                        rows=rows,
                        runs=runs,
                        whole=all(run.free for run in runs),
                    )


def _runs(kinds: dict[int, bool], block: int, sk: int) -> tuple[SpanRun, ...]:
    """Tile index → free, as runs of keys."""
    found: list[SpanRun] = []
    for tile in sorted(kinds):
        start, stop = tile * block, min((tile + 1) * block, sk)
        if found and found[-1].stop == start and found[-1].free == kinds[tile]:
            start = found.pop().start
        found.append(SpanRun(start=start, stop=stop, free=kinds[tile]))
    return tuple(found)
