"""Which float32 linears run on weights that are packed, by oneDNN or for our kernel, and which as torch runs
them: measured, once for each shape.
"""

from __future__ import annotations

import functools
from time import perf_counter
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from effcompile.core import torch_compat
from effcompile.machine import huge_pages
from effcompile.ops import fp32_linear

Packing = Literal["none", "oneDNN", "ours"]
#: Below this many rows MKL's unpacked product is faster than oneDNN's packed one (768×3072, Zen 4: 0.17
#: against 0.20 ms at 1 row).
ROWS = 4
#: Up to so many rows regions read plain weights (regions.py).
_FEW = 8
#: What is timed has at most so many rows and bytes of a weight, from which on times are in proportion.
_MOST_ROWS, _MOST_BYTES = 1024, 8 << 20
#: A part of a weight is so many columns, or a multiple: an odd number would favour one of both.
_WHOLE = 64
#: Weights of either kind together, so that none is in the cache when its turn comes, as in a model of many
#: layers; and at most so many.
_ALL_BYTES, _MOST_COPIES = 24 << 20, 8
_ROUNDS = 3
#: Packed only where that takes less than this part of the time: the plain weight is there anyway, and a copy
#: of all costs its bytes.
_GAIN = 0.95


def packing(m: int, k: int, n: int, *, ours: bool) -> Packing:
    """How the weight lies that the product of (m, k) by (k, n) is fastest on here, by torch's present number
    of threads; `ours`: whether our kernel is one of the ways.

    torch's own product is MKL's where torch has it. On an AMD EPYC (Zen 3, AVX2) a BERT of two layers 768
    wide took 0.87 to 0.92 of the time with oneDNN's (128 and 512 tokens, one thread; with two threads 0.90 to
    1.14); on Zen 4 oneDNN's was the faster one.
    """
    ways = list[Packing](["oneDNN"] * torch_compat.has_onednn())
    if ours and m > _FEW and not isinstance(fp32_linear.kernels(), str):
        ways.append("ours")
    if m < ROWS or not ways:
        return "none"
    rows, most = min(1 << (m - 1).bit_length(), _MOST_ROWS), max(_MOST_BYTES // (4 * k), 1)
    part = min(n, most - most % _WHOLE or most)
    return _fastest(rows, k, part, torch.get_num_threads(), tuple(ways))


def packed(way: Packing, weight: Tensor, m: int) -> Tensor:
    """A weight (N, K) as the product of m rows wants it."""
    if way == "ours":
        return fp32_linear.fp32_pack(weight)
    return torch.ops.mkldnn._reorder_linear_weight(weight, m) if way == "oneDNN" else weight


def product(way: Packing, x: Tensor, held: Tensor, bias: Tensor) -> Tensor:
    """x Wᵀ + bias, of a weight that is packed so."""
    if way == "ours":
        return fp32_linear.fp32_linear_on_cpu(x, held, len(bias), bias)
    if way == "oneDNN":
        return torch.ops.mkldnn._linear_pointwise.default(x, held, bias, "none", [], "")
    return F.linear(x, held, bias)


@functools.cache
def _fastest(m: int, k: int, n: int, threads: int, ways: tuple[Packing, ...]) -> Packing:
    with torch.no_grad(), torch.device("cpu"):
        x, bias = torch.ones(m, k), torch.ones(n)
        plain = [torch.ones(n, k) for _ in range(max(1, min(_MOST_COPIES, _ALL_BYTES // (4 * n * k))))]
        held = {way: [packed(way, weight, m) for weight in plain] for way in ("none", *ways)}
        huge_pages.move(held.get("ours", ()))
        best = dict.fromkeys(held, float("inf"))
        for _ in range(_ROUNDS):  # in turn, so that what else runs here slows all
            for way, weights in held.items():
                start = perf_counter()
                for weight in weights:
                    product(way, x, weight, bias)
                best[way] = min(best[way], perf_counter() - start)
    fastest = min(ways, key=lambda way: best[way])
    return fastest if best[fastest] < _GAIN * best["none"] else "none"
