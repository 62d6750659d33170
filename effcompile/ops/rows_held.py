"""Norms, sums, gates and rotations over rows as steps of a tape (tape.py)."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from effcompile.ops import rows_native, tape
from effcompile.ops.add_norm import add_layer_norm_on_cpu
from effcompile.ops.int8_mlp import address
from effcompile.ops.tape import KernelTold, Made, Second, TapeValue

_STRIDES = ctypes.c_int64 * 3


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

    def told(self, threads: int, x: TapeValue, residual: TapeValue | None = None) -> KernelTold | None:
        kernels, n = rows_native.kernels(), x.shape[-1]
        alike = x.dense and (residual is None or (residual.dense and residual.shape == x.shape))
        if isinstance(kernels, str) or not alike or not self._fits(n):
            return None
        rows = math.prod(x.shape[:-1])
        arguments = (
            x, residual, address(self._weight), address(self._bias), rows, n, Made, threads,
        )  # fmt: skip
        return KernelTold(
            kind=tape.LAYER_NORM, function=kernels.layer_norm, arguments=arguments, shape=x.shape,
            number=self._eps,
        )  # fmt: skip

    def _fits(self, n: int) -> bool:
        return all(_is_row(each, n) for each in (self._weight, self._bias))


def _is_row(held: Tensor | None, n: int) -> bool:
    return held is None or (held.shape == (n,) and held.dtype is torch.float32 and held.is_contiguous())


class HeldAdd:
    """A sum of two values of one shape, as residuals are."""

    __name__, pair = "add", False

    def __call__(self, x: Tensor, other: Tensor) -> Tensor:
        """(..., N), as both are."""
        return torch.add(x, other)

    def told(self, threads: int, x: TapeValue, other: TapeValue) -> KernelTold | None:
        kernels = rows_native.kernels()
        if isinstance(kernels, str) or not (x.dense and other.dense and x.shape == other.shape):
            return None
        arguments = (x, other, math.prod(x.shape), Made, threads)
        return KernelTold(kind=tape.ADD, function=kernels.add, arguments=arguments, shape=x.shape)


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

    def told(self, threads: int, x: TapeValue, residual: TapeValue | None = None) -> KernelTold | None:
        kernels, n = rows_native.kernels(), x.shape[-1]
        alike = x.dense and (residual is None or (residual.dense and residual.shape == x.shape))
        if isinstance(kernels, str) or not alike or not _is_row(self._weight, n):
            return None
        rows, second = math.prod(x.shape[:-1]), Second if self.pair else None
        arguments = (x, residual, self._weight.data_ptr(), rows, n, Made, second, threads)
        return KernelTold(
            kind=tape.RMS_NORM, function=kernels.norm, arguments=arguments, shape=x.shape,
            second=x.shape if self.pair else None, number=self._eps,
        )  # fmt: skip


class HeldGate:
    """`swiglu`."""

    __name__, pair = "swiglu", False

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """(..., N), as gate and up are."""
        return rows_native.swiglu(gate, up)

    def told(self, threads: int, gate: TapeValue, up: TapeValue) -> KernelTold | None:
        kernels, given = rows_native.kernels(), (gate, up)
        apart = [rows_native.rows_apart(each.shape, each.strides) for each in given]
        whole = gate.shape == up.shape and all(each.dtype is torch.float32 for each in given)
        if isinstance(kernels, str) or None in apart or not whole:
            return None
        rows, n = math.prod(gate.shape[:-1]), gate.shape[-1]
        arguments = (gate, apart[0], up, apart[1], rows, n, Made, threads)
        return KernelTold(kind=tape.GATE, function=kernels.gate, arguments=arguments, shape=gate.shape)


class HeldTurn:
    """`rotary` of heads that lie side by side."""

    __name__, pair = "rotary", False

    def __init__(self, heads: int, width: int) -> None:
        self._heads, self._width = heads, width

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, S, H·D), for x (B, S, H·D), cos and sin (B or 1, S, D)."""
        heads = x.unflatten(-1, (self._heads, self._width)).transpose(1, 2)
        return rows_native.rotary(heads, cos, sin).transpose(1, 2).flatten(2)

    def told(self, threads: int, x: TapeValue, cos: TapeValue, sin: TapeValue) -> KernelTold | None:
        kernels, width = rows_native.kernels(), self._width
        if len(x.shape) != 3 or x.strides[2] != 1 or x.dtype is not torch.float32 or width % 2:
            return None
        batch, rows, columns = x.shape
        fits = cos.shape == sin.shape and cos.shape in ((1, rows, width), (batch, rows, width))
        if isinstance(kernels, str) or not (fits and cos.dense and sin.dense):
            return None
        of_x = _STRIDES(x.strides[0], width, x.strides[1])
        of_y = _STRIDES(rows * columns, width, columns)
        arguments = (
            x, cos, sin, batch, self._heads, rows, width // 2, ctypes.addressof(of_x), ctypes.addressof(of_y),
            0 if cos.shape[0] == 1 else rows * width, Made, threads,
        )  # fmt: skip
        return KernelTold(
            kind=tape.TURN, function=kernels.turn, arguments=arguments, shape=x.shape, keeps=(of_x, of_y)
        )
