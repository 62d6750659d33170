"""What a loss head takes beside its results, in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effcompile.ops.loss_head import chunk_rows, row_slices
from effcompile.ops.loss_rows import row_stride, where_for
from effcompile.ops.products import Product, Scratch, measured, unknown
from effcompile.ops.sums import sum_dtype
from effcompile.ops.wide import scratch_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes of the kernels' parts: e bytes per element of x, w of the softmax; stride: elements from row to
    row of compiled kernels' logits, None without any.
    """

    n: int
    v: int
    r: int
    e: int
    w: int
    capped: bool
    stride: int | None

    @property
    def labels(self) -> int:
        """index, ignored, factor, count, and 16 bytes for scalars that come and go."""
        return self.n * (8 + 1 + self.w) + 8 + 16

    def chunk(self, *, backward: bool) -> int:
        """wide, narrow, tanh; or narrow alone, by compiled kernels."""
        if self.stride is not None:
            return self.r * self.stride * self.e
        return (
            self.r
            * self.v
            * (self.w + (self.e if self.e != self.w else 0) + (self.w if self.capped and backward else 0))
        )

    def bias(self, wanted: bool) -> int:
        """row, and the sum where that is not the result itself."""
        return (self.v * self.w * (1 if self.e == self.w else 2)) if wanted else 0


def workspace_bytes(name: str, args: Sequence[object], scratch: Scratch = measured) -> int | None:
    """Bytes alive at the highest instant inside one of these operators, beyond its inputs and its outputs.

    The last chunk's size does not matter, the first is the largest. The formula is the list of what the
    kernels of loss_head.py allocate, and what their products take for themselves: never below the CPU
    allocator's trace, and at most 16 bytes above.

    Args:
        name: "effcompile::loss_head_gradients" (an OpOverload's `name()` without ".default").
        args: the operator's arguments, tensors real or fake.
        scratch: what a product takes for itself; all else of the operator is alive then. A margin for
            another machine is one for an operator without compiled kernels.

    Returns:
        None when the operator is not one of these.
    """
    kind = name.removeprefix("effcompile::loss_head_")
    if kind == name or kind not in ("gradients", "forward", "backward"):
        return None
    given = list(args[1:] if kind == "backward" else args)
    x, weight, bias = given[:3]
    capped, chunks = given[9:11] if kind == "backward" else given[8:10]
    assert isinstance(x, Tensor) and isinstance(weight, Tensor) and isinstance(chunks, int)
    n, v = int(x.shape[0]), int(weight.shape[0])
    needs = given[-1] if kind != "forward" else (False, False, False)
    assert isinstance(needs, Sequence)
    of_bias, here = bool(needs[2]) and bias is not None, scratch in (measured, unknown)
    compiled = here and where_for(x, capped=bool(capped), bias=of_bias) is not None
    sizes = _Sizes(
        n=n, v=v, r=chunk_rows(n, chunks), e=x.element_size(), w=sum_dtype(x).itemsize, capped=bool(capped),
        stride=row_stride(v, x.dtype) if compiled else None,
    )  # fmt: skip
    of_products = max(
        map(scratch_of(scratch), _products(x, weight, bias is not None, chunks, needs, sizes.stride or v)),
        default=0,
    )
    if kind == "forward":
        return sizes.labels + n * sizes.w + sizes.chunk(backward=False) + of_products
    picked = n * sizes.w if kind == "gradients" else 0
    return sizes.labels + picked + sizes.chunk(backward=True) + sizes.bias(of_bias) + of_products


def _products(
    x: Tensor, weight: Tensor, bias: bool, chunks: int, needs: Sequence[bool], stride: int
) -> Iterator[Product]:
    """The distinct products of `_Chunk.logits` and `_Gradients.add`, of the whole chunks and of
    the last one; `stride`: elements from row to row of the logits.
    """
    rows = int(x.shape[0])
    for part in dict.fromkeys(chunk.stop - chunk.start for chunk in row_slices(rows, chunks)):
        given, logits = x[:part], x.new_empty((part, stride), device="meta")[:, : weight.shape[0]]
        yield Product.of(given, weight.t(), logits, bias=bias, device=x.device.type)
        if needs[0]:
            yield Product.of(
                logits, weight, given.new_empty(given.shape, device="meta"), device=x.device.type
            )
        if needs[1]:
            like = torch.empty_like(weight, device="meta")
            yield Product.of(logits.t(), given, like, device=x.device.type)
            if part < rows:
                yield Product.of(logits.t(), given, like, accumulate=True, device=x.device.type)
