"""Ready-made ways to multiply by a block-sparse weight on a CPU. Nothing of ours is in here.

y = x Wᵀ for x (M, K), W (N, K). Those that want x transposed get it transposed for nothing, and may return
yᵀ: their figures are better than what a model would see, which pays for both transpositions. `F.linear` with
a BSR weight is as a user writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Way = Callable[[], Any]


def dense_ways(x: Tensor, weight: Tensor) -> dict[str, Way]:
    """The weight as it is: as a user writes it, and with the weight packed once for oneDNN (what effcompile's
    torch backend does).
    """
    ways: dict[str, Way] = {"dense F.linear": lambda: torch.nn.functional.linear(x, weight)}
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0])
        ways["dense, packed for oneDNN"] = lambda: torch.ops.mkldnn._linear_pointwise(
            x, packed, None, "none", [], ""
        )
    except (AttributeError, RuntimeError):  # a build of torch without oneDNN
        pass
    return ways


def sparse_ways(x: Tensor, weight: Tensor, kept: Tensor, block: int) -> dict[str, Way]:
    """`kept`: Boolean (N/b, K/b), the blocks of the weight that are not 0."""
    turned = x.T.contiguous()
    ways = _compressed_rows(x, turned, weight, block) | _scipy(turned, weight, block)
    if block >= 4:
        ways |= _gathered(turned, weight, kept, block)
    return ways


def _compressed_rows(x: Tensor, turned: Tensor, weight: Tensor, block: int) -> dict[str, Way]:
    csr = weight.to_sparse_csr()
    ways: dict[str, Way] = {"torch CSR @ xᵀ": lambda: csr @ turned}
    if block > 1:
        bsr = weight.to_sparse_bsr((block, block))
        ways["torch BSR @ xᵀ"] = lambda: bsr @ turned
        ways["F.linear(x, BSR)"] = lambda: torch.nn.functional.linear(x, bsr)
    return ways


def _scipy(turned: Tensor, weight: Tensor, block: int) -> dict[str, Way]:
    try:
        import scipy.sparse
    except ImportError:
        return {}
    array = turned.numpy()
    csr = scipy.sparse.csr_matrix(weight.numpy())
    ways: dict[str, Way] = {"scipy CSR @ xᵀ": lambda: csr @ array}
    if block > 1:
        bsr = scipy.sparse.bsr_matrix(weight.numpy(), blocksize=(block, block))
        ways["scipy BSR @ xᵀ"] = lambda: bsr @ array
    return ways


def _gathered(turned: Tensor, weight: Tensor, kept: Tensor, block: int) -> dict[str, Way]:
    """One bmm over all blocks, summed by index; and one bmm over block rows, those with fewer blocks filled
    up with zeros.
    """
    rows, cols = kept.shape
    r, c = kept.nonzero(as_tuple=True)
    values = weight.view(rows, block, cols, block).transpose(1, 2)[r, c].contiguous()
    by_block = turned.view(cols, block, -1)
    most = int(kept.sum(1).max())
    place = torch.cat([torch.arange(int(n)) for n in kept.sum(1)])
    filled, source = values.new_zeros(rows, most, block, block), torch.zeros(rows, most, dtype=torch.long)
    filled[r, place], source[r, place] = values, c
    wide = filled.transpose(1, 2).reshape(rows, block, most * block).contiguous()

    def by_index() -> Tensor:
        return torch.zeros(rows, block, turned.shape[1]).index_add_(0, r, torch.bmm(values, by_block[c]))

    def by_row() -> Tensor:
        return torch.bmm(wide, by_block[source.view(-1)].view(rows, most * block, -1))

    return {"gather + bmm + index_add": by_index, "gather + bmm per row": by_row}
