"""Which float32 linears run on weights in oneDNN's layout, and which as torch runs them: measured, once for
each shape.
"""

from __future__ import annotations

import functools
from time import perf_counter

import torch
import torch.nn.functional as F  # noqa: N812

from effcompile.core import torch_compat

#: Below this many rows MKL's unpacked product is faster than oneDNN's packed one (768×3072, Zen 4: 0.17
#: against 0.20 ms at 1 row).
ROWS = 4
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


def packs(m: int, k: int, n: int) -> bool:
    """Whether the product of (m, k) by (k, n) is faster on a packed weight here, by torch's present number of
    threads.

    torch's own product is MKL's where torch has it. On an AMD EPYC (Zen 3, AVX2) a BERT of two layers 768
    wide took 0.87 to 0.92 of the time with it (128 and 512 tokens, one thread; with two threads 0.90 to
    1.14); on Zen 4 oneDNN's was the faster one.
    """
    if m < ROWS or not torch_compat.has_onednn():
        return False
    rows, most = min(1 << (m - 1).bit_length(), _MOST_ROWS), max(_MOST_BYTES // (4 * k), 1)
    return _packed_is_faster(rows, k, min(n, most - most % _WHOLE or most), torch.get_num_threads())


@functools.cache
def _packed_is_faster(m: int, k: int, n: int, threads: int) -> bool:
    with torch.no_grad(), torch.device("cpu"):
        x, bias, product = torch.ones(m, k), torch.ones(n), torch.ops.mkldnn._linear_pointwise.default
        plain = [torch.ones(n, k) for _ in range(max(1, min(_MOST_COPIES, _ALL_BYTES // (4 * n * k))))]
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, m) for weight in plain]
        bodies = (
            lambda: [product(x, weight, bias, "none", [], "") for weight in packed],
            lambda: [F.linear(x, weight, bias) for weight in plain],
        )
        best = [float("inf")] * 2
        for _ in range(_ROUNDS):  # in turn, so that what else runs here slows both
            for at, body in enumerate(bodies):
                start = perf_counter()
                body()
                best[at] = min(best[at], perf_counter() - start)
    return best[0] < _GAIN * best[1]
