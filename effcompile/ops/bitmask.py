"""Boolean tensors as bits between forward and backward: eight neighbours in one byte, the first in its lowest
bit; exact.

torch gives each element of a Boolean tensor a byte. Dropout's masks have as many elements as what they fall
on, those of attention's weights the square of the sequence (Gist, ISCA 2018, holds the signs of ReLU in bits,
ActNN, arXiv 2104.14129, dropout's masks). Elements are taken in the order of memory, so x must be dense.

Eight bytes of 0 or 1 are one number of 64 bits. Multiplied by 0x0102040810204080, its highest byte is their
eight bits: byte k stands at bit 8k, its k-th copy goes to bit 56 + k, and no two copies meet, so that nothing
is carried. Back, the byte is copied to all eight, and of the k-th its k-th bit is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from effcompile.ops.slabs import elements, in_strides

__all__ = ["packed_bytes", "to_bits", "to_booleans", "workspace_bytes"]

_GATHER, _COPIES, _OWN_BIT = 0x0102040810204080, 0x0101010101010101, 0x8040201008040201 - (1 << 64)
_SCALARS = 16


def packed_bytes(count: int) -> int:
    """Bytes of `count` elements when packed."""
    return -(-count // 8)


@torch.library.custom_op("effcompile::to_bits", mutates_args=())
def to_bits(x: Tensor, stride: Sequence[int]) -> Tensor:
    """A Boolean tensor, packed: uint8 (packed_bytes(numel),).

    With other strides than those given, it is first copied to them.
    """
    x = in_strides(x, stride)
    count, slab = x.numel(), elements(x)
    packed = torch.empty(packed_bytes(count), dtype=torch.uint8, device=x.device)
    flat = x.as_strided((count,), (1,)).view(torch.uint8)
    work = torch.empty(min(8 * len(packed), slab), dtype=torch.uint8, device=x.device)
    for begin in range(0, count, slab):
        piece = flat[begin : begin + slab]
        part = work[: 8 * packed_bytes(len(piece))]
        part[: len(piece)].copy_(piece).clamp_(max=1)  # a view of other numbers as Booleans has others than 1
        part[len(piece) :].zero_()
        numbers = part.view(torch.int64).mul_(_GATHER).bitwise_right_shift_(56)
        packed[begin // 8 :][: len(numbers)].copy_(numbers)
    return packed


@torch.library.custom_op("effcompile::to_booleans", mutates_args=())
def to_booleans(packed: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The Boolean tensor of this size and stride from what `to_bits` made of it, written where it belongs."""
    x = torch.empty_strided(size, stride, dtype=dtype, device=packed.device)
    whole = x.numel() // 8
    flat = x.as_strided((x.numel(),), (1,)).view(torch.uint8)
    for begin in range(0, whole, elements(packed) // 8):
        end = min(begin + elements(packed) // 8, whole)
        _spread(flat[8 * begin : 8 * end], packed[begin:end])
    if rest := x.numel() % 8:
        last = torch.empty(8, dtype=torch.uint8, device=packed.device)
        _spread(last, packed[whole:])
        flat[8 * whole :].copy_(last[:rest])
    return x


to_bits.register_fake(lambda x, stride: x.new_empty(packed_bytes(x.numel()), dtype=torch.uint8))
to_booleans.register_fake(
    lambda packed, size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=packed.device)
)


def _spread(places: Tensor, codes: Tensor) -> None:
    """Write the bits of each byte to eight bytes."""
    places.view(torch.int64).copy_(codes).mul_(_COPIES).bitwise_and_(_OWN_BIT)
    places.clamp_(max=1)


def workspace_bytes(name: str, args: Sequence[object]) -> int | None:
    """Bytes alive at the highest instant inside `to_bits` or `to_booleans`, beyond arguments and result; None
    for other operators.

    `name` and `args` as in `effcompile.ops.loss_head_workspace.workspace_bytes`; x in the strides that are
    given.
    """
    if name == "effcompile::to_bits":
        x = args[0]
        assert isinstance(x, Tensor)
        return min(8 * packed_bytes(x.numel()), elements(x)) + _SCALARS
    if name == "effcompile::to_booleans":
        size = args[1]
        assert isinstance(size, (list, tuple))
        return _SCALARS + (8 if math.prod(int(n) for n in size) % 8 else 0)
    return None
