"""Linears and MLPs in 8 bits, and linears in 13, of weights that stay, as steps of a tape (tape.py): what
fits of the weights is asked once for a shape, and so is what the kernel is told of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from effcompile.ops import int8_codes, int8_mlp, int8_native, int13_linear, tape
from effcompile.ops.held_mlp import HeldMlpOf, MlpCall, is_plain
from effcompile.ops.int8_codes import Linear
from effcompile.ops.int8_linear import fits, int8_linear_on_cpu
from effcompile.ops.int8_mlp import Behind, address
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
            x, k, rows, k, *_addresses(self._linear), n, int8_codes.following(self._after, self._linear),
            Made, codes, scales, sums, kernels.chunk(room), threads,
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


class HeldMlp(HeldMlpOf[Linear]):
    """`int8_mlp`, and without a first linear `int8_linear_residual`, of weights that stay."""

    __name__ = "int8_mlp"

    def _run(self, x: Tensor, behind: Behind) -> Tensor:
        return int8_mlp.run(x, self._first, self._after, self._last, behind)

    def _called(self, rows: int, k: int, between: int, n: int) -> MlpCall | None:
        found = int8_mlp.kernels()
        if isinstance(found, str) or not int8_mlp.pays(rows):
            return None
        return MlpCall(found.call, found.at_once(rows, between), found.room(rows, k, between))

    def _outputs(self, linear: Linear) -> int:
        return int(linear[1].shape[0])

    def _takes(self, k: int, linear: Linear) -> bool:
        return _fits(k, linear)

    def _following(self) -> int:
        return int8_codes.following(self._after, self._last, self._first)

    def _addresses(self, linear: Linear | None) -> tuple[Argument, Argument, Argument]:
        return _addresses(linear)


def _fits(k: int, linear: Linear, fitting: Callable[..., bool] = fits) -> bool:
    return fitting(k, *linear) and (linear[2] is None or is_plain(linear[2]))


def _addresses(linear: Linear | None) -> tuple[Argument, Argument, Argument]:
    if linear is None:
        return None, None, None
    weight, scales, bias = linear
    return weight.data_ptr(), scales.data_ptr(), address(bias)
