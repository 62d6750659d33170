"""What a matrix product allocates for itself on a CPU, beyond its operands and its result.

It depends on the instruction set, not on shapes alone: for 16-bit operands oneDNN keeps fp32 sums of the
whole result where there are no 16-bit instructions (measured: 4 M N bytes, AVX512-VNNI), re-orders the second
operand, padded, where there are tiles (AMX: 2 · 32⌈K/32⌉ N), and none of it with AVX2. So it is measured
wherever it can be: the very product is run once under the allocator's trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, fx

from effcompile.core import torch_compat, torch_compat_memory

__all__ = ["Product", "Scratch", "bounded", "measured", "of_node", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`out (M, N) = a (M, K) @ b (K, N)`; with `bias` (N) added, or `accumulate` onto what is in `out`.

    Attributes:
        strides: of a, b and out, which say which of them are transposed.
    """

    m: int
    k: int
    n: int
    dtype: torch.dtype
    strides: tuple[tuple[int, ...], ...]
    device: str
    bias: bool = False
    accumulate: bool = False

    @staticmethod
    def of(
        a: Tensor, b: Tensor, out: Tensor, *, device: str, bias: bool = False, accumulate: bool = False
    ) -> Product:
        """The product of these tensors, real, fake or on the meta device, where it will run on `device`."""
        (m, k), n = map(int, a.shape), int(b.shape[1])
        strides = tuple(tuple(map(int, t.stride())) for t in (a, b, out))
        return Product(
            m=m, k=k, n=n, dtype=a.dtype, strides=strides, device=device, bias=bias, accumulate=accumulate
        )


#: Bytes that a product allocates for itself.
Scratch = Callable[[Product], int]


def unknown(product: Product) -> int:
    """Nothing: for whoever has measured the whole operator that holds the product."""
    return 0


def measured(product: Product) -> int:
    """Bytes by the allocator's trace on this machine, of a warm call; 0 for what is on no CPU.

    Each product is run once in a process.
    """
    return (
        _measured(product, (torch.get_num_threads(), torch.get_float32_matmul_precision()))
        if product.device == "cpu"
        else 0
    )


@cache
def _measured(product: Product, settings: tuple[object, ...]) -> int:
    call = _call(product)
    with torch.no_grad():
        call()  # the first one may also keep what later ones use again
        with torch_compat_memory.watched_memory("cpu") as peak:
            call()
    return peak()


def _call(product: Product) -> Callable[[], object]:
    m, k, n = product.m, product.k, product.n
    shapes = ((m, k), (k, n), (m, n))
    dtypes = (product.dtype, product.dtype, torch.int32 if product.dtype == torch.int8 else product.dtype)
    a, b, out = (
        _zeros(shape, strides, dtype)
        for shape, strides, dtype in zip(shapes, product.strides, dtypes, strict=True)
    )
    if product.accumulate:
        return partial(out.addmm_, a, b)
    if product.bias:
        return partial(torch.addmm, torch.zeros(n, dtype=product.dtype), a, b, out=out)
    return partial(torch_compat.int_mm if product.dtype == torch.int8 else torch.mm, a, b, out=out)


def _zeros(shape: tuple[int, int], strides: Iterable[int], dtype: torch.dtype) -> Tensor:
    strides = tuple(strides)
    extent = (
        0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    )
    return torch.zeros(extent, dtype=dtype).as_strided(shape, strides)


def bounded(product: Product) -> int:
    """A margin for a CPU that is not here, whose instruction set is not known: the sum of all that oneDNN was
    seen to allocate.

    fp32 sums of the result and both operands padded to whole tiles (32 by 64), for 16 bits; nothing for wider
    numbers, whose products take their buffers from elsewhere than torch's allocator. Operands in fp16 are
    copied in fp32 where AVX512-FP16 is there and tiles of fp16 are not.
    """
    if product.dtype not in (torch.bfloat16, torch.float16):
        return 0
    rows, columns, depth = _up(product.m, 32), _up(product.n, 64), _up(product.k, 32)
    width = 4 if product.dtype == torch.float16 else 2
    return 4 * rows * columns + width * depth * (rows + columns) + _SMALL


#: What was seen beside: alignment, and sums per thread.
_SMALL = 1 << 16


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def of_node(node: fx.Node) -> Iterator[Product]:
    """The matrix product that a node of aten's is; nothing for other operators.

    A batch of them shares its buffers.
    """
    where = OPERANDS.get(node.target)
    if where is None:
        return
    a, b, out = (_matrix(argument) for argument in (node.args[where], node.args[where + 1], node))
    if a is not None and b is not None and out is not None:
        yield Product.of(a, b, out, device=out.device.type)


def _matrix(argument: object) -> Tensor | None:
    """A node's (fake) matrix, or the first one of its batch; None for anything else."""
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    if isinstance(value, Tensor) and value.dim() == 3 and 0 not in value.shape:
        value = value[0]
    return value if isinstance(value, Tensor) and value.dim() == 2 else None


#: aten's products → the place of their first operand.
OPERANDS: dict[object, int] = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten._int_mm.default: 0,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.baddbmm.default: 1,
}
