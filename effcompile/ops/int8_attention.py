"""Attention by products of bytes on a CPU, for heads in fp32: softmax(q kᵀ · scale + mask) v.

Queries and keys have 8 bits by a scale for each row, as linears in `int8_token` have what enters them, values
by one for each column of a head, weights 8 bits of the largest of their query, which is 255. Sums are exact.
The kernel of `int8_attention.cpp` reads and writes heads as `fp32_attention` does, and takes AVX512-VNNI;
elsewhere torch computes the same, slowly, and no plan chooses it.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.types import Shape
from effcompile.machine.instructions import integer_isas
from effcompile.ops import fp32_attention as exact
from effcompile.ops.instruction_sets import best_of, warn_of_torch, whose, why_torch
from effcompile.ops.tape import KernelTold, TapeValue

__all__ = ["by_torch", "fallback_reason", "int8_attention", "told", "workspace_bytes"]

#: Largest weight, and code of a value.
_WEIGHT, _CODE = 255, 127
#: Keys whose products of two codes a sum of 32 bits holds.
_MOST_KEYS = (1 << 31) // (_WEIGHT * _CODE) - 16
_LOG2_E = 1.4426950408889634
#: Of the polynomial of 2^f, 0 <= f < 1, that is nearest to it: to 1e-4, a fortieth of a weight.
_POWERS = (0.0780244967, 0.2260672218, 0.6958335009, 0.9999252235)

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define(
    "int8_attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, bool is_causal=False, "
    "float? scale=None) -> Tensor"
)


def isas() -> tuple[str, ...]:
    """The instruction sets that it is compiled for here."""
    return tuple(isa for isa in integer_isas() if isa == "avx512_vnni")


@functools.cache
def kernels() -> AttentionBytes | str:
    """The kernel that this machine runs, or why there is none."""
    return best_of(AttentionBytes, isas()) if isas() else "this processor has no AVX512-VNNI"


def fallback_reason() -> str | None:
    """Why torch computes these attentions; None where the kernel does."""
    return why_torch(kernels())


def told() -> str:
    """Whose kernel computes these attentions here, for a report."""
    return whose(kernels())


class AttentionBytes(exact.AttentionRows):
    """The compiled kernel."""

    source = Path(__file__).with_name("int8_attention.cpp")
    names: ClassVar = {torch.float32: "int8_attention"}

    def objection(self) -> str | None:
        """None, or that a result is further from the definition than weights that are rounded the other way:
        rests of tiles, groups, masks of bools and of numbers, a row that sees nothing.
        """
        wave = lambda step, *shape: (torch.arange(math.prod(shape)) * step).sin().view(shape)  # noqa: E731
        query, key, value = wave(0.7, 2, 4, 61, 42), wave(0.3, 2, 2, 230, 42), wave(0.9, 2, 2, 230, 24)
        seen = torch.arange(2 * 61 * 230).view(2, 1, 61, 230) % 7 != 3
        seen[0, 0, 5] = False
        for mask, causal in ((None, False), (None, True), (seen, False), (wave(0.5, 2, 4, 61, 230), False)):
            found = self.attention(query, key, value, mask, causal, 0.3)
            right = by_torch(query, key, value, mask, causal, 0.3)
            if not torch.allclose(found, right, rtol=0, atol=2e-3):
                return f"the compiled {self.isa} kernel gave a wrong attention by products of bytes"
        return None


def _codes(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Codes of at most 127 along an axis, and their scales; NaN where a number is none."""
    largest = x.abs().amax(axis, keepdim=True)
    some = (largest > 1e-30) & largest.isfinite()
    scale = torch.where(largest.isfinite(), torch.where(some, largest / _CODE, 0.0), torch.nan)
    inverse = torch.where(some, _CODE / largest, 0.0)
    return torch.where(some, (x * inverse).round(), 0.0), scale


def _weights(t: Tensor) -> Tensor:
    """255 · 2^t, rounded, for t of at most 0: by the kernel's polynomial of the fraction, so to the same code
    but where that is half way between two.
    """
    whole = t.floor()
    f, p = (t - whole).masked_fill(t.isinf(), 0.0).double(), torch.zeros((), dtype=torch.float64)
    for factor in _POWERS:
        p = p * f + factor * _WEIGHT
    return (p * whole.double().exp2()).round().float()


def by_torch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """The definition, heads side by side: products in float64, which holds their sums."""
    shared = query.shape[1] // key.shape[1]
    key, value = (each.float().repeat_interleave(shared, 1) for each in (key, value))
    factor = (query.shape[3] ** -0.5 if scale is None else scale) * _LOG2_E
    (q, of_q), (k, of_k), (v, of_v) = _codes(query.float(), 3), _codes(key, 3), _codes(value, 2)
    scores = (q.double() @ k.double().mT).float() * (of_k * factor).mT
    hidden = torch.zeros((), dtype=torch.bool, device=query.device)
    if is_causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device).triu(1)
    if mask is not None and mask.dtype is torch.bool:
        hidden = hidden | ~mask
    if mask is not None or is_causal:
        added = 0.0 if mask is None or mask.dtype is torch.bool else mask
        scores, of_q = (
            (scores * (of_q / _LOG2_E) + added).masked_fill(hidden, -torch.inf),
            torch.where(of_q.isnan(), of_q, _LOG2_E),
        )
    most = scores.amax(-1, keepdim=True)
    weights = _weights((scores - most.masked_fill(most == -torch.inf, 0.0)) * of_q)
    sums = weights.sum(-1, keepdim=True)
    made = (weights.double() @ v.double()).float() * (of_v / sums)
    made = made.masked_fill(sums == 0, 0.0).masked_fill(of_k.isnan().any(2, keepdim=True), torch.nan)
    return made.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)


def int8_attention_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """(B, H, S, E), for query (B, H, S, D), key (B, G, K, D) and value (B, G, K, E) with H a multiple of G.

    `mask`, `is_causal` as of `fp32_attention`. A query that sees nothing gets zeros; where a number of a
    query, of any key or of a column of values is none, so are its results, all of them, those of the column.
    """
    found = kernels() if key.shape[2] <= _MOST_KEYS else "there are too many keys for sums of 32 bits"
    if isinstance(found, str):
        warn_of_torch("Attentions by products of bytes", found)
    made = exact.by_kernel(found, query, key, value, mask, is_causal, scale)
    return by_torch(query, key, value, mask, is_causal, scale) if made is None else made


_LIBRARY.impl("int8_attention", int8_attention_on_cpu, "CPU")
int8_attention = torch.ops.effcompile.int8_attention


class HeldBytes(exact.HeldAttention):
    """`int8_attention` of heads that lie side by side in what linears made: a step of a tape (tape.py)."""

    __name__ = "int8_attention"
    _run, _kernels = staticmethod(int8_attention_on_cpu), staticmethod(kernels)

    def told(
        self, threads: int, query: TapeValue, key: TapeValue, value: TapeValue, mask: TapeValue | None = None
    ) -> KernelTold | None:
        fits = key.shape[1] <= _MOST_KEYS
        return super().told(threads, query, key, value, mask) if fits else None


@torch.library.register_fake("effcompile::int8_attention", lib=_LIBRARY)
def _(query, key, value, mask=None, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    batch, heads, rows, _ = query.shape
    return query.new_empty((batch, rows, heads, value.shape[3])).transpose(1, 2)


@register_flop_formula(torch.ops.effcompile.int8_attention)
def _flops(query_shape: Shape, key_shape: Shape, value_shape: Shape, *args: object, **kwargs: object) -> int:
    return exact.flops(query_shape, key_shape, value_shape)


def workspace_bytes(name: str, args: object) -> int | None:
    """Bytes alive inside this operator beyond its inputs and outputs; None for other operators.

    By torch: scores several times over, in float64 too.
    """
    if name != "effcompile::int8_attention" or not isinstance(args, (list, tuple)):
        return None
    query, key, value = args[:3]
    mask = args[3] if len(args) > 3 and isinstance(args[3], Tensor) else None
    found = exact.by_kernel_bytes(kernels(), query, key, value, mask)
    if found is not None:
        return found
    batch, heads, queries, width = map(int, query.shape)
    keys, wide = int(key.shape[2]), int(value.shape[3])
    return 8 * batch * heads * (4 * queries * keys + 4 * (queries + keys) * (width + wide))
