"""The compiled update of Adam on states of 8 bits (`states8.cpp`): compiled at its first use for the best
instruction set of this CPU.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from effcompile.machine.instructions import best_isa
from effcompile.machine.native import library

_SOURCE = Path(__file__).with_name("states8.cpp")
_POINTER, _FLOAT = ctypes.c_void_p, ctypes.c_float
_ARGUMENTS = (ctypes.c_int, *(_POINTER,) * 8, *(_FLOAT,) * 8, ctypes.c_int64, ctypes.c_int)
_BLOCK = 256


class CompiledAdam8:
    """The kernel."""

    def __init__(self) -> None:
        """Raises LoweringError when it cannot be compiled."""
        self._call = library(_SOURCE, {}, best_isa()).adam8
        self._call.argtypes, self._call.restype = _ARGUMENTS, None

    @staticmethod
    def takes(p: Tensor, grad: Tensor) -> bool:
        """Whether it updates such a parameter: in fp32 or bf16, with a gradient that lies as it does."""
        return (
            p.dtype in (torch.float32, torch.bfloat16)
            and grad.dtype == p.dtype
            and grad.is_contiguous()
            and p.is_contiguous()
        )

    def __call__(
        self, p: Tensor, grad: Tensor, first: Tensor, first_scale: Tensor, second: Tensor,
        second_scale: Tensor, signed: Tensor, unsigned: Tensor, lr: float, beta1: float, beta2: float,
        decay: float, eps: float, step: int, decoupled: bool,
    ) -> None:  # fmt: skip
        """As `states8.adam8_by_torch`, whose checks the arguments have passed."""
        tensors = (p, grad, first, first_scale, second, second_scale, signed, unsigned)
        shrink, added = (lr * decay, 0.0) if decoupled else (0.0, decay)
        self._call(
            p.dtype == torch.bfloat16, *(t.data_ptr() for t in tensors), lr, shrink, added, 1 - beta1,
            1 - beta2, eps, 1 - beta1**step, (1 - beta2**step) ** 0.5, p.numel() // _BLOCK,
            torch.get_num_threads(),
        )  # fmt: skip
