"""The compiled forms of `rows.py` (`rows.cpp`), as plain functions: for graphs that call them without torch's
dispatcher.

A call of a custom operator takes 20 µs, one of these 3: more than what is computed for one token. What they
do not take, another dtype or layout, they hand to torch's form of the same; so they do where nothing can be
compiled.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.core.types import Shape
from effcompile.machine.instructions import integer_isas
from effcompile.machine.native import library
from effcompile.ops import rows
from effcompile.ops.instruction_sets import ARGUMENT, POINTER, WORDS, best_of
from effcompile.ops.int8_codes import followed

_SOURCE = Path(__file__).with_name("rows.cpp")
_STRIDES = ctypes.c_int64 * 3
#: What `follow` makes of its numbers → how integers.h numbers it.
FOLLOWERS = {"gelu": 1, "gelu_tanh": 2, "silu": 3, "relu": 4}


@functools.cache
def kernels() -> RowKernels | str:
    """The best kernels that this machine runs, or why there are none."""
    return best_of(RowKernels, integer_isas())


class RowKernels:
    """The compiled kernels of one instruction set.

    `instead`: why better sets are not used; "" where there is none.
    """

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when they cannot be compiled."""
        self.isa, self.instead = isa, instead
        found = library(_SOURCE, {"WIDTH": WORDS[isa]}, isa)
        self.norm, self.gate, self.turn = found.rms_norm, found.swiglu, found.rotary
        self.norm.argtypes = (
            *(POINTER,) * 3,
            ctypes.c_double,
            ARGUMENT,
            ARGUMENT,
            POINTER,
            POINTER,
            ARGUMENT,
        )
        self.layer_norm = found.layer_norm
        self.layer_norm.argtypes = (
            *(POINTER,) * 4,
            ctypes.c_double,
            ARGUMENT,
            ARGUMENT,
            POINTER,
            ARGUMENT,
        )
        self.follow = found.follow
        self.follow.argtypes = (POINTER, ARGUMENT, ARGUMENT, POINTER, ARGUMENT)
        self.add = found.add
        self.add.argtypes = (POINTER, POINTER, ARGUMENT, POINTER, ARGUMENT)
        self.gate.argtypes = (*(POINTER, ARGUMENT) * 2, *(ARGUMENT,) * 2, POINTER, ARGUMENT)
        self.turn.argtypes = (
            *(POINTER,) * 3,
            *(ARGUMENT,) * 4,
            _STRIDES,
            _STRIDES,
            ARGUMENT,
            POINTER,
            ARGUMENT,
        )
        for call in (self.norm, self.layer_norm, self.gate, self.turn, self.follow, self.add):
            call.restype = None

    def objection(self) -> str | None:
        """None, or that a result differs from torch's: whole vectors and rests, and a NaN."""
        x, y = (
            (torch.arange(3 * 2 * 2 * 22) * 0.7).sin().view(3, 2, 2, 22),
            (torch.arange(3 * 2 * 2 * 22) * 0.3).cos().view(3, 2, 2, 22),
        )
        x[1, 1, 1, 3] = torch.nan
        cos, sin, weight = y[:, 0], x[:, 0], y[0, 0, 0]
        pairs = [
            (self.rms_norm(x, y, weight, 1e-5)[0], rows.rms_norm_by_torch(x, y, weight, 1e-5)[0]),
            (self.rms_norm(x, None, weight, 1e-5)[0], rows.rms_norm_by_torch(x, None, weight, 1e-5)[0]),
            (self.sum_of(x, y), x + y),
            (self.followed(x * 9, "relu"), F.relu(x * 9)),
            *((self.followed(x * 9, name), followed(x * 9, name)) for name in ("gelu", "gelu_tanh", "silu")),
            (
                self.add_layer_norm(x, None, weight, weight, 1e-5),
                F.layer_norm(x, (22,), weight, weight, 1e-5),
            ),
            (self.add_layer_norm(x, y, weight, None, 1e-5), F.layer_norm(x + y, (22,), weight, None, 1e-5)),
            (self.add_layer_norm(x, y, weight, weight, 1.0), F.layer_norm(x + y, (22,), weight, weight, 1.0)),
            (self.swiglu(x * 9, y, 22, 22), rows.swiglu_by_torch(x * 9, y)),
            (
                self.rotary(x.transpose(1, 2), cos.contiguous(), sin.contiguous()),
                rows.rotary_by_torch(x.transpose(1, 2), cos, sin, False),
            ),
        ]
        same = all(
            torch.allclose(found, right, rtol=1e-5, atol=1e-6, equal_nan=True) for found, right in pairs
        )
        return None if same else f"the compiled {self.isa} kernels gave a wrong norm, gate or rotation"

    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(y, s) of `rows.rms_norm`, of dense x."""
        y, d = torch.empty_like(x), weight.shape[0]
        s = x if residual is None else torch.empty_like(x)
        more = (None, None) if residual is None else (residual.data_ptr(), s.data_ptr())
        count = x.numel() // d
        self.norm(
            x.data_ptr(),
            more[0],
            weight.data_ptr(),
            eps,
            count,
            d,
            y.data_ptr(),
            more[1],
            torch.get_num_threads(),
        )
        return y, s

    def add_layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """y of `add_norm.add_layer_norm`, of dense x and residual of one shape, or of x alone."""
        y, d = torch.empty_like(x), x.shape[-1]
        given = (None if each is None else each.data_ptr() for each in (residual, weight, bias))
        self.layer_norm(x.data_ptr(), *given, eps, x.numel() // d, d, y.data_ptr(), torch.get_num_threads())
        return y

    def sum_of(self, x: Tensor, other: Tensor) -> Tensor:
        """x + other, dense tensors of one shape."""
        y = torch.empty_like(x)
        self.add(x.data_ptr(), other.data_ptr(), x.numel(), y.data_ptr(), torch.get_num_threads())
        return y

    def followed(self, x: Tensor, name: str) -> Tensor:
        """One of FOLLOWERS, of a dense tensor."""
        y = torch.empty_like(x)
        self.follow(x.data_ptr(), x.numel(), FOLLOWERS[name], y.data_ptr(), torch.get_num_threads())
        return y

    def swiglu(self, gate: Tensor, up: Tensor, of_gate: int, of_up: int) -> Tensor:
        """Of tensors whose rows are this far apart."""
        y, d = gate.new_empty(gate.shape), gate.shape[-1]
        self.gate(
            gate.data_ptr(), of_gate, up.data_ptr(), of_up, y.numel() // d, d, y.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return y

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of x whose last axis is dense, and dense cos and sin."""
        y = torch.empty_like(x)
        batch, heads, count, width = x.shape
        self.turn(
            x.data_ptr(), cos.data_ptr(), sin.data_ptr(), batch, heads, count, width // 2,
            _STRIDES(*x.stride()[:3]), _STRIDES(*y.stride()[:3]), 0 if cos.shape[0] == 1 else count * width,
            y.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return y


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The first two results of `rows.rms_norm`."""
    found = _for(x, weight)
    if (
        found is None
        or not x.is_contiguous()
        or (residual is not None and not (residual.is_contiguous() and residual.shape == x.shape))
    ):
        return rows.rms_norm_by_torch(x, residual, weight, eps)[:2]
    return found.rms_norm(x, residual, weight, eps)


def rms_norm_alone(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `rows.rms_norm_alone`. Heads that lie apart are copied: torch's form takes more memory."""
    return rms_norm(x.contiguous(), None, weight, eps)[0]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `rows.swiglu`."""
    found, apart = _for(gate, up), (rows_apart(gate.shape, gate.stride()), rows_apart(up.shape, up.stride()))
    if found is None or None in apart or gate.shape != up.shape or not gate.numel():
        return rows.swiglu_by_torch(gate, up)
    return found.swiglu(gate, up, *apart)  # type: ignore[arg-type]


def rows_apart(shape: Shape, strides: Shape) -> int | None:
    """Elements from one row (..., N) to the next, where rows are dense and equally far apart; else None."""
    if not shape or (strides[-1] != 1 and shape[-1] > 1):
        return None
    step, length = 0, 1
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size == 1:
            continue
        if length == 1:
            step = stride
        elif stride != step * length:
            return None
        length *= size
    return step


def rotary(x: Tensor, cos: Tensor, sin: Tensor, backwards: bool = False) -> Tensor:
    """See `rows.rotary`."""
    found = _for(x, cos, sin)
    dense = x.stride(3) == 1 and cos.is_contiguous() and sin.is_contiguous()
    fits = cos.shape == sin.shape and cos.shape[1:] == x.shape[2:] and cos.shape[0] in (1, x.shape[0])
    if found is None or backwards or not dense or not fits or x.shape[3] % 2:
        return rows.rotary_by_torch(x, cos, sin, backwards)
    return found.rotary(x, cos, sin)


def _for(*tensors: Tensor) -> RowKernels | None:
    """The kernels, for tensors that they take: the first has memory, as one that is traced has not."""
    found = kernels()
    fits = type(tensors[0]) is Tensor and all(t.dtype is torch.float32 and not t.is_cuda for t in tensors)
    return found if fits and not isinstance(found, str) else None
