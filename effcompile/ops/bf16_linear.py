"""A linear of fp32 tensors whose product is of bf16, with sums in fp32: x is rounded inside.

y = f(bf16(x) bf16(W)ᵀ + bias). On a CPU with AMX the kernel of `bf16_linear.cpp` runs, which oneDNN's bf16
linear takes 1.2 to 1.7 times as long as, with what stands around it (x and y rounded, y widened and its bias
added); elsewhere torch computes the same of numbers that are rounded, and no plan has it. Defined without
torch.library.custom_op, as `int8_linear` is.

Legend: x (..., K), W (N, K), packed (⌈N/16⌉, ⌈K/2⌉, 16, 2) of bf16.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.errors import UsageError
from effcompile.machine.instructions import bf16_isas
from effcompile.machine.native import library
from effcompile.ops import int8_mlp, tape
from effcompile.ops.coded_rows import flat_rows
from effcompile.ops.instruction_sets import (
    ARGUMENT,
    LINE,
    at_line,
    best_of,
    warn_of_torch,
    whose,
    why_torch,
    with_tiles,
)
from effcompile.ops.int8_codes import AFTER, as_given, followed, refuse_unknown
from effcompile.ops.int8_native import ARGUMENTS
from effcompile.ops.tape import KernelTold, Made, Scratch, TapeValue

__all__ = [
    "HeldHalves",
    "bf16_linear",
    "bf16_linear_on_cpu",
    "fallback_reason",
    "kernels",
    "multiplies",
    "pack",
    "told",
    "workspace_bytes",
]

_SOURCE = Path(__file__).with_name("bf16_linear.cpp")
ISA, MACROS = "amx_bf16", {"WIDTH": 16}
#: Rows from which on these are used.
_ROWS = 9

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define(
    "bf16_linear(Tensor x, Tensor weight, int n, Tensor? bias=None, str after='none', bool narrow=False) "
    "-> Tensor"
)


@functools.cache
def kernels() -> HalvesKernels | str:
    """The kernels, or why there are none."""
    return best_of(HalvesKernels, isas()) if isas() else "this processor has no AMX for bf16"


def isas() -> list[str]:
    """That have such tiles and that this processor has."""
    return [isa for isa in bf16_isas() if isa == ISA]


def fallback_reason() -> str | None:
    """Why torch computes these linears; None where the kernels do."""
    return why_torch(kernels())


def told() -> str:
    """Whose kernels compute these linears here, for a report."""
    return whose(kernels())


def multiplies(rows: int) -> bool:
    """Whether the kernels are used for so many rows of x: not for those of a program of few tokens
    (row_program.py).
    """
    return rows >= _ROWS and not isinstance(kernels(), str)


class HalvesKernels:
    """The compiled kernels: of one linear, and of two with what lies between and behind (bf16_mlp.py)."""

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when they cannot be compiled, or the system does not give AMX's registers."""
        self.isa, self.instead = isa, instead
        found = with_tiles(library(_SOURCE, MACROS, isa))
        self.call, self.narrow, self.mlp = found.bf16_linear, found.bf16_linear_narrow, found.bf16_mlp
        for call in (self.call, self.narrow):
            call.argtypes, call.restype = ARGUMENTS, None
        self.mlp.argtypes, self.mlp.restype = int8_mlp.ARGUMENTS, None
        self.mlp_bytes, self.part_of = found.room_bytes, found.part_of
        self.mlp_bytes.argtypes, self.mlp_bytes.restype = (ARGUMENT,) * 3, ARGUMENT
        self.part_of.argtypes, self.part_of.restype = (ARGUMENT,), ARGUMENT

    @staticmethod
    def room(rows: int, k: int) -> int:
        """Bytes of scratch: x as the tiles read it."""
        return rows * -(-2 * k // LINE) * LINE + LINE

    def linear(
        self, x: Tensor, weight: Tensor, n: int, bias: Tensor | None, after: str, narrow: bool = False
    ) -> Tensor:
        """See `bf16_linear_on_cpu`, which has checked the arguments."""
        flat = flat_rows(x)
        made = x.new_empty((*x.shape[:-1], n), dtype=torch.bfloat16 if narrow else None)
        rows, k = flat.shape
        scratch = torch.empty(self.room(rows, k), dtype=torch.uint8, device="cpu")
        (self.narrow if narrow else self.call)(
            flat.data_ptr(), flat.stride(0), rows, k, weight.data_ptr(), None,
            None if bias is None else bias.data_ptr(), n, AFTER.index(after), made.data_ptr(),
            at_line(scratch), None, None, 0, torch.get_num_threads(),
        )  # fmt: skip
        return made

    def objection(self) -> str | None:
        """None, or that a linear differs from what torch computes of the same rounded numbers: whole tiles
        and rests, parts of K, a NaN.
        """
        weight = (torch.arange(53 * 871) * 0.3).sin().view(53, 871)
        bias, held = torch.arange(53) / 9, pack(weight)
        for rows in (1, 2, 33):
            x = (torch.arange(rows * 871) * 0.7).cos().view(rows, 871)
            x[-1, 3] = torch.nan if rows == 2 else 1
            for after in AFTER:
                right = by_torch(x, held, 53, bias, after)
                found = self.linear(x, held, 53, bias, after)
                if not torch.allclose(found, right, rtol=1e-3, atol=1e-3, equal_nan=True):
                    return f"the compiled {self.isa} kernel gave a wrong product of bf16"
        return None


def pack(weight: Tensor) -> Tensor:
    """A weight (N, K) in the order in which the kernels read it, zeros beyond the last output and column."""
    n, k = weight.shape
    padded = F.pad(weight.to(torch.bfloat16), (0, k % 2, 0, -n % 16))
    return padded.reshape(-1, 16, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()


def unpack(packed: Tensor, n: int, k: int) -> Tensor:
    """The inverse."""
    return packed.transpose(1, 2).reshape(16 * packed.shape[0], -1)[:n, :k]


def by_torch(x: Tensor, weight: Tensor, n: int, bias: Tensor | None, after: str) -> Tensor:
    """What the kernels compute, slowly, but for the order of sums."""
    return followed(F.linear(x.bfloat16().float(), unpack(weight, n, x.shape[-1]).float(), bias), after)


def bf16_linear_on_cpu(
    x: Tensor,
    weight: Tensor,
    n: int,
    bias: Tensor | None = None,
    after: str = "none",
    narrow: bool = False,
) -> Tensor:
    """after(x Wᵀ + bias), (..., N) in fp32 or, if `narrow`, in bf16, of x (..., K) in fp32, W as `pack` gives
    it and a bias (N) in fp32.

    Raises:
        UsageError: shapes or dtypes that do not fit.
    """
    check(x, weight, n, bias, after)
    found = kernels()
    if isinstance(found, str):
        warn_of_torch("Linears in bf16", found)
    if isinstance(found, str) or not x.numel():
        made = by_torch(x, weight, n, bias, after)
        return made.bfloat16() if narrow else made
    return found.linear(x, weight, n, None if bias is None else bias.contiguous(), after, narrow)


def check(x: Tensor, weight: Tensor, n: int, bias: Tensor | None, after: str) -> None:
    """Raises UsageError for arguments of a linear in bf16 that do not fit."""
    refuse_unknown(after)
    if not (x.dtype is torch.float32 and x.dim() and fits(int(x.shape[-1]), weight, n, bias)):
        raise UsageError(
            "A linear in bf16 takes x (..., K) in float32, a weight that bf16_linear.pack made, N and a bias "
            f"(N) in float32; given {as_given(x=x, weight=weight, bias=bias)} and N = {n}."
        )


def fits(k: int, weight: Tensor, n: int, bias: Tensor | None) -> bool:
    """Whether these are a linear of k columns in bf16."""
    packed = weight.shape == (-(-n // 16), -(-k // 2), 16, 2) and weight.dtype is torch.bfloat16
    biased = bias is None or (bias.shape == (n,) and bias.dtype is torch.float32)
    return packed and biased and weight.is_contiguous() and n > 0 and k > 0


_LIBRARY.impl("bf16_linear", bf16_linear_on_cpu, "CPU")
bf16_linear = torch.ops.effcompile.bf16_linear


@torch.library.register_fake("effcompile::bf16_linear", lib=_LIBRARY)
def _(x, weight, n, bias=None, after="none", narrow=False):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], n), dtype=torch.bfloat16 if narrow else None)


@register_flop_formula(torch.ops.effcompile.bf16_linear)
def _flops(x_shape, weight_shape, n, *args, out_shape=None, **kwargs):  # type: ignore[no-untyped-def]
    return 2 * math.prod(x_shape) * n


def workspace_bytes(name: str, args: object) -> int | None:
    """Bytes alive inside this operator beyond its inputs and outputs; None for other operators.

    By torch: x rounded and widened, the weight widened, and what a function is taken of.
    """
    if name != "effcompile::bf16_linear" or not isinstance(args, (list, tuple)):
        return None
    x, _, n = args[:3]
    k, found = int(x.shape[-1]), kernels()
    rows = int(x.numel()) // k
    return 4 * (rows * (2 * k + n) + 2 * n * k) if isinstance(found, str) else found.room(rows, k)


class HeldHalves:
    """`bf16_linear` of one weight, as a step of a tape (tape.py); its result is in fp32 or, if `narrow`, in
    bf16.
    """

    __name__, pair = "bf16_linear", False

    def __init__(
        self, weight: Tensor, n: int, bias: Tensor | None = None, after: str = "none", narrow: bool = False
    ) -> None:
        self._linear, self._narrow = (weight, n, bias, after), narrow

    def __call__(self, x: Tensor) -> Tensor:
        """(..., N), for x (..., K)."""
        return bf16_linear_on_cpu(x, *self._linear, self._narrow)

    def told(self, threads: int, x: TapeValue) -> KernelTold | None:
        (weight, n, bias, after), found = self._linear, kernels()
        rows, k = math.prod(x.shape[:-1]), x.shape[-1]
        fitting = fits(k, weight, n, bias) and (bias is None or bias.is_contiguous())
        if isinstance(found, str) or not (fitting and rows and x.dense):
            return None
        arguments = (
            x, k, rows, k, weight.data_ptr(), None, None if bias is None else bias.data_ptr(), n,
            AFTER.index(after), Made, Scratch(), None, None, 0, threads,
        )  # fmt: skip
        call, dtype = (found.narrow, torch.bfloat16) if self._narrow else (found.call, torch.float32)
        return KernelTold(
            kind=tape.LINEAR, function=call, arguments=arguments, shape=(*x.shape[:-1], n), dtype=dtype,
            scratch=found.room(rows, k),
        )  # fmt: skip
