"""Norms over rows as steps of a tape (tape.py)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from effcompile.ops import rows_native, tape
from effcompile.ops.add_norm import add_layer_norm_on_cpu
from effcompile.ops.int8_mlp import address
from effcompile.ops.tape import Result, Second, Told, Value


class HeldNorm:
    """LayerNorm over the last axis, of a value or of a sum of two."""

    __name__, pair = "layer_norm", False

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


class HeldRmsNorm:
    """`rms_norm` with its residual sum, which it makes too, or `rms_norm_alone`."""

    def __init__(self, weight: Tensor, eps: float, *, pair: bool) -> None:
        self._weight, self._eps, self.pair = weight, eps, pair
        self.__name__ = "rms_norm" if pair else "rms_norm_alone"

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """(..., N), as x and residual are."""
        if self.pair:
            return rows_native.rms_norm(x, residual, self._weight, self._eps)
        return rows_native.rms_norm_alone(x, self._weight, self._eps)

    def told(self, threads: int, x: Value, residual: Value | None = None) -> Told | None:
        kernels, n = rows_native.kernels(), x.shape[-1]
        alike = x.dense and (residual is None or (residual.dense and residual.shape == x.shape))
        if isinstance(kernels, str) or not alike or not _is_row(self._weight, n):
            return None
        rows, second = math.prod(x.shape[:-1]), Second if self.pair else None
        arguments = (x, residual, self._weight.data_ptr(), rows, n, Result, second, threads)
        return Told(
            kind=tape.RMS_NORM, function=kernels.norm, arguments=arguments, shape=x.shape,
            second=x.shape if self.pair else None, number=self._eps,
        )  # fmt: skip
