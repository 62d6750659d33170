"""Matrix products of 16-bit operands, computed in float32 and rounded once.

Where a CPU has no 16-bit instructions and oneDNN none to stand in (AVX2), torch multiplies 16-bit matrices in
plain loops: measured on an AMD EPYC with 2 threads, (256, 2560) by (2560, 7040) in bfloat16, 5.3 GFLOP/s for
x Wᵀ, 0.15 for g W and 2.9 for gᵀ x, where in float32, casts included, it is 21 to 24. The sums are those of
the 16-bit kernels, which add in float32 and round once, in another order.

Legend: a (M, K), b (K, N), out (M, N). The smaller operand is cast whole, the other one piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import addmm_flop, mm_flop, register_flop_formula

from effcompile.core import gpu, torch_compat
from effcompile.ops.products import Product, Scratch

__all__ = [
    "linear",
    "mm_into",
    "pays",
    "product_into",
    "product_ratio",
    "scratch_of",
    "takes",
    "wide_addmm",
    "wide_mm",
    "workspace_bytes",
]

#: Rows, inner and columns of the product that is timed: large enough for the kernels of real layers, small
#: enough to be emulated. On a GPU, where small ones are a matter of launches, larger.
_SHAPE, _ON_GPU = (128, 512, 512), (4096, 2048, 2048)
_ROUNDS = 5
#: Times as long as in fp32 from which on a product is cast: casting is a part of it.
_SLOW = 3.0
_NARROW = (torch.bfloat16, torch.float16)
#: Rows up to which a linear on a weight that is held is torch's own: casting the weight takes as long as six
#: rows of its loops do (an EPYC with AVX2, one thread, 768 by 3072).
_FEW = 8
#: Elements of a piece, in float32: 16 MiB.
_PIECE = 1 << 22


@cache
def product_ratio(dtype: torch.dtype, device: str) -> float:
    """Seconds of a product of matrices in `dtype` by those of the same in fp32; inf where there is none in
    it. In int8 it is that of codes, with sums of 32 bits.
    """
    try:
        return _seconds(dtype, device) / _seconds(torch.float32, device)
    except RuntimeError:  # this build of torch has no such kernel
        return float("inf")


def _seconds(dtype: torch.dtype, device: str) -> float:
    rows, inner, columns = _SHAPE if device == "cpu" else _ON_GPU
    a, b = (
        torch.ones(rows, inner, dtype=dtype, device=device),
        torch.ones(inner, columns, dtype=dtype, device=device),
    )
    times, product = [], torch_compat.int_mm if dtype == torch.int8 else torch.mm
    with torch.no_grad(), torch.autocast(device, enabled=False):
        if device == "cuda":
            return gpu.seconds(lambda: product(a, b))
        for _ in range(1 + _ROUNDS):
            start = perf_counter()
            float(product(a, b)[0, 0])  # waits for a device
            times.append(perf_counter() - start)
    return min(times[1:])


def pays(dtype: torch.dtype, device: str) -> bool:
    """Whether products in `dtype` are faster cast to float32 and back, measured once in a process."""
    return device == "cpu" and dtype in _NARROW and product_ratio(dtype, device) > _SLOW


def mm_into(
    out: Tensor, a: Tensor, b: Tensor, *, bias: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """out = a b, with `bias` (N) added, or added to what is in `out` (`accumulate`); rounded once.

    Returns `out`.
    """
    if a.numel() > b.numel():
        wide = b.float()
        for rows in _pieces(a.shape[0], b.shape[1] + a.shape[1]):
            _piece(out[rows], a[rows].float(), wide, bias, accumulate)
        return out
    wide = a.float()
    for columns in _pieces(b.shape[1], a.shape[0] + a.shape[1]):
        _piece(
            out[:, columns], wide, b[:, columns].float(), None if bias is None else bias[columns], accumulate
        )
    return out


def _piece(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, accumulate: bool) -> None:
    found = a @ b
    if accumulate:
        found.add_(out)
    elif bias is not None:
        found.add_(bias)
    out.copy_(found)


def _pieces(count: int, each: int) -> list[slice]:
    """Slices of so many rows or columns, each of which takes `each` elements, so that a piece has at most
    _PIECE of them.
    """
    size = max(1, _PIECE // max(1, each))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def product_into(
    out: Tensor, a: Tensor, b: Tensor, *, bias: Tensor | None = None, accumulate: bool = False
) -> None:
    """As `mm_into` where that pays, else by torch's own product."""
    if pays(a.dtype, a.device.type):
        mm_into(out, a, b, bias=bias, accumulate=accumulate)
    elif accumulate:
        out.addmm_(a, b)
    elif bias is not None:
        torch.addmm(bias, a, b, out=out)
    else:
        torch.mm(a, b, out=out)


def takes(*constants: Tensor | None) -> bool:
    """Whether `linear` has something to gain with such a weight and bias, of one dtype."""
    dtypes = {(each.dtype, each.device.type) for each in constants if each is not None}
    return len(dtypes) == 1 and pays(*next(iter(dtypes)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias for x (..., K) and W (N, K) in 16 bits, in float32 where rows are many."""
    n, k = weight.shape
    many = type(x) is Tensor and x.dtype is weight.dtype and x.shape[-1] == k and x.numel() > _FEW * k
    if not many or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, k)
    return mm_into(flat.new_empty((len(flat), n)), flat, weight.t(), bias=bias).view(*x.shape[:-1], n)


def _workspace(m: int, k: int, n: int, *, bias: bool = False, accumulate: bool = False) -> int:
    """Bytes that `mm_into` has at its highest instant beside its arguments: both factors, the product, and
    what is added, all in fp32.
    """
    small, count, other = (k * n, m, n) if m > n else (m * k, n, m)
    piece = min(count, max(1, _PIECE // max(1, k + other)))
    added = (n if m > n else piece) if bias else piece * other if accumulate else 0
    return 4 * (small + piece * (k + other) + added)


def scratch_of(scratch: Scratch) -> Scratch:
    """What a product takes for itself where it is made by `product_into`; torch's own is
    `scratch`'s to know.
    """

    def bytes_of(product: Product) -> int:
        if not pays(product.dtype, product.device):
            return scratch(product)
        return _workspace(product.m, product.k, product.n, bias=product.bias, accumulate=product.accumulate)

    return bytes_of


def workspace_bytes(name: str, args: Sequence[object]) -> int | None:
    """Bytes alive at the highest instant inside `wide_mm` or `wide_addmm`, beyond its inputs and output; None
    for other operators.
    """
    if name not in ("effcompile::wide_mm", "effcompile::wide_addmm"):
        return None
    a, b = args[-2:]
    assert isinstance(a, Tensor) and isinstance(b, Tensor)
    return _workspace(
        int(a.shape[0]), int(a.shape[1]), int(b.shape[1]), bias=name == "effcompile::wide_addmm"
    )


@torch.library.custom_op("effcompile::wide_mm", mutates_args=())
def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """a b."""
    return mm_into(a.new_empty((a.shape[0], b.shape[1])), a, b)


@torch.library.custom_op("effcompile::wide_addmm", mutates_args=())
def wide_addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a b + bias (N)."""
    return mm_into(a.new_empty((a.shape[0], b.shape[1])), a, b, bias=bias)


@wide_mm.register_fake
def _(a, b):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[1]))


@wide_addmm.register_fake
def _(bias, a, b):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[1]))


register_flop_formula(torch.ops.effcompile.wide_mm)(mm_flop)
register_flop_formula(torch.ops.effcompile.wide_addmm)(addmm_flop)
