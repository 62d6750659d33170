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
from effcompile.ops.recurrence_steps import delta_rule_by_torch, short_conv_by_torch, state_space_by_torch

#: Of a convolution whose weights are held in registers; `recurrence.cpp` has it, too.
LONGEST = 16
_SOURCE = Path(__file__).with_name("recurrence.cpp")
_FOUR, _SIX, _EIGHT, _TEN = (ctypes.c_int64 * count for count in (4, 6, 8, 10))


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
        self._conv, self._space, self._rule = found.short_conv, found.state_space, found.delta_rule
        self._conv.argtypes = (*(POINTER,) * 6, _SIX, ARGUMENT, ARGUMENT)
        self._space.argtypes = (*(POINTER,) * 9, _SIX, _EIGHT, ARGUMENT, ARGUMENT, ARGUMENT)
        self._rule.argtypes = (*(POINTER,) * 8, _SIX, _TEN, ARGUMENT, ARGUMENT)
        self._conv.restype = self._space.restype = self._rule.restype = None

    def takes(self, *tensors: Tensor | None) -> bool:
        """Whether these are numbers that the kernels compute with."""
        return all(each is None or (each.dtype is torch.float32 and not each.is_cuda) for each in tensors)

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool
    ) -> tuple[Tensor, Tensor]:
        """See `short_conv_by_torch`."""
        x, weight, state = _rows(x), weight.contiguous(), state.contiguous()
        batch, tokens, channels = x.shape
        made, after = x.new_empty((batch, tokens, channels)), torch.empty_like(state)
        self._conv(
            x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), state.data_ptr(),
            made.data_ptr(), after.data_ptr(),
            _SIX(batch, tokens, channels, weight.shape[1], *x.stride()[:2]), silu, torch.get_num_threads(),
        )  # fmt: skip
        return made, after

    def state_space(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        state: Tensor,
        logs: bool,
    ) -> tuple[Tensor, Tensor]:
        """See `state_space_by_torch`."""
        x, dt, b, c = (_rows(each) for each in (x, dt, b, c))
        a, state = a.contiguous(), state.contiguous()
        rows, groups = (1, 1) if x.dim() == 3 else (x.shape[3], b.shape[2])
        made, after = x.new_empty(x.shape), torch.empty_like(state)
        strides = (stride for each in (x, dt, b, c) for stride in each.stride()[:2])
        self._space(
            *(each.data_ptr() for each in (x, dt, a, b, c)), None if d is None else d.data_ptr(),
            state.data_ptr(), made.data_ptr(), after.data_ptr(),
            _SIX(*x.shape[:3], rows, b.shape[-1], groups), _EIGHT(*strides), a.shape[1] > 1, logs,
            torch.get_num_threads(),
        )  # fmt: skip
        return made, after

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, normed: bool
    ) -> tuple[Tensor, Tensor]:
        """See `delta_rule_by_torch`."""
        q, k, v, g, beta = (_rows(each) for each in (q, k, v, g, beta))
        state = state.contiguous()
        made, after = v.new_empty(v.shape), torch.empty_like(state)
        strides = (stride for each in (q, k, v, g, beta) for stride in each.stride()[:2])
        self._rule(
            *(each.data_ptr() for each in (q, k, v, g, beta, state, made, after)),
            _SIX(*v.shape[:3], *state.shape[2:], q.shape[2]), _TEN(*strides), normed,
            torch.get_num_threads(),
        )  # fmt: skip
        return made, after

    def objection(self) -> str | None:
        """None, or that a result differs from torch's: whole vectors, rests, groups, strides, all forms."""
        for channels, tokens, bias in ((21, 5, True), (16, 1, False), (40, 2, True)):
            x = _wave(0.7, 2, channels, tokens).transpose(1, 2)
            conv = (x, _wave(0.3, channels, 4), _wave(0.9, channels) if bias else None)
            for silu in (True, False):
                given = (*conv, _wave(0.2, 2, channels, 4), silu)
                if not _alike(self.short_conv(*given), short_conv_by_torch(*given)):
                    return f"the compiled {self.isa} kernel gave a wrong convolution"
        for heads, rows, n, decays in ((4, 3, 21, 1), (6, 1, 16, 16), (2, 2, 5, 5)):
            wide = _wave(0.2, 2, 5, 4, n)
            space = (
                _wave(0.7, 2, 5, heads, rows), _wave(0.3, 2, 5, heads).abs(),
                -_wave(0.9, heads, decays).abs(),
                wide[:, :, :2], wide[:, :, 2:], _wave(0.8, heads), _wave(0.4, 2, heads, rows, n),
            )  # fmt: skip
            one = (
                space[0][..., 0], *space[1:3], wide[:, :, 0], wide[:, :, 1], None, space[6][:, :, 0],
            )  # fmt: skip
            for logs in (False, True):
                for x, dt, a, b, c, d, state in (space, one):
                    each = (x, dt, a, b, c, d, state, logs)
                    if not _alike(self.state_space(*each), state_space_by_torch(*each)):
                        return f"the compiled {self.isa} kernel gave a wrong state-space recurrence"
        for width in (5, 16, 70):
            rule = (
                _wave(0.7, 2, 5, 2, 9), _wave(0.3, 2, 5, 2, 9), _wave(0.9, 2, 5, 4, width),
                -_wave(0.2, 2, 5, 4).abs(), _wave(0.5, 2, 5, 4).abs(), _wave(0.4, 2, 4, 9, width),
            )  # fmt: skip
            for normed in (True, False):
                if not _alike(self.delta_rule(*rule, normed), delta_rule_by_torch(*rule, normed)):
                    return f"the compiled {self.isa} kernel gave a wrong gated delta rule"
        return None


def _rows(x: Tensor) -> Tensor:
    """With each token's numbers side by side; what lies between tokens may be another's."""
    axes, stride = x.shape[2:], x.stride()
    dense = stride[-1] == 1 and (len(axes) == 1 or stride[2] == axes[1])
    return x if dense else x.contiguous()


def _wave(step: float, *shape: int) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) * step).sin().view(shape)


def _alike(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> bool:
    return all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(found, right, strict=True))
