"""A linear in fp32 on a CPU of a weight that stays, packed once (`fp32_linear.cpp`), with what follows it.

Beside MKL's product of a packed weight, which holds for one number of rows and keeps the plain weight, and
oneDNN's: 128×768×3072 by one core of an Intel Xeon (Emerald Rapids), 173 GFLOP/s, MKL 161, oneDNN 139. Where
no kernels are compiled a weight stays as it is and torch multiplies it. Defined without
torch.library.custom_op, as `int8_linear` is.
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
from effcompile.machine.instructions import integer_isas, l2_bytes
from effcompile.machine.native import library
from effcompile.ops import tape
from effcompile.ops.coded_rows import flat_rows
from effcompile.ops.instruction_sets import LINE, at_line, best_of, whose
from effcompile.ops.int8_codes import AFTER, as_given, followed, refuse_unknown
from effcompile.ops.int8_native import ARGUMENTS
from effcompile.ops.tape import KernelTold, Made, Scratch, TapeValue

__all__ = ["HeldFloats", "fp32_linear", "fp32_linear_on_cpu", "fp32_pack", "kernels", "told"]

_SOURCE = Path(__file__).with_name("fp32_linear.cpp")
#: Instruction set → words of a vector, rows and vectors of the register tile: all but the registers that a
#: step of K reads.
_TILES = {
    **dict.fromkeys(("avx512_vnni", "avx512"), (16, 14, 2)),
    **dict.fromkeys(("avx_vnni", "avx2"), (8, 6, 2)),
    **dict.fromkeys(("neon_i8mm", "neon_dotprod", "neon"), (4, 4, 4)),
}
#: Outputs of a panel; numbers of a part of K: 96 KiB of a panel.
_PANEL, _DEPTH = 32, 768
#: Share of a core's L2 cache that rows of x take which are multiplied with all panels.
_SHARE = 3 / 8

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define("fp32_pack(Tensor weight) -> Tensor")
_LIBRARY.define("fp32_linear(Tensor x, Tensor weight, int n, Tensor? bias=None, str after='none') -> Tensor")


@functools.cache
def kernels() -> FloatKernels | str:
    """The best kernels that this machine runs, or why there are none."""
    return best_of(FloatKernels, integer_isas())


def told() -> str:
    """Whose kernels compute these linears here, for a report."""
    return whose(kernels())


def macros(isa: str) -> dict[str, int]:
    """What `fp32_linear.cpp` is compiled with for an instruction set."""
    width, rows, vecs = _TILES[isa]
    return {"WIDTH": width, "ROWS": rows, "VECS": vecs, "PANEL": _PANEL, "DEPTH": _DEPTH}


class FloatKernels:
    """The compiled kernel of one instruction set.

    `instead`: why better sets are not used; "" where there is none.
    """

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when it cannot be compiled."""
        self.isa, self.instead = isa, instead
        self.call = library(_SOURCE, macros(isa), isa).fp32_linear
        self.call.argtypes, self.call.restype = ARGUMENTS, None

    def room(self, rows: int, k: int) -> int:
        """Bytes of scratch."""
        return 4 * self.chunk(rows) * min(k, _DEPTH)

    def chunk(self, rows: int) -> int:
        """Rows that are multiplied with all of W before the next are taken."""
        most = max(64, int(l2_bytes() * _SHARE) // (4 * _DEPTH))
        return -(-rows // max(1, -(-rows // most)))

    def linear(self, x: Tensor, weight: Tensor, n: int, bias: Tensor | None, after: str) -> Tensor:
        """See `fp32_linear_on_cpu`, which has checked the arguments."""
        flat, made = flat_rows(x), x.new_empty((*x.shape[:-1], n))
        rows, k = flat.shape
        scratch = torch.empty(self.room(rows, k) + LINE, dtype=torch.uint8, device="cpu")
        self.call(
            flat.data_ptr(), flat.stride(0), rows, k, weight.data_ptr(), None,
            None if bias is None else bias.data_ptr(), n, AFTER.index(after), made.data_ptr(),
            at_line(scratch), None, None, self.chunk(rows), torch.get_num_threads(),
        )  # fmt: skip
        return made

    def objection(self) -> str | None:
        """None, or that a linear differs from torch's: whole tiles and rests, parts of K, a NaN."""
        weight = (torch.arange(53 * 791) * 0.3).sin().view(53, 791)
        bias, held = torch.arange(53) / 9, _panels(weight)
        for rows in (1, 2, 33):
            x = (torch.arange(rows * 791) * 0.7).cos().view(rows, 791)
            x[-1, 3] = torch.nan if rows == 2 else 1
            for after in AFTER:
                right = followed(F.linear(x, weight, bias), after)
                found = self.linear(x, held, 53, bias, after)
                if not torch.allclose(found, right, rtol=1e-4, atol=1e-4, equal_nan=True):
                    return f"the compiled {self.isa} kernel gave a wrong product of floats"
        return None


def _panels(weight: Tensor) -> Tensor:
    """(N, K) as the kernel reads it, (⌈N / 32⌉, K, 32), zeros beyond the last output."""
    n, k = weight.shape
    padded = F.pad(weight, (0, 0, 0, -n % _PANEL))
    return padded.view(-1, _PANEL, k).transpose(1, 2).contiguous()


def _plain(held: Tensor, n: int) -> Tensor:
    """The inverse."""
    return held if held.dim() == 2 else held.transpose(1, 2).reshape(-1, held.shape[1])[:n]


def _packs(weight: Tensor) -> bool:
    fits = weight.dtype is torch.float32 and weight.dim() == 2 and weight.numel() > 0
    return fits and weight.device.type == "cpu" and not isinstance(kernels(), str)


def _pack(weight: Tensor) -> Tensor:
    """A weight (N, K) as `fp32_linear` wants it here: the kernels' panels, or as it is."""
    return _panels(weight) if _packs(weight) else weight.clone()


def fp32_linear_on_cpu(
    x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, after: str = "none"
) -> Tensor:
    """after(x Wᵀ + bias), (..., N), of x (..., K) in fp32, W as `fp32_pack` gives it and a bias (N).

    Raises:
        UsageError: shapes or dtypes that do not fit.
    """
    refuse_unknown(after)
    if not _fits(x, weight, n, bias):
        raise UsageError(
            f"A linear in fp32 takes x (..., K), a weight (N, K) that fp32_pack made, N and a bias (N), all "
            f"in float32; given {as_given(x=x, weight=weight, bias=bias)} and N = {n}."
        )
    found = kernels()
    if weight.dim() == 2 or isinstance(found, str):
        return followed(F.linear(x, _plain(weight, n), bias), after)
    if not x.numel():
        return x.new_empty((*x.shape[:-1], n))
    return found.linear(x, weight, n, None if bias is None else bias.contiguous(), after)


def _fits(x: Tensor, weight: Tensor, n: int, bias: Tensor | None) -> bool:
    k = int(x.shape[-1]) if x.dim() else 0
    held = weight.shape in ((n, k), (-(-n // _PANEL), k, _PANEL)) and weight.is_contiguous()
    biased = bias is None or bias.shape == (n,)
    alike = all(each is None or each.dtype is torch.float32 for each in (x, weight, bias))
    return held and biased and alike and n > 0 and k > 0


_LIBRARY.impl("fp32_pack", _pack, "CPU")
_LIBRARY.impl("fp32_linear", fp32_linear_on_cpu, "CPU")
fp32_pack, fp32_linear = torch.ops.effcompile.fp32_pack, torch.ops.effcompile.fp32_linear


@torch.library.register_fake("effcompile::fp32_pack", lib=_LIBRARY)
def _(weight):  # type: ignore[no-untyped-def]
    if isinstance(kernels(), str):
        return weight.new_empty(weight.shape)
    return weight.new_empty((-(-weight.shape[0] // _PANEL), weight.shape[1], _PANEL))


@torch.library.register_fake("effcompile::fp32_linear", lib=_LIBRARY)
def _(x, weight, n, bias=None, after="none"):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], n))


@register_flop_formula(torch.ops.effcompile.fp32_linear)
def _flops(x_shape, weight_shape, n, *args, out_shape=None, **kwargs):  # type: ignore[no-untyped-def]
    return 2 * math.prod(x_shape) * n


def workspace_bytes(name: str, args: object) -> int | None:
    """Bytes alive inside this operator beyond its inputs and outputs; None for other operators."""
    if name != "effcompile::fp32_linear" or not isinstance(args, (list, tuple)):
        return None
    x, found = args[0], kernels()
    k = int(x.shape[-1])
    return 0 if isinstance(found, str) else found.room(int(x.numel()) // k, k) + LINE


class HeldFloats:
    """`fp32_linear` of one weight, as a step of a tape (tape.py)."""

    __name__, pair = "fp32_linear", False

    def __init__(self, weight: Tensor, n: int, bias: Tensor | None = None, after: str = "none") -> None:
        self._linear = (weight, n, bias, after)

    def __call__(self, x: Tensor) -> Tensor:
        """(..., N), for x (..., K)."""
        return fp32_linear_on_cpu(x, *self._linear)

    def told(self, threads: int, x: TapeValue) -> KernelTold | None:
        (weight, n, bias, after), found = self._linear, kernels()
        rows, k = math.prod(x.shape[:-1]), x.shape[-1]
        packed = weight.shape == (-(-n // _PANEL), k, _PANEL) and weight.is_contiguous()
        plain = bias is None or (bias.dtype is torch.float32 and bias.shape == (n,) and bias.is_contiguous())
        if isinstance(found, str) or not (packed and plain and rows and x.dense):
            return None
        arguments = (
            x, k, rows, k, weight.data_ptr(), None, None if bias is None else bias.data_ptr(), n,
            AFTER.index(after), Made, Scratch(), None, None, found.chunk(rows), threads,
        )  # fmt: skip
        shape = (*x.shape[:-1], n)
        return KernelTold(
            kind=tape.LINEAR, function=found.call, arguments=arguments, shape=shape,
            scratch=found.room(rows, k),
        )  # fmt: skip
