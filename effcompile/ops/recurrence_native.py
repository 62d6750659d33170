"""The compiled forms of recurrence_steps.py (`recurrence.cpp`)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from effcompile.machine.instructions import integer_isas
from effcompile.machine.native import library
from effcompile.ops.instruction_sets import ARGUMENT, POINTER, WORDS, best_of
from effcompile.ops.recurrence_steps import delta_rule_by_torch, state_space_by_torch

_SOURCE = Path(__file__).with_name("recurrence.cpp")
_SIZES = ctypes.c_int64 * 6


@functools.cache
def kernels() -> RecurrenceKernels | str:
    """The best kernels that this machine runs, or why there are none."""
    return best_of(RecurrenceKernels, integer_isas())


class RecurrenceKernels:
    """The compiled kernels of one instruction set.

    `instead`: why better sets are not used; "" where there is none.
    """

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when they cannot be compiled."""
        self.isa, self.instead = isa, instead
        found = library(_SOURCE, {"WIDTH": WORDS[isa]}, isa)
        self._space, self._rule = found.state_space, found.delta_rule
        self._space.argtypes = (*(POINTER,) * 9, _SIZES, ARGUMENT, ARGUMENT)
        self._rule.argtypes = (*(POINTER,) * 8, _SIZES, ARGUMENT, ARGUMENT)
        self._space.restype = self._rule.restype = None

    def takes(self, *tensors: Tensor | None) -> bool:
        """Whether these are numbers that the kernels compute with."""
        return all(each is None or (each.dtype is torch.float32 and not each.is_cuda) for each in tensors)

    def state_space(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `state_space_by_torch`."""
        x, dt, a, b, c, state = (each.contiguous() for each in (x, dt, a, b, c, state))
        batch, tokens, heads, rows = x.shape
        made, after = torch.empty_like(x), torch.empty_like(state)
        self._space(
            *(each.data_ptr() for each in (x, dt, a, b, c)), None if d is None else d.contiguous().data_ptr(),
            state.data_ptr(), made.data_ptr(), after.data_ptr(),
            _SIZES(batch, tokens, heads, rows, b.shape[3], b.shape[2]), a.shape[1] > 1,
            torch.get_num_threads(),
        )  # fmt: skip
        return made, after

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, normed: bool
    ) -> tuple[Tensor, Tensor]:
        """See `delta_rule_by_torch`."""
        q, k, v, g, beta, state = (each.contiguous() for each in (q, k, v, g, beta, state))
        batch, tokens, heads, width = v.shape
        made, after = torch.empty_like(v), torch.empty_like(state)
        self._rule(
            *(each.data_ptr() for each in (q, k, v, g, beta, state, made, after)),
            _SIZES(batch, tokens, heads, q.shape[3], width, q.shape[2]), normed, torch.get_num_threads(),
        )  # fmt: skip
        return made, after

    def objection(self) -> str | None:
        """None, or that a result differs from torch's: whole vectors and rests, groups, each form of a."""
        wave = lambda step, *shape: (torch.arange(torch.Size(shape).numel()) * step).sin().view(shape)  # noqa: E731
        for heads, rows, n, decays in ((4, 3, 21, 1), (6, 1, 16, 16), (2, 2, 5, 5)):
            given = (
                wave(0.7, 2, 5, heads, rows), wave(0.3, 2, 5, heads).abs(), -wave(0.9, heads, decays).abs(),
                wave(0.2, 2, 5, 2, n), wave(0.5, 2, 5, 2, n), wave(0.8, heads), wave(0.4, 2, heads, rows, n),
            )  # fmt: skip
            if not _alike(self.state_space(*given), state_space_by_torch(*given)):
                return f"the compiled {self.isa} kernel gave a wrong state-space recurrence"
        for width in (5, 16, 70):
            rule = (
                wave(0.7, 2, 5, 2, 9), wave(0.3, 2, 5, 2, 9), wave(0.9, 2, 5, 4, width),
                -wave(0.2, 2, 5, 4).abs(), wave(0.5, 2, 5, 4).abs(), wave(0.4, 2, 4, 9, width),
            )  # fmt: skip
            for normed in (True, False):
                if not _alike(self.delta_rule(*rule, normed), delta_rule_by_torch(*rule, normed)):
                    return f"the compiled {self.isa} kernel gave a wrong gated delta rule"
        return None


def _alike(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> bool:
    return all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(found, right, strict=True))
