"""Formats and sizes of the sparse forms of a weight: blocks that are kept, single weights, or two of every
four.

The passes that plan a form and the backends that find it in what they built make its format by the same rule,
from the kept blocks. Legend: weight (N, K), block side b, kept (R, C) = (N / b, K / b) bool.
"""

from __future__ import annotations

from torch import Tensor

from effcompile.ir.formats import TWO_OF_FOUR, WeightFormat, sparse_format

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
