"""Attention on a CPU by PyTorch's flash kernel, called on the keys that each block of rows may see.

The kernel (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp) runs near the speed of a matrix product at any
block size: about 70 of 80 GFLOP/s from 64 rows on, small masks nearly free (measured, one core, fp32, width
64). It takes fewer key heads than query heads, any mask strides, fp32 masks beside narrow inputs, and both a
mask and `is_causal`; but it silently misreads a last axis that is not dense, and dies on empty inputs. It
gives 0 and lse 0 for rows that see nothing; ours is −inf.

Legend as in `effcompile.ops.attention`; r rows and c keys of a span.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from effcompile.ops import attention_kernel
from effcompile.ops.attention_kernel import SoftmaxSums, shape_of
from effcompile.ops.attention_spans import Shape, Span, SpanGroup, groups, hidden_of, key_heads, spans
from effcompile.ops.attention_terms import NeededGradients, Terms, part, sink_rows
from effcompile.ops.sums import sum_dtype
from effcompile.ops.torch_attention import BACKWARD, FORWARD, runs_in

#: What a span costs beside its products, in multiplications: about 60 µs at 35e9 a second.
_SPAN_COST = 2_000_000

#: Keys of a group, where there is no limit.
_ALL = 1 << 62

#: Causal forwards of fewer rows are faster in blocks: the kernel skips keys by 512 (512 rows 1.2 times, 1024
#: the same, 2048 0.9).
_CAUSAL = 1024


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """(out, lse) of checked arguments on a CPU."""
    if not _takes(q, k, v, terms):
        return attention_kernel.forward(q, k, v, terms)
    call = _Call(q, k, v, terms, least=64)
    found = call.spans(causal_from=_CAUSAL if q.shape[0] * q.shape[1] > 1 else 0)
    if len(found) == 1 and _is_everything(found[0], call.shape):
        out, lse = call.forward(found[0])
    else:
        out = q.new_zeros(q.shape)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=sum_dtype(q))
        for group in call.groups(found, most=_ALL):
            call.forward_group(group, out, lse)
    out, lse = out.contiguous(), lse.contiguous()
    if terms.sink is not None:
        _add_sink(out, lse, terms.sink)
    elif terms.uniform_empty:
        attention_kernel.fill_empty(out, lse, v)
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: Terms,
    wanted: NeededGradients,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dsink) of checked arguments on a CPU."""
    if not _takes(q, k, v, terms) or (terms.bias is not None and wanted.bias_gradient):
        return attention_kernel.backward(grad_out, q, k, v, out, lse, terms, wanted)
    # narrow backwards are slow in small blocks
    call = _Call(q, k, v, terms, least=64 if q.dtype == sum_dtype(q) else 256)
    given = _Forward(_dense(grad_out), out, lse.masked_fill(lse == -torch.inf, 0.0))
    found = call.spans(causal_from=0)
    if len(found) == 1 and _is_everything(found[0], call.shape):
        sums = SoftmaxSums.around(*call.backward(found[0], given), terms, wanted)
    else:
        sums = SoftmaxSums.of(q, k, v, terms, replace(wanted, bias_gradient=False))
        for group in call.groups(found, most=2 * k.shape[2]):
            # a group has its own gradients of the keys that it visits
            call.backward_group(group, given, sums)
    return attention_kernel.finish(sums, grad_out, q, k, v, out, lse, terms)


def _takes(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> bool:
    """Whether the flash kernel computes this."""
    some = q.numel() > 0 and k.numel() > 0
    return some and not terms.softcap and q.shape[3] == v.shape[3] and runs_in(q.dtype)


def _is_everything(span: Span, shape: Shape) -> bool:
    b, h, sq, sk = shape
    return (span.batch, span.heads, span.rows) == (slice(0, b), slice(0, h), slice(0, sq)) and span.keys == sk


def _add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """One more logit in a softmax that was done without it."""
    sunk = torch.logaddexp(lse, sink_rows(sink).to(lse.dtype))
    share = torch.exp(lse - sunk).masked_fill_(lse == -torch.inf, 0.0)
    out.mul_(share[..., None])
    lse.copy_(sunk)


def _dense(x: Tensor) -> Tensor:
    """With rows that a matrix product reads as they lie."""
    fits = x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) >= x.shape[3])
    return x if fits or x.numel() == 0 else x.clone(memory_format=torch.contiguous_format)


def _folds(x: Tensor) -> bool:
    """Whether batch and heads can be viewed as one axis."""
    return x.shape[0] == 1 or x.shape[1] == 1 or x.stride(0) == x.stride(1) * x.shape[1]


@dataclass(frozen=True, slots=True)
class _Forward:
    """What the forward left: grad_out, out, and lse with 0 in rows that see nothing, as the kernel has it."""

    grad: Tensor
    out: Tensor
    lse: Tensor


class _Call:
    """One call's operands, and the parts of masks that its spans share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, *, least: int) -> None:
        """`least`: rows of a block."""
        self.q, self.k, self.v, self.terms = _dense(q), _dense(k), _dense(v), terms
        self.shape = shape_of(q, k)
        self.rows = rows_per_span(self.shape, terms, q.shape[3], least)
        self._band: Tensor | None = None
        self._parts: dict[tuple[int, int, int], Tensor] = {}

    def spans(self, causal_from: int) -> list[Span]:
        """All spans."""
        return list(spans(self.terms, self.shape, self.rows, whole=True, causal_from=causal_from))

    def forward(self, span: Span) -> tuple[Tensor, Tensor]:
        """(out (b, h, r, D), lse (b, h, r)) of a span."""
        given = *self._operands(span), self._mask(span)
        q, k, v, mask = _folded(*given) or given
        out, lse = FORWARD(q, k, v, is_causal=span.causal, attn_mask=mask, scale=self.terms.scale)
        if mask is not None and not self._all_see(span):
            lse = lse.masked_fill((mask == -torch.inf).all(3), -torch.inf)
        return _unfolded(out, given[0]), _unfolded(lse, given[0])

    def backward(self, span: Span, given: _Forward) -> tuple[Tensor, Tensor, Tensor]:
        """(dq (b, h, r, D), dk, dv (b, key heads, c, D)) of a span."""
        at = (span.batch, span.heads, span.rows)
        operands = *self._operands(span), self._mask(span), given.grad[at], given.out[at], given.lse[at]
        q, k, v, mask, grad, out, lse = _folded(*operands) or operands
        found = BACKWARD(grad, q, k, v, out, lse, 0.0, span.causal, attn_mask=mask, scale=self.terms.scale)
        dq, dk, dv = (_unfolded(x, like) for x, like in zip(found, operands[:3], strict=True))
        return dq, dk, dv

    def groups(self, found: list[Span], most: int) -> list[SpanGroup]:
        """As few calls as there can be: every call wakes all threads and waits for them.

        A bias differs from place to place.
        """
        return (
            [SpanGroup(span=span) for span in found] if self.terms.bias is not None else groups(found, most)
        )

    def forward_group(self, group: SpanGroup, out: Tensor, lse: Tensor) -> None:
        """The rows of a group, written where they belong."""
        span = group.span
        if group.count == 1:
            at = (span.batch, span.heads, span.rows)
            out[at], lse[at] = self.forward(span)
            return
        mask = self._mask(span)
        for entry in range(span.batch.start, span.batch.stop):
            rows, keys = (
                partial(_windows, entry=entry, group=group, heads=h)
                for h in (span.heads, self._key_heads(span))
            )
            q, k, v = rows(self.q), keys(self.k, of_keys=True), keys(self.v, of_keys=True)
            part_of_out, part_of_lse = FORWARD(
                q, k, v, is_causal=span.causal, attn_mask=mask, scale=self.terms.scale
            )
            if mask is not None and not self._all_see(span):
                part_of_lse = part_of_lse.masked_fill((mask == -torch.inf).all(3), -torch.inf)
            rows(out).copy_(part_of_out)
            rows(lse[..., None]).copy_(part_of_lse[..., None])

    def backward_group(self, group: SpanGroup, given: _Forward, sums: SoftmaxSums) -> None:
        """What a group adds to the gradients."""
        span = group.span
        if group.count == 1:
            at = (span.batch, span.heads, span.rows)
            sums.q[at], *of_keys = self.backward(span, given)
            self.add(sums, span, *of_keys)
            return
        mask = self._mask(span)
        for entry in range(span.batch.start, span.batch.stop):
            rows, keys = (
                partial(_windows, entry=entry, group=group, heads=h)
                for h in (span.heads, self._key_heads(span))
            )
            found = BACKWARD(
                rows(given.grad), rows(self.q), keys(self.k, of_keys=True), keys(self.v, of_keys=True),
                rows(given.out), rows(given.lse[..., None])[..., 0], 0.0, span.causal, attn_mask=mask,
                scale=self.terms.scale,
            )  # fmt: skip
            rows(sums.q).copy_(found[0])
            for start in range(0, span.keys, group.step):  # windows overlap, their parts of one step do not
                stop = min(start + group.step, span.keys)
                for total, each in zip((sums.k, sums.v), found[1:], strict=True):
                    keys(total, of_keys=True, start=start, stop=stop).add_(each[:, :, start:stop])

    def add(self, sums: SoftmaxSums, span: Span, dk: Tensor, dv: Tensor) -> None:
        """A span's gradients of keys and values into all keys' ones."""
        heads, at = self._key_heads(span), 0
        for run in span.runs:
            here = slice(at, at + run.stop - run.start)
            sums.k[span.batch, heads, run.start : run.stop] += dk[:, :, here]
            sums.v[span.batch, heads, run.start : run.stop] += dv[:, :, here]
            at = here.stop

    def _key_heads(self, span: Span) -> slice:
        return key_heads(span.heads, self.q.shape[1] // self.k.shape[1])

    def _operands(self, span: Span) -> tuple[Tensor, Tensor, Tensor]:
        """Views, but for keys of several runs."""
        heads = self._key_heads(span)
        keys = [[x[span.batch, heads, run.start : run.stop] for run in span.runs] for x in (self.k, self.v)]
        k, v = (parts[0] if len(parts) == 1 else torch.cat(parts, 2) for parts in keys)
        return self.q[span.batch, span.heads, span.rows], k, v

    def _mask(self, span: Span) -> Tensor | None:
        """What is added to a span's scores, (b, h, r, c) with axes full or 1: bias, and −inf where nothing is
        seen.
        """
        bias = self._bias(span)
        if span.whole or span.causal:
            return bias
        if span.banded:
            band = self._band_of(span)
            return band if bias is None else bias + band
        if bias is None and self._band_in_tiles():
            return self._band_of_runs(span)
        hidden = hidden_of(self.terms, span, self.q.device)
        if hidden is None:
            return bias
        if bias is None:
            bias = hidden.new_zeros((), dtype=sum_dtype(self.q))
        return torch.where(hidden, -torch.inf, bias)

    def _bias(self, span: Span) -> Tensor | None:
        bias = self.terms.bias
        if bias is None:
            return None
        parts = [
            part(bias, span.batch, span.heads, span.rows, slice(run.start, run.stop)) for run in span.runs
        ]
        if len(parts) > 1:
            parts = [
                torch.cat(
                    [
                        p.expand(*p.shape[:3], run.stop - run.start)
                        for p, run in zip(parts, span.runs, strict=True)
                    ],
                    3,
                )
            ]
        return parts[0].to(sum_dtype(self.q)).expand(*parts[0].shape[:3], span.keys)

    def _band_of(self, span: Span) -> Tensor:
        """(1, 1, r, c): −inf outside the band.

        A window of one tensor, in which a column is a key's place relative to the first row.
        """
        (_, _, sq, sk), lo, hi = self.shape, self.terms.lo, self.terms.hi
        first = -(sq - 1) if lo is None else max(int(lo), -(sq - 1))
        if self._band is None:
            last = sk - 1 if hi is None else min(int(hi) + self.rows - 1, sk - 1)
            place, row = torch.arange(first, last + 1), torch.arange(self.rows)[:, None]
            outside = torch.zeros(self.rows, place.shape[0], dtype=torch.bool)
            outside |= (place < row + lo) if lo is not None else outside
            outside |= (place > row + hi) if hi is not None else outside
            self._band = torch.zeros(outside.shape, dtype=sum_dtype(self.q)).masked_fill_(outside, -torch.inf)
        start = span.runs[0].start - span.rows.start - first
        return self._band[None, None, : span.rows.stop - span.rows.start, start : start + span.keys]

    def _band_in_tiles(self) -> bool:
        """Whether tiles are listed, and the band alone hides anything in them."""
        t = self.terms
        return bool(t.tiles) and not t.chunk and all(x is None for x in (t.mask, t.q_ids, t.k_ids, t.valid))

    def _band_of_runs(self, span: Span) -> Tensor:
        """(1, 1, r, c) of runs of tiles: −inf outside the band, which lies alike in most rows of tiles and is
        made once.
        """
        rows, at = span.rows.stop - span.rows.start, 0
        mask = self.q.new_zeros((1, 1, rows, span.keys), dtype=sum_dtype(self.q))
        for run in span.runs:
            keys = run.stop - run.start
            if not run.free:
                mask[..., at : at + keys] = self._band_part(rows, run.start - span.rows.start, keys)
            at += keys
        return mask

    def _band_part(self, rows: int, first: int, keys: int) -> Tensor:
        """(r, c): −inf outside the band, for keys that begin `first` after the first row."""
        key = (rows, first, keys)
        if key not in self._parts:
            lo, hi = self.terms.lo, self.terms.hi
            place = torch.arange(first, first + keys) - torch.arange(rows)[:, None]
            outside = torch.zeros(place.shape, dtype=torch.bool)
            outside |= (place < lo) if lo is not None else outside
            outside |= (place > hi) if hi is not None else outside
            self._parts[key] = torch.zeros(place.shape, dtype=sum_dtype(self.q)).masked_fill_(
                outside, -torch.inf
            )
        return self._parts[key]

    def _all_see(self, span: Span) -> bool:
        """Whether it is plain that every row of the span sees a key."""
        if self.terms.bias is None and any(run.free for run in span.runs):
            return True
        lo, hi = self.terms.lo, self.terms.hi
        first, last = span.runs[0].start, span.runs[0].stop - 1
        banded = span.banded and self.terms.bias is None
        return banded and (
            (lo is None or span.rows.stop - 1 + lo <= last) and (hi is None or span.rows.start + hi >= first)
            and (lo is None or hi is None or lo <= hi)
        )  # fmt: skip


def rows_per_span(shape: Shape, terms: Terms, width: int, least: int = 64) -> int:
    """The block of rows that costs least: each visits a band's width and its own rows, and has a cost of its
    own.
    """
    b, h, sq, sk = shape

    def cost(rows: int) -> int:
        seen = sk if terms.lo is None or terms.hi is None else int(terms.hi) - int(terms.lo)
        keys = min(sk, seen + rows)
        return -(-sq // rows) * (
            _SPAN_COST * torch.get_num_threads() + b * h * rows * max(keys, 0) * width * 2
        )

    return min((rows for rows in (64, 128, 256) if rows >= least), key=cost)


def _windows(
    x: Tensor,
    entry: int,
    group: SpanGroup,
    heads: slice,
    *,
    of_keys: bool = False,
    start: int = 0,
    stop: int | None = None,
) -> Tensor:
    """(B, heads, length, width) → (count, h, r or c, width): a view of what each span of a group reads, or of
    a part of its keys.
    """
    span = group.span
    first = span.runs[0].start if of_keys else span.rows.start
    length = (span.keys if of_keys else span.rows.stop - span.rows.start) if stop is None else stop - start
    x = x[entry, heads]
    size = (group.count, x.shape[0], length, x.shape[2])
    stride = (group.step * x.stride(1), *x.stride())
    return x.as_strided(size, stride, x.storage_offset() + (first + start) * x.stride(1))


def _folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *others: Tensor) -> tuple[Any, ...] | None:
    """Everything with batch and heads in one axis and heads of 1, so that the kernel's results lie as (batch,
    heads, ...).

    None when that needs a copy.
    """
    if q.shape[1] != k.shape[1] or not all(_folds(x) for x in (q, k, v, *others)):
        return None
    if mask is not None and mask.shape[:2] != (1, 1):
        if q.shape[0] != 1:
            return None
        mask = mask.transpose(0, 1)
    size = q.shape[0] * q.shape[1]
    q, k, v, *others = (x.view(size, 1, *x.shape[2:]) for x in (q, k, v, *others))  # type: ignore[assignment]
    return q, k, v, mask, *others


def _unfolded(x: Tensor, like: Tensor) -> Tensor:
    """A result with the batch and heads of `like`; a view."""
    return x if x.shape[:2] == like.shape[:2] else x.reshape(*like.shape[:2], *x.shape[2:])
