"""A linear in 8 bits whose weight is mostly zeros: `int8_linear`, of the quads of the weight that are held.

On an x86 or ARM CPU with a C++ compiler the kernels of `int8_sparse.cpp` run; elsewhere torch computes the
same, of a dense copy. Defined without torch.library.custom_op, as `int8_linear` is.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.errors import UsageError
from effcompile.core.types import Shape
from effcompile.machine.instructions import integer_isas
from effcompile.machine.native import library
from effcompile.ops import int8_codes
from effcompile.ops.coded_rows import flat_rows
from effcompile.ops.instruction_sets import ARGUMENT, POINTER, best_of, whose, why_torch
from effcompile.ops.sparse_codes import LANES, SparseCodes

__all__ = ["fallback_reason", "int8_sparse_linear", "told", "workspace_bytes"]

_SOURCE = Path(__file__).with_name("int8_sparse.cpp")
#: Instruction set → words of a vector, rows of the register tile.
_TILES = {
    "avx512_vnni": (16, 14),
    "avx_vnni": (8, 5),
    "avx512": (16, 8),
    "avx2": (8, 4),
    "neon_i8mm": (4, 4),
    "neon_dotprod": (4, 6),
    "neon": (4, 4),
}
#: Rows of x that one core takes at once, and the bytes of their codes at most.
_CHUNK, _CACHE = 56, 1 << 19

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define(
    "int8_sparse_linear(Tensor x, Tensor values, Tensor quads, Tensor starts, Tensor sums, Tensor scales, "
    "int block, int kept, Tensor? bias=None, str after='none') -> Tensor"
)


@functools.cache
def kernels() -> SparseByteKernels | str:
    """The best kernels that this machine runs, or why there are none."""
    return best_of(SparseByteKernels, integer_isas())


def fallback_reason() -> str | None:
    """Why torch computes these linears; None where the kernels do."""
    return why_torch(kernels())


def told() -> str:
    """Whose kernels compute these linears here, for a report."""
    return whose(kernels())


class SparseByteKernels:
    """The compiled kernels of one instruction set."""

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when they cannot be compiled."""
        self.isa, self.instead = isa, instead
        self.width, rows = _TILES[isa]
        self.call = library(_SOURCE, {"WIDTH": self.width, "ROWS": rows}, isa).int8_sparse
        self.call.argtypes = (
            POINTER, *(ARGUMENT,) * 3, *(POINTER,) * 3, ARGUMENT, *(POINTER,) * 3, ARGUMENT, ARGUMENT,
            *(POINTER,) * 3, ARGUMENT, ARGUMENT,
        )  # fmt: skip
        self.call.restype = ARGUMENT

    def room(self, rows: int, k: int) -> tuple[int, int, int]:
        """(rows that a core takes at once, bytes of codes, bytes of these and the rows' scales)."""
        deep = -(-k // (4 * self.width)) * 4 * self.width
        chunk = max(1, min(_CHUNK, rows, _CACHE // deep))
        codes = deep * (self.width + chunk) * torch.get_num_threads()
        return chunk, codes, codes + 4 * rows

    def linear(self, x: Tensor, held: SparseCodes, scales: Tensor, bias: Tensor | None, after: str) -> Tensor:
        """See `int8_sparse_linear_on_cpu`, which has checked the arguments."""
        n, k = scales.shape[0], x.shape[-1]
        made, flat = x.new_empty((*x.shape[:-1], n)), flat_rows(x)
        chunk, codes, nbytes = self.room(flat.shape[0], k)
        room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if self.call(
            flat.data_ptr(), flat.stride(0), flat.shape[0], k, held.values.data_ptr(), held.quads.data_ptr(),
            held.starts.data_ptr(), len(held.quads), held.sums.data_ptr(), scales.data_ptr(),
            None if bias is None else bias.data_ptr(), n, int8_codes.AFTER.index(after), made.data_ptr(),
            room.data_ptr(), room.data_ptr() + codes, chunk, torch.get_num_threads(),
        ):  # fmt: skip
            raise UsageError(f"The indices of a sparse weight are not those of {n} outputs and {k} columns.")
        return made

    def objection(self) -> str | None:
        """None, or that a linear differs from what torch computes of the same codes: whole tiles and rests,
        strips without a weight, the largest codes, a NaN.
        """
        codes = (torch.arange(53 * 71) * 37 % 255 - 127).to(torch.int8).view(53, 71)
        codes[torch.arange(53 * 71).view(53, 71) // 16 % 3 > 0] = 0
        codes[16:32], codes[3, :], scales = 0, 127, (torch.arange(53) + 1) / 997
        held, bias, dense = SparseCodes.of(codes), scales.cos(), int8_codes.pack(codes)
        for rows in (1, 2, 33):
            x = (torch.arange(rows * 71) * 0.7).sin().view(rows, 71)
            x[0], x[-1, 3] = 1, torch.nan if rows == 2 else 1
            for after in int8_codes.AFTER:
                found = self.linear(x, held, scales, bias, after)
                right = int8_codes.linear_by_torch(x, dense, scales, bias, after)
                if not torch.allclose(found, right, rtol=1e-5, atol=1e-5, equal_nan=True):
                    return f"the compiled {self.isa} kernels gave a wrong product of sparse bytes"
        return None


def int8_sparse_linear_on_cpu(x: Tensor, *given: Any) -> Tensor:
    """after(x Wᵀ + bias), (..., N) in fp32, of what the schema says: W as `SparseCodes` has it, scales (N),
    the side of the blocks that it was made for and how many of them are kept, a bias (N), what follows.

    Raises:
        UsageError: shapes, dtypes or indices that do not fit.
    """
    held, scales = SparseCodes(*given[:4]), given[4]
    rest: list[Any] = [*given[7:], *(None, "none")[len(given) - 7 :]]
    bias, after = rest
    _check(x, held, scales, bias, after)
    found = kernels()
    if isinstance(found, str):
        dense = int8_codes.pack(held.dense(scales.shape[0], x.shape[-1]))
        return int8_codes.linear_by_torch(x, dense, scales, bias, after)
    return found.linear(x, held, scales, bias, after)


_LIBRARY.impl("int8_sparse_linear", int8_sparse_linear_on_cpu, "CPU")
int8_sparse_linear = torch.ops.effcompile.int8_sparse_linear


def _check(x: Tensor, held: SparseCodes, scales: Tensor, bias: Tensor | None, after: str) -> None:
    n, strips, count = scales.shape[0], held.starts.shape[0] - 1, held.quads.shape[0]
    whole = (
        strips == -(-n // LANES)
        and held.values.shape == (count, LANES, 4)
        and held.sums.shape == (strips * LANES,)
    )
    kinds = [
        (held.values, torch.int8),
        *((t, torch.int32) for t in held.tensors[1:]),
        (x, torch.float32),
        (scales, torch.float32),
    ]
    kinds += [] if bias is None else [(bias, torch.float32)]
    biased = bias is None or bias.shape == (n,)
    dense = all(t.dtype is dtype and (t is x or t.is_contiguous()) for t, dtype in kinds)
    if not (whole and biased and dense and x.shape[-1] > 0 and after in int8_codes.AFTER):
        told = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t, _ in kinds)
        raise UsageError(
            "A sparse linear in 8 bits takes values, indices and sums as SparseCodes makes them, x (..., K), "
            f"scales and a bias (N) in float32, and one of {', '.join(int8_codes.AFTER)}; given {told}, "
            f"{after!r}."
        )


@torch.library.register_fake("effcompile::int8_sparse_linear", lib=_LIBRARY)
def _(x, values, quads, starts, sums, scales, *rest, **more):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], scales.shape[0]))


@register_flop_formula(torch.ops.effcompile.int8_sparse_linear)
def _flops(x_shape: Shape, values_shape: Shape, *args: object, **kwargs: object) -> int:
    return 2 * math.prod(x_shape[:-1]) * math.prod(values_shape)


def workspace_bytes(name: str, args: object) -> int | None:
    """Bytes alive inside this operator beyond its inputs and outputs; None for other operators.

    By torch: what float64 takes.
    """
    if name != "effcompile::int8_sparse_linear" or not isinstance(args, (list, tuple)):
        return None
    x, n, k = args[0], int(args[5].shape[0]), int(args[0].shape[-1])
    rows, found = int(x.numel()) // k, kernels()
    return 16 * (rows * (k + n) + n * k) if isinstance(found, str) else found.room(rows, k)[2]
