"""Attention in blocks of rows, by matrix products and in-place operators of PyTorch: on any device, for every
argument there is.

Scores live for one block of rows at a time, in fp32; the whole matrix never does. The backward computes each
block's scores again and their weights as exp(score − lse) (Dao et al., FlashAttention, arXiv 2205.14135,
section 3.1).

Legend as in `effcompile.ops.attention`; n = batch entries × key heads of a span, g = H / K, r rows, c keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from effcompile.ops.attention_spans import Shape, Span, SpanRun, hidden_of, key_heads, spans
from effcompile.ops.attention_terms import NeededGradients, Terms, part, sink_rows
from effcompile.ops.sums import sum_dtype

#: Scores per block: 4 MB in fp32, which stays in a core's caches with its neighbours.
SCORES = 1 << 20
#: Scores per block where rows that see nothing get their gradients: they are rare, and every step's memory
#: has to hold such a block.
EMPTY_SCORES = 1 << 16


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """(out, lse) of checked arguments."""
    shape = shape_of(q, k)
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=sum_dtype(q))
    if terms.sink is not None:
        lse.copy_(sink_rows(terms.sink).expand(shape[:3]))
    for span in _blocks(terms, shape, SCORES):
        block = _Block(q, k, v, terms, span)
        scores = block.scores()
        top = scores.amax(3, keepdim=True)
        sink = block.sink()
        top = (top if sink is None else torch.maximum(top, sink)).clamp_(min=torch.finfo(top.dtype).min)
        total = scores.sub_(top).exp_().sum(3, keepdim=True)
        if sink is not None:
            total += torch.exp(sink - top)
        weighted = block.heads(torch.bmm(block.stacked(scores), block.values))
        out[block.at] = weighted.div_(torch.where(total > 0, total, 1.0))
        lse[block.at] = top.add_(total.log_()).squeeze(3)
    if terms.uniform_empty and terms.sink is None:
        fill_empty(out, lse, v)
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
    """(dq, dk, dv, dbias, dsink) of checked arguments."""
    sums = SoftmaxSums.of(q, k, v, terms, wanted)
    shape = shape_of(q, k)
    delta = delta_of(grad_out, out)
    for span in _blocks(terms, shape, SCORES):
        _Block(q, k, v, terms, span).add_gradients(sums, grad_out, delta, lse, None)
    return finish(sums, grad_out, q, k, v, out, lse, terms)


def finish(
    sums: SoftmaxSums,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: Terms,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients, when all spans are in `sums`: rows that see nothing and the sink are added."""
    shape = shape_of(q, k)
    if terms.sink is not None and sums.sink is not None:
        weight = torch.exp(sink_rows(terms.sink).to(lse.dtype) - lse)
        sums.sink += weight.mul_(delta_of(grad_out, out)).neg_().sum_to_size(sums.sink.shape)
    if terms.uniform_empty and terms.sink is None and shape[3]:
        empty = lse == -torch.inf
        if bool(empty.any()):
            delta = delta_of(grad_out, out)
            everything = replace(
                terms, mask=None, q_ids=None, k_ids=None, valid=None, tiles=(), lo=None, hi=None, chunk=0
            )
            for span in _blocks(everything, shape, EMPTY_SCORES):
                if bool(empty[span.batch, :, span.rows].any()):
                    _Block(q, k, v, everything, span).add_gradients(sums, grad_out, delta, lse, empty)
    return sums.results(q, k, v, terms)


def shape_of(q: Tensor, k: Tensor) -> Shape:
    """B, H, Sq, Sk."""
    b, h, sq, _ = q.shape
    return b, h, sq, k.shape[2]


def delta_of(grad_out: Tensor, out: Tensor) -> Tensor:
    """Σ over Dv of grad_out · out, (B, H, Sq): what the softmax takes from each gradient of a weight."""
    return (grad_out.to(sum_dtype(out)) * out).sum(3)


def _blocks(terms: Terms, shape: Shape, most: int) -> Iterator[Span]:
    """Spans of about `most` scores: some rows of all heads, of as many batch entries as fit; one at least."""
    for span in spans(terms, shape, rows_per_block(shape, terms, most), whole=False):
        each = (span.heads.stop - span.heads.start) * (span.rows.stop - span.rows.start) * span.keys
        entries = max(1, most // each)
        for at in range(span.batch.start, span.batch.stop, entries):
            yield replace(span, batch=slice(at, min(at + entries, span.batch.stop)))


def rows_per_block(shape: Shape, terms: Terms, most: int) -> int:
    """So many rows that one batch entry's scores are about `most`; 16 at least."""
    _, h, sq, sk = shape
    band = sk if terms.lo is None or terms.hi is None else max(1, int(terms.hi) - int(terms.lo) + 64)
    keys = min(sk, band, int(terms.chunk) or sk)
    return min(max(16, most // max(1, h * keys)), 256, max(1, sq))


def fill_empty(out: Tensor, lse: Tensor, v: Tensor) -> None:
    """The mean of v in rows that see nothing."""
    empty = lse == -torch.inf
    if v.shape[2] and bool(empty.any()):
        mean = v.mean(2, dtype=lse.dtype).to(out.dtype).repeat_interleave(out.shape[1] // v.shape[1], 1)
        out.copy_(torch.where(empty[..., None], mean[:, :, None], out))


@dataclass(slots=True, kw_only=True)
class SoftmaxSums:
    """Gradients while they are summed, in fp32 (fp64 for fp64); a bias's and a sink's in their broadcastable
    shapes, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sink: Tensor | None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, terms: Terms, wanted: NeededGradients) -> SoftmaxSums:
        """Zeros."""
        dtype = sum_dtype(q)
        bias = terms.bias if wanted.bias_gradient else None
        sink = sink_rows(terms.sink) if wanted.sink_gradient and terms.sink is not None else None
        dk, dv = (t.new_zeros(t.shape, dtype=dtype) for t in (k, v))
        db, ds = (None if t is None else t.new_zeros(t.shape, dtype=dtype) for t in (bias, sink))
        return cls(q=q.new_zeros(q.shape), k=dk, v=dv, bias=db, sink=ds)

    @classmethod
    def around(cls, dq: Tensor, dk: Tensor, dv: Tensor, terms: Terms, wanted: NeededGradients) -> SoftmaxSums:
        """What is already whole, with no bias's."""
        dq, dk, dv = (x.contiguous() for x in (dq, dk, dv))
        sink = sink_rows(terms.sink) if wanted.sink_gradient and terms.sink is not None else None
        return cls(
            q=dq,
            k=dk,
            v=dv,
            bias=None,
            sink=None if sink is None else torch.zeros_like(sink, dtype=sum_dtype(dq)),
        )

    def results(
        self, q: Tensor, k: Tensor, v: Tensor, terms: Terms
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the inputs' shapes and dtypes."""
        optional = [
            q.new_empty(0) if total is None or given is None else total.reshape(given.shape).to(given.dtype)
            for total, given in ((self.bias, terms.bias), (self.sink, terms.sink))
        ]
        return self.q, self.k.to(k.dtype), self.v.to(v.dtype), optional[0], optional[1]


class _Block:
    """One span: its rows and keys as stacks of matrices (n, g·r or c, width) in the wide dtype."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, span: Span) -> None:
        self.terms, self.span, self.dtype = terms, span, sum_dtype(q)
        self.at = (span.batch, span.heads, span.rows)
        self.key_heads = key_heads(span.heads, q.shape[1] // k.shape[1])
        self.queries = self._stack(q[self.at])
        self.keys, self.values = (self._gather(t) for t in (k, v))
        self.tanh: Tensor | None = None

    def _stack(self, rows_BHRD: Tensor) -> Tensor:  # noqa: N803
        """(b, h, r, d) → (n, g·r, d)."""
        b, h, r, d = rows_BHRD.shape
        kv = self.key_heads.stop - self.key_heads.start
        return rows_BHRD.to(self.dtype).reshape(b * kv, h // kv * r, d)

    def _gather(self, whole: Tensor) -> Tensor:
        """(B, K, Sk, d) → (n, c, d): the span's keys."""
        parts = [whole[self.span.batch, self.key_heads, run.start : run.stop] for run in self.span.runs]
        keys = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return keys.to(self.dtype).flatten(0, 1)

    def heads(self, stack: Tensor) -> Tensor:
        """(n, g·r, x) → (b, h, r, x)."""
        b, h = self.span.batch.stop - self.span.batch.start, self.span.heads.stop - self.span.heads.start
        return stack.view(b, h, self.span.rows.stop - self.span.rows.start, stack.shape[2])

    def stacked(self, scores_BHRC: Tensor) -> Tensor:  # noqa: N803
        """(b, h, r, c) → (n, g·r, c)."""
        return scores_BHRC.view(*self.queries.shape[:2], scores_BHRC.shape[3])

    def sink(self) -> Tensor | None:
        """(b, h, r, 1), axes full or 1."""
        sink = self.terms.sink
        return None if sink is None else part(sink_rows(sink), *self.at).to(self.dtype)[..., None]

    def scores(self, *, derivable: bool = False) -> Tensor:
        """(b, h, r, c), −inf where nothing is seen.

        With `derivable`, `tanh` is kept for the derivative of a softcap.
        """
        scores = self.heads(torch.bmm(self.queries, self.keys.transpose(1, 2)).mul_(self.terms.scale))
        if self.terms.softcap:
            scores.div_(self.terms.softcap).tanh_()
            self.tanh = scores.clone() if derivable else None
            scores.mul_(self.terms.softcap)
        for run, columns in self._columns():
            if self.terms.bias is not None:
                scores[..., columns] += part(self.terms.bias, *self.at, slice(run.start, run.stop))
        hidden = hidden_of(self.terms, self.span, scores.device)
        return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)

    def _columns(self) -> list[tuple[SpanRun, slice]]:
        """Each run and its place among the span's keys."""
        found, at = [], 0
        for run in self.span.runs:
            found.append((run, slice(at, at + run.stop - run.start)))
            at += run.stop - run.start
        return found

    def add_gradients(
        self, sums: SoftmaxSums, grad_out: Tensor, delta: Tensor, lse: Tensor, empty: Tensor | None
    ) -> None:
        """What this span adds to the gradients.

        `empty`, (B, H, Sq): count only these rows, with the weights 1 / Sk.
        """
        grad = self._stack(grad_out[self.at])
        if empty is None:
            shift = lse[self.at][..., None]
            weights = (
                self.scores(derivable=True).sub_(torch.where(shift == -torch.inf, torch.inf, shift)).exp_()
            )
        else:
            weights = self.scores(derivable=True).fill_(1 / self.span.keys).mul_(empty[self.at][..., None])
        self._add(sums.v, torch.bmm(self.stacked(weights).transpose(1, 2), grad))
        if empty is not None and self.terms.fills:
            return
        ds = (
            self.heads(torch.bmm(grad, self.values.transpose(1, 2)))
            .sub_(delta[self.at][..., None])
            .mul_(weights)
        )
        if sums.bias is not None:
            for run, columns in self._columns():
                target = part(sums.bias, *self.at, slice(run.start, run.stop))
                target += ds[..., columns].sum_to_size(target.shape)
        if self.tanh is not None:
            ds.mul_(self.tanh.square_().neg_().add_(1.0))
        stack = self.stacked(ds).mul_(self.terms.scale)
        sums.q[self.at] += self.heads(torch.bmm(stack, self.keys))
        self._add(sums.k, torch.bmm(stack.transpose(1, 2), self.queries))

    def _add(self, total: Tensor, stack_NCD: Tensor) -> None:  # noqa: N803
        """Rows of keys into a gradient of k or v."""
        b, kv = (s.stop - s.start for s in (self.span.batch, self.key_heads))
        whole = stack_NCD.view(b, kv, *stack_NCD.shape[1:])
        for run, columns in self._columns():
            total[self.span.batch, self.key_heads, run.start : run.stop] += whole[:, :, columns]
