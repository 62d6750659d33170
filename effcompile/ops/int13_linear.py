"""A linear in 13 bits that takes and gives fp32: x is quantised row by row inside, as `int13_codes.py`
defines it. Its error is a thirtieth of one in bytes; it takes half as long as one of fp32 with VNNI, and
with AVX2 alone, where bytes are multiplied as words, no longer than one in bytes.

On a CPU with AVX2 at least and a C++ compiler the kernels of `int13_linear.cpp` run; elsewhere torch computes
the same, and no plan has it. Defined without torch.library.custom_op, as `int8_linear` is.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.reasons import Unsupported
from effcompile.machine.instructions import tile_isas
from effcompile.machine.native import library
from effcompile.ops.coded_rows import CodedRows
from effcompile.ops.instruction_sets import best_of, warn_of_torch, whose, why_torch
from effcompile.ops.int8_codes import AFTER, refuse_misfit
from effcompile.ops.int8_linear import flops
from effcompile.ops.int8_native import ARGUMENTS, ByteKernels
from effcompile.ops.int13_codes import linear_by_torch, pack

__all__ = ["check", "fallback_reason", "fits", "int13_linear", "refusal", "told", "workspace_bytes"]

_SOURCE = Path(__file__).with_name("int13_linear.cpp")
#: Instruction set → words of a vector, rows and vectors of the register tile. AVX512-VNNI, 128×768×3072 on
#: one core of an Intel Xeon (Emerald Rapids): 12×2 302 GOP/s, 6×4 287, 9×3 278; AVX2
#: alone, 1024×768×3072 on one of an AMD EPYC (Zen 3): 5×2 123, 6×2 121, 3×4 124; its bytes 117, torch's fp32
#: 77.
TILES = {
    "avx512_vnni": (16, 12, 2),
    "avx_vnni": (8, 5, 2),
    "avx512": (16, 12, 2),
    "avx2": (8, 5, 2),
}
#: Rows of a program of few tokens (row_program.py), which has no such step.
_FEW = 8

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define(
    "int13_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None, str after='none') -> Tensor"
)


@functools.cache
def kernels() -> WordKernels | str:
    """The kernels that this machine runs, or why there are none."""
    return best_of(WordKernels, isas()) if isas() else "words are multiplied on x86 with AVX2 at least"


def isas() -> list[str]:
    """That have words and that this processor has, the best first."""
    return [isa for isa in tile_isas() if isa in TILES]


def fallback_reason() -> str | None:
    """Why torch computes these linears; None where the kernels do."""
    return why_torch(kernels())


def told() -> str:
    """Whose kernels compute these linears here, for a report."""
    return whose(kernels())


def refusal(rows: int) -> Unsupported | None:
    """None, or why linears of so many rows are not offered in this form."""
    if rows <= _FEW:
        return Unsupported("linears of up to {} rows take the time of reading weights", (_FEW,))
    reason = fallback_reason()
    return None if reason is None else Unsupported(reason)


class WordKernels(ByteKernels):
    """The compiled kernels of one instruction set, called as those of bytes are."""

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when they cannot be compiled."""
        self.isa, self.instead = isa, instead
        self.call = library(_SOURCE, macros(isa), isa).int13_linear
        self.call.argtypes, self.call.restype = ARGUMENTS, None

    def room_of(self, rows: int, k: int) -> CodedRows:
        """Each row is one group of pairs of words."""
        return CodedRows(rows, 1, 4 * -(-k // 2))

    def objection(self) -> str | None:
        """None, or that a linear differs from what torch computes of the same codes: whole tiles and rests,
        sums of the largest codes, a NaN.
        """
        codes = (torch.arange(53 * 391) * 37 % 8191 - 4095).to(torch.int16).view(53, 391)
        codes[0], scales = 4095, (torch.arange(53) + 1) / 9973
        bias, weight = scales.cos(), pack(codes)
        for rows in (1, 2, 33):
            x = (torch.arange(rows * 391) * 0.7).sin().view(rows, 391)
            x[0], x[-1, 3] = 1, torch.nan if rows == 2 else 1
            for after in AFTER:
                right = linear_by_torch(x, weight, scales, bias, after)
                found = self.linear(x, weight, scales, bias, after)
                room = 1e-5 * float(right.nan_to_num().abs().max())
                if not torch.allclose(found, right, rtol=1e-5, atol=room, equal_nan=True):
                    return f"the compiled {self.isa} kernels gave a wrong product of words"
        return None


def macros(isa: str) -> dict[str, int]:
    """What `int13_linear.cpp` is compiled with for an instruction set."""
    width, rows, vecs = TILES[isa]
    return {"WIDTH": width, "ROWS": rows, "VECS": vecs}


def int13_linear_on_cpu(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, after: str = "none"
) -> Tensor:
    """after(x Wᵀ + bias), (..., N) in fp32, for W as `int13_codes.pack` gives it and its scales (N).

    Raises:
        UsageError: shapes or dtypes that do not fit.
    """
    check(x, weight, scales, bias, after)
    found = kernels()
    if isinstance(found, str):
        warn_of_torch("Linears in 13 bits", found)
        return linear_by_torch(x, weight, scales, bias, after)
    return found.linear(x, weight, scales, None if bias is None else bias.contiguous(), after)


_LIBRARY.impl("int13_linear", int13_linear_on_cpu, "CPU")
int13_linear = torch.ops.effcompile.int13_linear


def check(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, after: str) -> None:
    """Raises UsageError for arguments of a linear in 13 bits that do not fit."""
    refuse_misfit(13, fits, x, weight, scales, bias, after)


def fits(k: int, weight: Tensor, scales: Tensor, bias: Tensor | None) -> bool:
    """Whether these are a linear of k columns in 13 bits."""
    n = int(scales.shape[0]) if scales.dim() == 1 else -1
    packed = weight.shape == (-(-n // 16), -(-k // 2), 16, 2) and weight.dtype == torch.int16
    biased = bias is None or (bias.shape == (n,) and bias.dtype == torch.float32)
    whole = scales.dtype == torch.float32 and scales.is_contiguous() and weight.is_contiguous()
    return packed and biased and whole and n > 0 and k > 0


@torch.library.register_fake("effcompile::int13_linear", lib=_LIBRARY)
def _(x, weight, scales, bias=None, after="none"):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], scales.shape[0]))


register_flop_formula(torch.ops.effcompile.int13_linear)(flops)


def workspace_bytes(name: str, args: object) -> int | None:
    """Bytes alive inside this operator beyond its inputs and outputs; None for other operators.

    By torch: what float64 takes.
    """
    if name != "effcompile::int13_linear" or not isinstance(args, (list, tuple)):
        return None
    x, _, scales = args[:3]
    k, n, found = int(x.shape[-1]), int(scales.shape[0]), kernels()
    rows = int(x.numel()) // k
    return 16 * (rows * (k + n) + n * k) if isinstance(found, str) else found.room_of(rows, k).nbytes
