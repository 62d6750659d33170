"""Linears of few rows in float32 on a CPU (`few_rows.cpp`), on the weight as torch holds it.

For one row torch's product is MKL's: it took 1.2 to 2.7 times as long as reading the weight does (an EPYC
with Zen 4, one thread, 512 to 3072 columns). What the kernels do not take is torch's.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from effcompile.core.types import Args, Value
from effcompile.machine.instructions import integer_isas
from effcompile.machine.native import library
from effcompile.ops.instruction_sets import ARGUMENT, POINTER, WORDS, best_of

__all__ = ["ROWS", "ByFewRows", "FewRows", "kernels", "linear", "takes"]

_SOURCE = Path(__file__).with_name("few_rows.cpp")
#: Rows of x up to which the weight is read once; with more, torch's product is as fast.
ROWS = 4


@functools.cache
def kernels() -> FewRows | str:
    """The best kernels that this machine runs, or why there are none."""
    return best_of(FewRows, integer_isas())


class FewRows:
    """The compiled kernel of one instruction set.

    `instead`: why better sets are not used; "" where there is none.
    """

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when it cannot be compiled."""
        self.isa, self.instead = isa, instead
        self.call = library(_SOURCE, {"WIDTH": WORDS[isa]}, isa).few_rows
        self.call.argtypes = (
            POINTER,
            *(ARGUMENT,) * 3,
            POINTER,
            POINTER,
            ARGUMENT,
            POINTER,
            ARGUMENT,
        )
        self.call.restype = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Of dense tensors."""
        n, k = weight.shape
        made = x.new_empty((*x.shape[:-1], n))
        self.call(
            x.data_ptr(), k, x.numel() // k, k, weight.data_ptr(), None if bias is None else bias.data_ptr(),
            n, made.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return made

    def objection(self) -> str | None:
        """None, or that a result differs from torch's: whole vectors and rests, a NaN."""
        weight, bias = (torch.arange(37 * 71) * 0.3).sin().view(37, 71), torch.arange(37) / 9
        for rows in range(1, 2 * ROWS):
            x = (torch.arange(rows * 71) * 0.7).cos().view(rows, 71)
            x[-1, 3] = torch.nan if rows == 2 else 1
            right = F.linear(x, weight, bias)
            if not torch.allclose(self.linear(x, weight, bias), right, 1e-5, 1e-5, equal_nan=True):
                return f"the compiled {self.isa} kernel gave a wrong product of few rows"
        return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias: x (..., K), W (N, K) dense in fp32 on the CPU, as its bias."""
    few = type(x) is Tensor and x.dtype is torch.float32 and 0 < x.numel() <= ROWS * weight.shape[1]
    if few and x.shape[-1] == weight.shape[1] and x.is_contiguous() and not x.is_cuda:
        found = kernels()
        if not isinstance(found, str):
            return found.linear(x, weight, bias)
    return F.linear(x, weight, bias)


class ByFewRows(TorchFunctionMode):
    """Within it a model's own linears are `linear`, where that takes them."""

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Value:
        as_modules = func is F.linear and len(args) == 3 and not kwargs
        if as_modules and takes(*args[1:]) and not torch.is_grad_enabled():
            return linear(*args)
        return func(*args, **(kwargs or {}))


def takes(*constants: Tensor | None) -> bool:
    """Whether the kernels take a weight and a bias."""
    return all(
        each is None or (each.dtype is torch.float32 and each.is_contiguous() and each.device.type == "cpu")
        for each in constants
    )
