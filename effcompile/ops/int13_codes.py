"""Weights and activations as codes of 13 bits, in torch: what the compiled linears (`int13_linear.cpp`)
compute, but for the order of sums in fp32.

    scale = max |x| of the row / 4095        code = round(x · (4095 / max |x|))
    y = (codes · codesᵀ) · (scale of x · scale of W) + bias

Legend: x (M, K), W (N, K), packed (⌈N/16⌉, ⌈K/2⌉, 16, 2) of s16.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.ops.int8_codes import product_by_torch, row_codes

__all__ = ["MOST", "linear_by_torch", "pack", "quantize", "unpack"]

#: Magnitude of the largest code: 64 times two products of such do not overflow 32 bits.
MOST = 4095


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes (N, K) of s16, scales (N)) of a weight; a row of zeros has the scale 0."""
    codes, scales = row_codes(weight.float(), MOST)
    return codes.to(torch.int16), scales.flatten()


def pack(codes: Tensor) -> Tensor:
    """s16 codes (N, K) in the order in which the kernels read them."""
    n, k = codes.shape
    padded = F.pad(codes, (0, -k % 2, 0, -n % 16))
    return padded.reshape(-1, 16, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()


def unpack(packed: Tensor, n: int, k: int) -> Tensor:
    """The inverse."""
    return packed.transpose(1, 2).reshape(16 * packed.shape[0], -1)[:n, :k]


def linear_by_torch(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, after: str) -> Tensor:
    """What the kernels compute, slowly."""
    return product_by_torch(x, unpack(weight, scales.shape[0], x.shape[-1]), scales, bias, after, MOST)
