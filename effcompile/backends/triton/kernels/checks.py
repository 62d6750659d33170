"""Which of the interpreter's known defects are there: a self-test of the mend, against torch on the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["defects"]

_N = 32  # elements per side of the matrices tested


def defects() -> tuple[str, ...]:
    """What this process's interpreter computes wrongly, one line each; empty when it is mended."""
    return tuple(line for check in (_arithmetic, _casts, _loops) for line in check())


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _negate(a, b):
    return -a


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _fma(a, b):
    return tl.fma(a, b, a)


@triton.jit
def _dot(a, b):
    return tl.dot(a, b).to(a.dtype)


@triton.jit
def _sum(a, b):
    return tl.broadcast_to(tl.sum(a, 1, keep_dims=True), a.shape)


@triton.jit
def _max(a, b):
    return tl.broadcast_to(tl.max(a, 1, keep_dims=True), a.shape)


@triton.jit
def _cumsum(a, b):
    return tl.cumsum(a, 1)


@triton.jit
def _tile_kernel(a_ptr, b_ptr, out_ptr, OP: tl.constexpr, N: tl.constexpr):
    """out = OP(a, b), all [N, N]."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, OP(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def _cast_kernel(in_ptr, out_ptr, n, N: tl.constexpr):
    """out = in in out's type, [n]."""
    at = tl.arange(0, N)
    value = tl.load(in_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _loop_kernel(bounds_ptr, out_ptr):
    """out = how often a loop between loaded bounds, and one that starts at the program's number, are run."""
    count = 0
    for _ in range(tl.load(bounds_ptr), tl.load(bounds_ptr + 1)):
        count += 1
    for _ in range(tl.program_id(0), 3, tl.num_programs(0)):
        count += 10
    tl.store(out_ptr, count)


_ARITHMETIC: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "+": (_add, lambda a, b: a + b),
    "*": (_multiply, lambda a, b: a * b),
    "negation": (_negate, lambda a, b: -a),
    "compare and where": (_larger, torch.maximum),
    "fma": (_fma, lambda a, b: a * b + a),
    "dot": (_dot, lambda a, b: a @ b),
    "sum": (_sum, lambda a, b: a.sum(1, keepdim=True).expand_as(a)),
    "max": (_max, lambda a, b: a.amax(1, keepdim=True).expand_as(a)),
    "cumsum": (_cumsum, lambda a, b: a.cumsum(1)),
}


def _arithmetic() -> Iterator[str]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(_N, _N, generator=generator).bfloat16() for _ in range(2))
    for name, (op, expected) in _ARITHMETIC.items():
        out = torch.full_like(a, float("nan"))
        _tile_kernel[(1,)](a, b, out, op, _N)
        wanted = expected(a.double(), b.double())
        error = (out.double() - wanted).abs().max() / wanted.abs().max()
        if not error <= 2**-8:  # one rounding to 8 bits
            yield f"bf16 {name}: {error.item():.1e} off"


def _casts() -> Iterator[str]:
    generator = torch.Generator().manual_seed(0)
    values = torch.cat(
        [
            torch.randn(96, generator=generator) * 10.0 ** torch.arange(-4, 2).repeat(16),
            torch.tensor([1.97, 0.4999, 0.0, -0.0]),
        ]
    )
    for source, narrow in (
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e5m2),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
    ):
        given = values.to(source)
        for one, other in ((given, narrow), (given.to(narrow), torch.float32)):
            out = torch.empty(len(one), dtype=other)
            _cast_kernel[(1,)](one, out, len(one), triton.next_power_of_2(len(one)))
            wrong = int((out.double() != one.to(other).double()).sum())
            if wrong:
                yield f"{one.dtype} to {other}: {wrong} of {len(one)} values wrong"


def _loops() -> Iterator[str]:
    out = torch.zeros((), dtype=torch.int32)
    try:
        _loop_kernel[(1,)](torch.tensor([2, 6], dtype=torch.int32), out)
    except Exception as error:  # triton 3.6 with numpy ≥ 2.4
        yield f"range between loaded bounds: {str(error).splitlines()[0][:100]}"
        return
    if int(out) != 34:
        yield f"range between loaded bounds: {int(out)} instead of 34"
