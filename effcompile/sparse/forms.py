"""Formats and sizes of the sparse forms of a weight: blocks that are kept, single weights, or two of every
four.

The passes that plan a form and the backends that find it in what they built make its format by the same rule,
from the kept blocks. Legend: weight (N, K), block side b, kept (R, C) = (N / b, K / b) bool.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.ir.formats import TWO_OF_FOUR, WeightFormat, sparse_format
from effcompile.ops.sparse_codes import LANES, QUAD

_INDEX_BYTES = 4


def pattern_format(kept: Tensor, block: int) -> WeightFormat:
    """The format of a pattern; 2:4 where every four neighbours of a row keep exactly two."""
    if block == 1 and kept.shape[1] % 4 == 0 and bool((kept.reshape(-1, 4).sum(1) == 2).all()):
        return TWO_OF_FOUR
    return sparse_format(int(kept.sum()), kept.numel(), block)


def stored_bytes(kept: int, block: int, rows: int, cols: int, itemsize: int = 4) -> int:
    """Bytes of the values and of the five index tensors of `BlockPattern` for a weight (rows, cols)."""
    pointers = rows // block + cols // block + 2
    return kept * (block * block * itemsize + 3 * _INDEX_BYTES) + pointers * _INDEX_BYTES


def coded_bytes(kept: Tensor, block: int) -> int:
    """Bytes of such a weight as `SparseCodes` with scales, at most: a kept block may be all 0."""
    entries = kept.repeat_interleave(block, 0).repeat_interleave(block, 1) if block < LANES else kept
    n, k = (size * block for size in kept.shape)
    if block < LANES:
        padded = F.pad(entries, (0, -k % QUAD, 0, -n % LANES))
        quads = int(padded.unflatten(0, (-1, LANES)).unflatten(2, (-1, QUAD)).any(3).any(1).sum())
    else:
        quads = int(kept.sum()) * (block // LANES) * (block // QUAD)
    strips = -(-n // LANES)
    return quads * (LANES * QUAD + _INDEX_BYTES) + (strips + 1 + strips * LANES + n) * 4
