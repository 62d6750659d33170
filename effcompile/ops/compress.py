"""Values in 8, 4 or 2 bits between forward and backward: per group of 256 elements a least value, a step, and
a code for each.

x ≈ low + code · step with step = (high − low) / (2^bits − 1) and code = round((x − low) / step), to the
nearest even: deterministic, and wrong by at most half a step (activation compressed training: ActNN, arXiv
2104.14129; Mesa, arXiv 2111.11124; GACT, arXiv 2206.11357, whose rounding is random, so that the gradient's
mean is exact; here its error is measured instead). Elements are taken in the order of memory, so x must be
dense. Packed: (low, step) of all groups in fp32, then the codes, of neighbours in one byte, the first in its
lowest bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from effcompile.ops.slabs import elements, in_strides

__all__ = [
    "BITS",
    "GROUP",
    "OPERATORS",
    "compress",
    "decompress",
    "pack_by_torch",
    "packed_bytes",
    "parts",
    "unpack_by_torch",
    "workspace_bytes",
]

GROUP = 256
BITS = (8, 4, 2)


def packed_bytes(count: int, bits: int = 8) -> int:
    """Bytes of `count` elements when packed."""
    return 8 * -(-count // GROUP) + -(-count * bits // 8)


def pack_by_torch(x: Tensor, stride: list[int], bits: int = 8) -> Tensor:
    """See `compress`, in so many bits."""
    x = in_strides(x, stride)
    packed = torch.empty(packed_bytes(x.numel(), bits), dtype=torch.uint8, device=x.device)
    steps_G2, codes = parts(packed, x.numel())  # noqa: N806
    flat, per = x.as_strided((x.numel(),), (1,)), 8 // bits
    work = torch.empty(min(x.numel(), elements(x)), dtype=torch.float32, device=x.device)
    for begin, end, width in _slabs(x.numel(), elements(x)):
        values = work[: end - begin].copy_(flat[begin:end])
        _encode(values.view(-1, width), steps_G2[begin // GROUP : -(-end // GROUP)], 2.0**bits - 1.0)
        for k in range(1, per):  # bytes are exact in fp32
            above = values[k::per]
            values[::per][: len(above)].add_(above, alpha=2.0 ** (bits * k))
        codes[begin // per : -(-end // per)].copy_(values[::per])
    return packed


def unpack_by_torch(
    packed: Tensor, size: list[int], stride: list[int], dtype: torch.dtype, bits: int = 8
) -> Tensor:
    """See `decompress`, of so many bits."""
    x = torch.empty_strided(size, stride, dtype=dtype, device=packed.device)
    steps_G2, codes = parts(packed, x.numel())  # noqa: N806
    flat, per = x.as_strided((x.numel(),), (1,)), 8 // bits
    own = dtype == torch.float32  # decoded where it belongs
    work = flat if own else torch.empty(min(x.numel(), elements(x)), dtype=torch.float32, device=x.device)
    for begin, end, width in _slabs(x.numel(), elements(x)):
        part = work[begin:end] if own else work[: end - begin]
        steps, mine = steps_G2[begin // GROUP : -(-end // GROUP)], codes[begin // per : -(-end // per)]
        for k in range(per):
            places = part[k::per]
            places.copy_(_bits_of(mine, k, bits)[: len(places)] if per > 1 else mine)
        part.view(-1, width).mul_(steps[:, 1:]).add_(steps[:, :1])
        if not own:
            flat[begin:end].copy_(part)
    return x


def _bits_of(codes: Tensor, k: int, bits: int) -> Tensor:
    """The k-th code of every byte."""
    return codes.bitwise_right_shift(bits * k).bitwise_and_(2**bits - 1)


def _registered(bits: int) -> tuple[Any, Any]:
    """The operators of so many bits."""

    @torch.library.custom_op(f"effcompile::compress{bits}", mutates_args=())
    def pack(x: Tensor, stride: list[int]) -> Tensor:
        """A tensor of floats, packed: uint8 (packed_bytes(numel),).

        With other strides than those given, it is first copied to them.
        """
        return pack_by_torch(x, stride, bits)

    @torch.library.custom_op(f"effcompile::decompress{bits}", mutates_args=())
    def unpack(packed: Tensor, size: list[int], stride: list[int], dtype: torch.dtype) -> Tensor:
        """A dense tensor of this size, stride and dtype from what `pack` made of it."""
        return unpack_by_torch(packed, size, stride, dtype, bits)

    pack.register_fake(lambda x, stride: x.new_empty(packed_bytes(x.numel(), bits), dtype=torch.uint8))
    unpack.register_fake(
        lambda packed, size, stride, dtype: torch.empty_strided(
            size, stride, dtype=dtype, device=packed.device
        )
    )
    return pack, unpack


#: Bits → the operators (x, strides) → packed, and (packed, size, strides, dtype) → the tensor.
OPERATORS = {bits: _registered(bits) for bits in BITS}
compress, decompress = OPERATORS[8]
_NAMES = {f"effcompile::{name}{bits}": (name, bits) for name in ("compress", "decompress") for bits in BITS}


def _encode(values: Tensor, steps_G2: Tensor, levels: float) -> None:  # noqa: N803
    """Write low and step of every row, and turn the rows into codes (still floats), in place."""
    low, high = torch.aminmax(values, dim=1)
    steps_G2[:, 0].copy_(low)
    step = high.sub_(low).div_(levels)
    steps_G2[:, 1].copy_(step)
    values.sub_(low.unsqueeze(1)).div_(step.masked_fill_(step == 0, 1.0).unsqueeze(1)).round_().clamp_(
        0.0, levels
    )


def parts(packed: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(low and step of every group (G, 2), bytes of codes)."""
    head = 8 * -(-count // GROUP)
    return packed[:head].view(torch.float32).view(-1, 2), packed[head:]


def _slabs(count: int, slab: int) -> list[tuple[int, int, int]]:
    """(begin, end, width of a row) of the parts: whole groups in slabs, then what is left."""
    whole = count // GROUP * GROUP
    parts = [(begin, min(begin + slab, whole), GROUP) for begin in range(0, whole, slab)]
    return [*parts, (whole, count, count - whole)] if count > whole else parts


def workspace_bytes(name: str, args: Sequence[object]) -> int | None:
    """Bytes alive at the highest instant inside `compress` or `decompress`, beyond arguments and result; None
    for other operators.

    `name` and `args` as in `effcompile.ops.loss_head_workspace.workspace_bytes`; x in the strides that are
    given.
    """
    operator, bits = _NAMES.get(name, ("", 8))
    if operator == "compress":
        x = args[0]
        assert isinstance(x, Tensor)
        part = min(x.numel(), elements(x))
        return 4 * part + 9 * max(1, part // GROUP) + 16  # low, high, where the step is 0, and scalars
    if operator == "decompress":
        packed, size, _, dtype = args
        assert isinstance(packed, Tensor) and isinstance(size, (list, tuple))
        count, slab = math.prod(int(n) for n in size), elements(packed)
        largest = max((end - begin for begin, end, _ in _slabs(count, slab)), default=0)
        codes = 0 if bits == 8 else -(-largest * bits // 8) + 16  # of one place in each byte, and scalars
        return codes + (0 if dtype == torch.float32 else 4 * min(count, slab))
    return None
