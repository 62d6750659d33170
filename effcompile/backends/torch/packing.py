"""Which float32 linears run on weights that are packed, by oneDNN or for our kernel, and which as torch runs
them: measured, once for each shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from effcompile.backends.torch.regions import FEW
from effcompile.core import torch_compat
from effcompile.core.floats import in_fp32
from effcompile.machine import huge_pages
from effcompile.ops import fp32_linear
from effcompile.ops.fp32_linear import HeldFloats
from effcompile.ops.tape import Tape, TapeStep

Packing = Literal["none", "oneDNN", "ours"]
#: Below this many rows MKL's unpacked product is faster than oneDNN's packed one (768×3072, Zen 4: 0.17
#: against 0.20 ms at 1 row).
ROWS = 4
#: What is timed has at most so many rows and bytes of a weight, from which on times are in proportion.
_MOST_ROWS, _MOST_BYTES = 1024, 8 << 20
#: A part of a weight is so many columns, or a multiple: an odd number would favour one of both.
_WHOLE = 64
#: Weights of either kind together, so that none is in the cache when its turn comes, as in a model of many
#: layers; and at most so many. Of more rows than these fewer: a product takes longer than to read a weight.
_ALL_BYTES, _MOST_COPIES, _MANY = 24 << 20, 8, 256
_ROUNDS = 3
#: Twice as many again where the second best is within this share of the best.
_CLOSE = 1.15
#: What times are multiplied with: the plain weight is there anyway, and a copy of all for oneDNN costs its
#: bytes; ours saves what torch does around a product, as norms and attentions behind it are then of one tape.
_COUNTED: dict[Packing, float] = {"none": 0.95, "oneDNN": 1.0, "ours": 0.95}


def packing(m: int, k: int, n: int, *, ours: bool) -> Packing:
    """How the weight lies that the product of (m, k) by (k, n) is fastest on here, by torch's present number
    of threads; `ours`: whether our kernel is one of the ways.

    torch's own product is MKL's where torch has it. On an AMD EPYC (Zen 3, AVX2) a BERT of two layers 768
    wide took 0.87 to 0.92 of the time with oneDNN's (128 and 512 tokens, one thread; with two threads 0.90 to
    1.14); on Zen 4 oneDNN's was the faster one.
    """
    ways = list[Packing](["oneDNN"] * torch_compat.has_onednn())
    if ours and m > FEW and not isinstance(fp32_linear.kernels(), str):
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
@in_fp32()
def _fastest(m: int, k: int, n: int, threads: int, ways: tuple[Packing, ...]) -> Packing:
    with torch.no_grad(), torch.device("cpu"):
        x, bias = torch.ones(m, k), torch.ones(n)
        copies = min(_MOST_COPIES, _ALL_BYTES * _MANY // (4 * n * k * max(m, _MANY)))
        plain = [torch.ones(n, k) for _ in range(max(1, copies))]
        bodies = {
            way: multiplied(way, x, [packed(way, weight, m) for weight in plain], bias)
            for way in ("none", *ways)
        }
        best = dict.fromkeys(bodies, float("inf"))
        for done in range(3 * _ROUNDS):
            if done == _ROUNDS and not _is_close(best.values()):
                break
            for way, body in bodies.items():  # in turn, so that what else runs here slows all
                start = perf_counter()
                body()
                best[way] = min(best[way], perf_counter() - start)
    return min(best, key=lambda way: _COUNTED[way] * best[way])


def _is_close(seconds: Iterable[float]) -> bool:
    least, second = sorted(seconds)[:2]
    return second < _CLOSE * least


def multiplied(way: Packing, x: Tensor, held: Sequence[Tensor], bias: Tensor) -> Callable[[], object]:
    """All products of x; ours as a model has them."""
    if way != "ours":
        return lambda: [product(way, x, weight, bias) for weight in held]
    huge_pages.move(held)
    tape = Tape([TapeStep(HeldFloats(weight, len(bias), bias), (0,)) for weight in held], 1, [len(held)])
    return lambda: tape(x)
