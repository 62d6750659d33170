"""Norms over rows as steps of a tape (tape.py)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from effcompile.ops import rows_native, tape
from effcompile.ops.add_norm import add_layer_norm_on_cpu
from effcompile.ops.int8_mlp import address
from effcompile.ops.tape import Result, Told, Value


class HeldNorm:
    """LayerNorm over the last axis, of a value or of a sum of two."""

    __name__ = "layer_norm"

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """(..., N), as x and residual are."""
        if residual is None:
            return torch.layer_norm(x, x.shape[-1:], self._weight, self._bias, self._eps)
        return add_layer_norm_on_cpu(x, residual, self._weight, self._bias, self._eps)

    def told(self, threads: int, x: Value, residual: Value | None = None) -> Told | None:
        kernels, n = rows_native.kernels(), x.shape[-1]
        alike = x.dense and (residual is None or (residual.dense and residual.shape == x.shape))
        if isinstance(kernels, str) or not alike or not self._fits(n):
            return None
        rows = math.prod(x.shape[:-1])
        arguments = (
            x, residual, address(self._weight), address(self._bias), rows, n, Result, threads,
        )  # fmt: skip
        return Told(
            kind=tape.LAYER_NORM, function=kernels.layer_norm, arguments=arguments, shape=x.shape,
            number=self._eps,
        )  # fmt: skip

    def _fits(self, n: int) -> bool:
        return all(_is_row(each, n) for each in (self._weight, self._bias))


def _is_row(held: Tensor | None, n: int) -> bool:
    return held is None or (held.shape == (n,) and held.dtype is torch.float32 and held.is_contiguous())
