"""Names and sizes of the sparse forms of a weight: `sparse16@0.90`, `unstructured@0.90`, `2:4`.

The passes that plan a form and the backends that find it in what they built name it by the same rule, from the kept blocks.
Legend: weight (N, K), block side b, kept (R, C) = (N / b, K / b) bool.
"""

from __future__ import annotations

import re

from torch import Tensor

TWO_OF_FOUR = "2:4"
_NAME = re.compile(r"(?:sparse(?P<block>\d+)|unstructured)@[\d.]+")
_INDEX_BYTES = 4


def form_name(kept: Tensor, block: int) -> str:
    """What a pattern is called; `2:4` where every four neighbours of a row keep exactly two."""
    if block == 1 and kept.shape[1] % 4 == 0 and bool((kept.reshape(-1, 4).sum(1) == 2).all()):
        return TWO_OF_FOUR
    return name_of_count(int(kept.sum()), kept.numel(), block)


def name_of_count(kept: int, blocks: int, block: int) -> str:
    """What a pattern of so many of all blocks is called: by its block and its sparsity, two digits, more where nearly all is 0."""
    sparsity = 1 - kept / blocks
    head = "unstructured" if block == 1 else f"sparse{block}"
    return f"{head}@{sparsity:.2f}" if sparsity < 0.99 else f"{head}@{sparsity:.4f}"


def block_of(option: str) -> int | None:
    """The block side of a sparse form; None for the name of anything else."""
    if option == TWO_OF_FOUR:
        return 1
    found = _NAME.fullmatch(option)
    return None if found is None else int(found["block"] or 1)


def stored_bytes(kept: int, block: int, rows: int, cols: int, itemsize: int = 4) -> int:
    """Bytes of the values and of the five index tensors of `BlockPattern` for a weight (rows, cols)."""
    pointers = rows // block + cols // block + 2
    return kept * (block * block * itemsize + 3 * _INDEX_BYTES) + pointers * _INDEX_BYTES
