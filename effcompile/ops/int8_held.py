"""Linears and MLPs in 8 bits of weights that stay, called again and again: what fits of these is asked at the
first call of a shape, and what the kernel is told of that shape is kept.

A call takes 7 to 11 µs of Python instead of 14 to 29 (an Intel Xeon), and two to three times as
long behind a product that pushed all of Python's code out of the caches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effcompile.ops import int8_codes, int8_mlp, int8_native
from effcompile.ops.instruction_sets import at_line
from effcompile.ops.int8_linear import int8_linear_on_cpu
from effcompile.ops.int8_mlp import Linear, address

#: Shapes of which something is kept.
_SHAPES = 64

#: The result's shape, rows and columns of x, the bytes of the workspace, and what else a kernel has to know.
Told = tuple[tuple[int, ...], int, int, int, tuple[int, ...]]


class HeldLinear:
    """`int8_linear` of one weight."""

    def __init__(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None = None, after: str = "none"
    ) -> None:
        self._linear, self._after = (weight, scales, bias), after
        self._told: dict[tuple[torch.Size, int], Told] = {}
        self.__name__ = "int8_linear"

    def __call__(self, x: Tensor) -> Tensor:
        """(..., N), for x (..., K)."""
        threads = torch.get_num_threads()
        told = self._told.get((x.shape, threads))
        kernels = int8_native.kernels()
        if told is None or isinstance(kernels, str) or not _is_plain(x):
            return self._at_first(x, threads)
        shape, rows, k, nbytes, (n, after, scales_at, sums_at, chunk) = told
        made, workspace = x.new_empty(shape), torch.empty(nbytes, dtype=torch.uint8)
        start = workspace.data_ptr()
        kernels.call(
            x.data_ptr(), k, rows, k, *_addresses(self._linear), n, after, made.data_ptr(), start,
            start + scales_at, start + sums_at, chunk, threads,
        )  # fmt: skip
        return made

    def _at_first(self, x: Tensor, threads: int) -> Tensor:
        made = int8_linear_on_cpu(x, *self._linear, self._after)
        kernels, (_, _, bias) = int8_native.kernels(), self._linear
        if (
            not isinstance(kernels, str)
            and x.numel() > 0
            and _is_plain(x)
            and (bias is None or _is_plain(bias))
        ):
            room = kernels.room(x)
            _, scales_at, sums_at = room.addresses(0)
            after, n = int8_codes.AFTER.index(self._after), int(made.shape[-1])
            others = (n, after, scales_at, sums_at, kernels.chunk(room))
            told = tuple(made.shape), room.rows, int(x.shape[-1]), room.nbytes, others
            _keep(self._told, (x.shape, threads), told)
        return made


class HeldMlp:
    """`int8_mlp`, and without a first linear `int8_linear_residual`, of weights that stay."""

    def __init__(
        self,
        first: Linear | None,
        after: str,
        last: Linear,
        norm: tuple[Tensor | None, Tensor | None, float | None] = (None, None, None),
    ) -> None:
        self._first, self._after, self._last, self._norm = first, after, last, norm
        self._told: dict[tuple[torch.Size, int], Told] = {}
        self.__name__ = "int8_linear_residual" if first is None else "int8_mlp"

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """(..., N), for x (..., K) and a residual (..., N)."""
        threads = torch.get_num_threads()
        told = self._told.get((x.shape, threads))
        kernels = int8_mlp.kernels()
        if told is None or isinstance(kernels, str) or not _is_plain(x):
            return self._at_first(x, residual, threads)
        shape, rows, k, nbytes, (n, between, after, at_once) = told
        if residual is not None and not (residual.shape == shape and _is_plain(residual)):
            return self._at_first(x, residual, threads)
        weight, bias, eps = self._norm
        made, scratch = x.new_empty(shape), torch.empty(nbytes, dtype=torch.uint8)
        kernels.call(
            x.data_ptr(), k, rows, k, *_addresses(self._first), between, after, *_addresses(self._last), n,
            address(residual), eps is not None, address(weight), address(bias), eps or 0.0, made.data_ptr(),
            at_line(scratch), at_once, threads,
        )  # fmt: skip
        return made

    def _at_first(self, x: Tensor, residual: Tensor | None, threads: int) -> Tensor:
        behind = (residual, *self._norm)
        made = int8_mlp.run(x, self._first, self._after, self._last, behind)
        kernels = int8_mlp.kernels()
        k, n = int(x.shape[-1]), int(made.shape[-1])
        rows, between = int(made.numel()) // n, 0 if self._first is None else int(self._first[1].shape[0])
        if (
            not isinstance(kernels, str)
            and int8_mlp.pays(rows)
            and int8_mlp.fits(x, self._first, self._last, behind)
            and _is_plain(x)
        ):
            others = (n, between, int8_codes.AFTER.index(self._after), kernels.at_once(rows, between))
            told = tuple(made.shape), rows, k, kernels.room(rows, k, between), others
            _keep(self._told, (x.shape, threads), told)
        return made


def _keep(told: dict[tuple[torch.Size, int], Told], shape: tuple[torch.Size, int], new: Told) -> None:
    if len(told) >= _SHAPES:
        told.clear()
    told[shape] = new


def _is_plain(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_contiguous()


def _addresses(linear: Linear | None) -> tuple[int | None, int | None, int | None]:
    if linear is None:
        return None, None, None
    weight, scales, bias = linear
    return weight.data_ptr(), scales.data_ptr(), address(bias)
