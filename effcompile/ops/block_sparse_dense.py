"""The block-sparse products by torch, with the whole weight or its whole gradient: where there are no
kernels, and to check them by.

Legend as in `block_sparse.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense_weight(values: Tensor, crow: Tensor, col: Tensor, cols: int) -> Tensor:
    """W (N, K) of values (Z, b, b)."""
    b, used = values.shape[1], int(crow[-1])
    blocks = values.new_zeros(crow.shape[0] - 1, cols // b, b, b)
    blocks.index_put_((_block_rows(crow), col[:used].long()), values[:used], accumulate=True)
    return blocks.transpose(1, 2).reshape(-1, cols)


def sampled_gradient(grad: Tensor, x: Tensor, crow: Tensor, col: Tensor, b: int) -> Tensor:
    """dvalues (Z, b, b), picked from dyᵀ x."""
    whole = grad.reshape(-1, grad.shape[-1]).T @ x.reshape(-1, x.shape[-1])
    used = int(crow[-1])
    found = x.new_zeros(col.shape[0], b, b)
    found[:used] = (
        whole.unflatten(0, (-1, b))
        .unflatten(2, (-1, b))
        .transpose(1, 2)[_block_rows(crow), col[:used].long()]
    )
    return found


def _block_rows(crow: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(crow.shape[0] - 1, device=crow.device), crow.diff().long())
