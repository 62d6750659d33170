"""A section of gpu.py: what reads and writes each element once, by bytes per second, against
torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from _gpu_common import DRY, Timed, attempt, close, compare, make, mine
from torch import Tensor

from effcompile.ops import rows as op

#: Rows and columns: of a model of 8B parameters, and the widest norm.
SHAPES = ((8, 64),) if DRY else ((16384, 4096), (16384, 8192), (4096, 16384))


def rows() -> None:
    """A norm with its residual sum, its backward, a gate forward and backward, a rotation."""
    for count, width in SHAPES:
        for case in (norm, norm_backward, gate, gate_backward, rotation):
            if mine():
                with attempt(f"rows: {case.__name__} {count} x {width}"):
                    timed(case.__name__, *case(count, width), count, width)


def timed(
    name: str,
    mine: Callable[..., Any],
    torchs: Callable[..., Any],
    given: tuple[Tensor, ...],
    tensors: int,
    count: int,
    width: int,
) -> None:
    """`tensors`: how many of count × width are read or written at least."""
    found, wanted = mine(*given), torchs(*given)
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        close(f"rows: {name} {count} x {width}, result {index}", one, other, 1e-2)
    torch._dynamo.reset()
    compiled = torchs if DRY else torch.compile(torchs, dynamic=False)
    runs: Timed = {"ours": lambda: mine(*given), "torch.compile": lambda: compiled(*given)}
    compare(f"rows: {name} {count} x {width}", 0.0, runs, gbytes=tensors * given[0].nbytes / 1e9)


Case = tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...], int]


def norm(count: int, width: int) -> Case:
    x, residual, weight = make(count, width), make(count, width), make(width)

    def torchs(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        s = x + residual
        return F.rms_norm(s.float(), (width,), weight.float(), 1e-5).to(x.dtype), s

    return lambda a, b, w: op.rms_norm(a, b, w, 1e-5)[:2], torchs, (x, residual, weight), 4


def norm_backward(count: int, width: int) -> Case:
    grad, s, weight = make(count, width), make(count, width), make(width)
    r = (s.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    return (
        lambda g, s, w, r: op.rms_norm_backward(g, None, s, w, r),
        lambda g, s, w, r: op.rms_norm_backward_by_torch(g, None, s, w, r),
        (grad, s, weight, r),
        3,
    )


def gate(count: int, width: int) -> Case:
    return (
        lambda g, u: (op.swiglu(g, u),),
        lambda g, u: (op.swiglu_by_torch(g, u),),
        (make(count, width), make(count, width)),
        3,
    )


def gate_backward(count: int, width: int) -> Case:
    given = tuple(make(count, width) for _ in range(3))
    return op.swiglu_backward, op.swiglu_backward_by_torch, given, 5


def rotation(count: int, width: int) -> Case:
    size = 16 if DRY else 128
    x = make(1, count, width // size, size).transpose(1, 2)
    cos, sin = make(1, count, size), make(1, count, size)
    return (
        lambda x, c, s: (op.rotary(x, c, s, False),),
        lambda x, c, s: (op.rotary_by_torch(x, c, s, False),),
        (x, cos, sin),
        2,
    )
