"""Attention written plainly, in float64, with the whole matrix of scores: what the operators are compared
with.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Problem:
    """Arguments of `effcompile::attention`, by their names."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sink: Tensor | None = None
    mask: Tensor | None = None
    q_ids: Tensor | None = None
    k_ids: Tensor | None = None
    valid: Tensor | None = None
    tiles: list[Tensor] = field(default_factory=list)
    scale: float = 0.25
    softcap: float = 0.0
    lo: int | None = None
    hi: int | None = None
    chunk: int = 0
    block_q: int = 0
    block_k: int = 0
    uniform_empty: bool = False
    fills: bool = False

    def positional(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in fields(self)[:10])

    def form(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)[10:]}

    def dense(self) -> Tensor:
        """What is visible, (B, H, Sq, Sk)."""
        b, h, sq, _ = self.q.shape
        sk = self.k.shape[2]
        i, j = torch.arange(sq)[:, None], torch.arange(sk)
        seen = torch.ones(b, h, sq, sk, dtype=torch.bool)
        if self.lo is not None:
            seen &= j - i >= self.lo
        if self.hi is not None:
            seen &= j - i <= self.hi
        if self.chunk:
            seen &= i // self.chunk == j // self.chunk
        if self.q_ids is not None and self.k_ids is not None:
            seen &= (self.q_ids[:, :, None] == self.k_ids[:, None, :])[:, None]
        if self.valid is not None:
            seen &= self.valid[:, None, None]
        if self.mask is not None:
            seen &= self.mask
        if self.tiles:
            partial, full = (
                spread(*self.tiles[at : at + 2], self.block_q, self.block_k)[..., :sq, :sk] for at in (0, 2)
            )
            seen = (seen & partial) | full
        return seen


def spread(count: Tensor, index: Tensor, block_q: int, block_k: int) -> Tensor:
    """Lists of tiles as a mask (B, H, nq · block_q, nk · block_k)."""
    found = torch.zeros(index.shape, dtype=torch.bool)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in count.shape)).tolist():
        found[tuple(place)][index[tuple(place)][: count[tuple(place)]].long()] = True
    return found.repeat_interleave(block_q, 2).repeat_interleave(block_k, 3)


def run(p: Problem) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, differentiable."""
    q, k, v = (t.double() for t in (p.q, p.k, p.v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores, seen = q @ k.transpose(2, 3) * p.scale, p.dense()
    if p.softcap:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    if p.bias is not None:
        scores = scores + p.bias.double()
    scores = torch.where(seen, scores, -torch.inf)
    empty = ~seen.any(3, keepdim=True)
    if p.sink is not None:
        sink = p.sink.double()
        column = (sink[None, :, None] if sink.dim() == 1 else sink).expand(scores.shape[:3])[..., None]
        lse = torch.logsumexp(torch.cat([scores, column], 3), 3)
        return torch.exp(scores - lse[..., None]) @ v, lse
    lse = (
        torch.where(empty, 0.0, scores).logsumexp(3)
        if scores.shape[3]
        else scores.new_zeros(scores.shape[:3])
    )
    weights = torch.where(empty, 0.0, torch.exp(scores - lse[..., None]))
    if p.uniform_empty and scores.shape[3]:
        weights = torch.where(empty, _uniform(p, q, k), weights)
    return weights @ v, torch.where(empty[..., 0], -torch.inf, lse)


def _uniform(p: Problem, q: Tensor, k: Tensor) -> Tensor:
    """1 / Sk each; the gradient is that of a softmax of equal scores, unless they were overwritten."""
    scores = q @ k.transpose(2, 3) * p.scale
    if p.softcap:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    if p.bias is not None:
        scores = scores + p.bias.double()
    return torch.softmax(torch.zeros_like(scores) if p.fills else scores - scores.detach(), 3)
