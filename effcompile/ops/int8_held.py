"""Linears and MLPs in 8 bits, and linears in 13, of weights that stay, as steps of a tape (tape.py): what
fits of the weights is asked once for a shape, and so is what the kernel is told of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from effcompile.ops import int8_codes, int8_mlp, int8_native, int13_linear, tape
from effcompile.ops.int8_linear import fits, int8_linear_on_cpu
from effcompile.ops.int8_mlp import Linear, address
from effcompile.ops.tape import Argument, KernelTold, Made, Scratch, TapeValue


class HeldLinear:
    """`int8_linear` of one weight; its result is in fp32 or, if `narrow`, in bf16."""

    __name__, pair = "int8_linear", False

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        after: str = "none",
        narrow: bool = False,
    ) -> None:
        self._linear, self._after, self._narrow = (weight, scales, bias), after, narrow

    def __call__(self, x: Tensor) -> Tensor:
        """(..., N), for x (..., K)."""
        return int8_linear_on_cpu(x, *self._linear, self._after, self._narrow)

    def told(self, threads: int, x: TapeValue) -> KernelTold | None:
        rows, k, n = math.prod(x.shape[:-1]), x.shape[-1], int(self._linear[1].shape[0])
        kernels = self._kernels(k)
        if kernels is None or not rows or not x.dense:
            return None
        room = kernels.room_of(rows, k)
        codes, scales, sums = map(Scratch, room.addresses(0))
        arguments = (
            x, k, rows, k, *_addresses(self._linear), n, int8_codes.AFTER.index(self._after), Made, codes,
            scales, sums, kernels.chunk(room), threads,
        )  # fmt: skip
        call, dtype = (kernels.narrow, torch.bfloat16) if self._narrow else (kernels.call, torch.float32)
        return KernelTold(
            kind=tape.LINEAR, function=call, arguments=arguments, shape=(*x.shape[:-1], n), dtype=dtype,
            scratch=room.nbytes,
        )  # fmt: skip

    def _kernels(self, k: int) -> int8_native.ByteKernels | None:
        """Those that take what is held, of k columns."""
        found = int8_native.kernels()
        return None if isinstance(found, str) or not _fits(k, self._linear) else found


class HeldWords(HeldLinear):
    """`int13_linear` of one weight."""

    __name__ = "int13_linear"

    def __call__(self, x: Tensor) -> Tensor:
        """(..., N), for x (..., K)."""
        return int13_linear.int13_linear_on_cpu(x, *self._linear, self._after)

    def _kernels(self, k: int) -> int8_native.ByteKernels | None:
        found = int13_linear.kernels()
        return None if isinstance(found, str) or not _fits(k, self._linear, int13_linear.fits) else found


class HeldMlp:
    """`int8_mlp`, and without a first linear `int8_linear_residual`, of weights that stay."""

    __name__, pair = "int8_mlp", False

    def __init__(
        self,
        first: Linear | None,
        after: str,
        last: Linear,
        norm: tuple[Tensor | None, Tensor | None, float | None] = (None, None, None),
    ) -> None:
        self._first, self._after, self._last, self._norm = first, after, last, norm

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """(..., N), for x (..., K) and a residual (..., N)."""
        return int8_mlp.run(x, self._first, self._after, self._last, (residual, *self._norm))

    def told(self, threads: int, x: TapeValue, residual: TapeValue | None = None) -> KernelTold | None:
        kernels, n = int8_mlp.kernels(), int(self._last[1].shape[0])
        rows, k, shape = math.prod(x.shape[:-1]), x.shape[-1], (*x.shape[:-1], n)
        if isinstance(kernels, str) or not (int8_mlp.pays(rows) and x.dense and self._fits(k, n)):
            return None
        if residual is not None and not (residual.dense and residual.shape == shape):
            return None
        between, (weight, bias, eps) = 0 if self._first is None else int(self._first[1].shape[0]), self._norm
        arguments = (
            x, k, rows, k, *_addresses(self._first), between, int8_codes.AFTER.index(self._after),
            *_addresses(self._last), n, residual, int(eps is not None), address(weight), address(bias),
            Made, Scratch(), kernels.at_once(rows, between), threads,
        )  # fmt: skip
        return KernelTold(
            kind=tape.MLP, function=kernels.call, arguments=arguments, shape=shape,
            scratch=kernels.room(rows, k, between), number=eps or 0.0,
        )  # fmt: skip

    def _fits(self, k: int, n: int) -> bool:
        """Whether the kernel takes what is held, of k columns."""
        between = k if self._first is None else int(self._first[1].shape[0])
        held = _fits(between, self._last) and (self._first is None or _fits(k, self._first))
        return held and all(
            each is None or (each.shape == (n,) and _is_plain(each)) for each in self._norm[:2]
        )


def _fits(k: int, linear: Linear, fitting: Callable[..., bool] = fits) -> bool:
    return fitting(k, *linear) and (linear[2] is None or _is_plain(linear[2]))


def _is_plain(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_contiguous()


def _addresses(linear: Linear | None) -> tuple[Argument, Argument, Argument]:
    if linear is None:
        return None, None, None
    weight, scales, bias = linear
    return weight.data_ptr(), scales.data_ptr(), address(bias)
