"""The softmax of a loss head's logits on a CPU, row by row, where they lie (`loss_rows.cpp`).

    lse = log Σ exp(scale · z)
    picked = scale · z[label] − lse
    z ← (exp(scale · z − lse) − [label]) · factor

In fp32 whatever z is; its gradient is rounded once. torch takes a pass over the logits for each of these, and
for bf16 a second copy of them in fp32.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from effcompile.machine.instructions import best_isa
from effcompile.machine.native import library
from effcompile.ops.instruction_sets import ARGUMENT, POINTER, WORDS, best_of

__all__ = ["LossRows", "row_stride", "where_for"]

_SOURCE = Path(__file__).with_name("loss_rows.cpp")
_LINE = 64


@functools.cache
def kernels() -> LossRows | str:
    """The best kernels that this machine runs, or why there are none."""
    return best_of(LossRows, isas())


def isas() -> tuple[str, ...]:
    """Instruction sets of this machine that there are kernels for, the best first."""
    best = best_isa()
    lesser = {"avx512_bf16": ("avx512", "avx2"), "avx512": ("avx2",)}.get(best, ())
    return (best, *lesser) if best != "generic" else ()


def where_for(x: Tensor, *, capped: bool, bias: bool) -> LossRows | None:
    """The kernels, for the logits of x; None where torch computes.

    `capped`: the logits are outer · tanh(inner · z). `bias`: a bias wants a gradient, which is a sum of what
    is not rounded.
    """
    fits = x.dtype is torch.float32 or (x.dtype is torch.bfloat16 and not bias)
    if not fits or capped or x.device.type != "cpu":
        return None
    found = kernels()
    return None if isinstance(found, str) else found


def row_stride(columns: int, dtype: torch.dtype) -> int:
    """Elements from one row of logits to the next: rows of two bytes begin at a line of the cache each.

    Products of bf16 that write or read them are faster so where the columns are none of its multiple: x Wᵀ of
    GPT-2's 50257 words took 18.8 ms where it had taken 28.7, g W 19.4 for 22.4 (512 rows, AMX, two cores).
    """
    line = _LINE // dtype.itemsize
    return -(-columns // line) * line if dtype.itemsize == 2 else columns


class LossRows:
    """The compiled kernels of one instruction set.

    `instead`: why better sets are not used; "" where there is none.
    """

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when they cannot be compiled."""
        self.isa, self.instead = isa, instead
        self.call = library(_SOURCE, {"WIDTH": WORDS[isa]}, isa).loss_rows
        self.call.argtypes = (
            *(POINTER, *(ARGUMENT,) * 4, ctypes.c_float),
            *(POINTER,) * 4,
            *(ARGUMENT,) * 2,
        )
        self.call.restype = ARGUMENT

    def run(
        self,
        z: Tensor,
        index: Tensor,
        scale: float,
        *,
        factors: Tensor | None = None,
        picked: Tensor | None = None,
        lse: Tensor | None = None,
        given: bool = False,
    ) -> None:
        """What is wanted of z (R, V), whose rows are dense, of labels `index` (R, 1): see the definition.

        z becomes the gradient where there are `factors`; `lse` is read where it is `given`. All else (R, 1),
        in fp32.
        """
        done = self.call(
            z.data_ptr(),
            z.dtype is torch.bfloat16,
            *z.shape,
            z.stride(0),
            scale,
            index.data_ptr(),
            *(None if t is None else t.data_ptr() for t in (factors, picked, lse)),
            given,
            torch.get_num_threads(),
        )
        if not done:
            torch.gather(z, 1, index)  # which says so

    def objection(self) -> str | None:
        """None, or that a result differs from torch's: whole vectors and rests, both dtypes, a number that
        is minus infinity, a NaN.
        """
        wave = (torch.arange(5 * 71) * 0.7).sin().view(5, 71) * 20
        wave[1, 3], wave[2, 7] = -torch.inf, torch.nan
        index, factors = (
            torch.tensor([[0], [70], [5], [9], [33]]),
            torch.tensor([[1.0], [0.5], [1], [0], [2]]),
        )
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            z = wave.to(dtype)
            log = torch.log_softmax(z.float() * 0.5, 1)
            right = (log.exp() - torch.zeros_like(log).scatter_(1, index, 1.0)) * factors
            picked, lse = torch.empty(5, 1), torch.empty(5, 1)
            self.run(z, index, 0.5, factors=factors, picked=picked, lse=lse)
            pairs = ((z.float(), right, tolerance), (picked, log.gather(1, index), 1e-5))
            if not all(torch.allclose(a, b, t, t, equal_nan=True) for a, b, t in pairs):
                return f"the compiled {self.isa} kernels gave a wrong softmax"
        return None
