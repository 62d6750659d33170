"""Values in 8 bits between forward and backward: per group of 256 elements a least value, a step, and a code for each.

x ≈ low + code · step with step = (high − low) / 255 and code = round((x − low) / step), to the nearest even: deterministic,
and wrong by at most half a step (activation compressed training: ActNN, arXiv 2104.14129; GACT, arXiv 2206.11357, whose
rounding is random, so that the gradient's mean is exact; here its error is measured instead). Elements are taken in the
order of memory, so x must be dense. Packed: (low, step) of all groups in fp32, then the codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["GROUP", "compress", "decompress", "packed_bytes", "parts", "workspace_bytes"]

GROUP = 256
_COMPRESS, _DECOMPRESS = "effcompile::compress8", "effcompile::decompress8"
_SLAB = {"cpu": 1 << 17}  # elements at a time, in fp32
_LARGE_SLAB = 1 << 24


def packed_bytes(count: int) -> int:
    """Bytes of `count` elements when packed."""
    return 8 * -(-count // GROUP) + count


@torch.library.custom_op(_COMPRESS, mutates_args=())
def compress(x: Tensor, stride: list[int]) -> Tensor:
    """A tensor of floats, packed: uint8 (packed_bytes(numel),). With other strides than those given, it is first copied to them."""
    if list(x.stride()) != stride:
        x = x.new_empty_strided(tuple(x.shape), tuple(stride)).copy_(x)
    packed = torch.empty(packed_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    steps_G2, codes = parts(packed, x.numel())  # noqa: N806
    flat = x.as_strided((x.numel(),), (1,))
    work = torch.empty(min(x.numel(), _slab(x)), dtype=torch.float32, device=x.device)
    for begin, end, width in _slabs(x.numel(), _slab(x)):
        values = work[: end - begin].copy_(flat[begin:end]).view(-1, width)
        _encode(values, steps_G2[begin // GROUP : -(-end // GROUP)])
        codes[begin:end].view(-1, width).copy_(values)
    return packed


@compress.register_fake
def _(x, stride):  # type: ignore[no-untyped-def]
    return x.new_empty(packed_bytes(x.numel()), dtype=torch.uint8)


@torch.library.custom_op(_DECOMPRESS, mutates_args=())
def decompress(packed: Tensor, size: list[int], stride: list[int], dtype: torch.dtype) -> Tensor:
    """A dense tensor of this size, stride and dtype from what `compress` made of it."""
    x = torch.empty_strided(size, stride, dtype=dtype, device=packed.device)
    steps_G2, codes = parts(packed, x.numel())  # noqa: N806
    flat = x.as_strided((x.numel(),), (1,))
    own = dtype == torch.float32  # decoded where it belongs
    work = flat if own else torch.empty(min(x.numel(), _slab(x)), dtype=torch.float32, device=x.device)
    for begin, end, width in _slabs(x.numel(), _slab(x)):
        part = work[begin:end] if own else work[: end - begin]
        steps = steps_G2[begin // GROUP : -(-end // GROUP)]
        part.copy_(codes[begin:end]).view(-1, width).mul_(steps[:, 1:]).add_(steps[:, :1])
        if not own:
            flat[begin:end].copy_(part)
    return x


@decompress.register_fake
def _(packed, size, stride, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_strided(size, stride, dtype=dtype, device=packed.device)


def _encode(values: Tensor, steps_G2: Tensor) -> None:  # noqa: N803
    """Write low and step of every row, and turn the rows into codes (still floats), in place."""
    low, high = torch.aminmax(values, dim=1)
    steps_G2[:, 0].copy_(low)
    step = high.sub_(low).div_(255.0)
    steps_G2[:, 1].copy_(step)
    values.sub_(low.unsqueeze(1)).div_(step.masked_fill_(step == 0, 1.0).unsqueeze(1)).round_().clamp_(0.0, 255.0)


def parts(packed: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(low and step of every group (G, 2), codes (count,))."""
    head = 8 * -(-count // GROUP)
    return packed[:head].view(torch.float32).view(-1, 2), packed[head:]


def _slab(x: Tensor) -> int:
    return _SLAB.get(x.device.type, _LARGE_SLAB)


def _slabs(count: int, slab: int) -> list[tuple[int, int, int]]:
    """(begin, end, width of a row) of the parts: whole groups in slabs, then what is left."""
    whole = count // GROUP * GROUP
    parts = [(begin, min(begin + slab, whole), GROUP) for begin in range(0, whole, slab)]
    return [*parts, (whole, count, count - whole)] if count > whole else parts


def workspace_bytes(name: str, args: Sequence[object]) -> int | None:
    """Bytes alive at the highest instant inside `compress` or `decompress`, beyond arguments and result; None for other operators.

    `name` and `args` as in `effcompile.ops.loss_head.workspace_bytes`; x in the strides that are given.
    """
    if name == _COMPRESS:
        x = args[0]
        assert isinstance(x, Tensor)
        part = min(x.numel(), _slab(x))
        return 4 * part + 9 * max(1, part // GROUP) + 16  # low, high, where the step is 0, and scalars
    if name == _DECOMPRESS:
        packed, size, _, dtype = args
        assert isinstance(packed, Tensor) and isinstance(size, (list, tuple))
        count = 1
        for n in size:
            count *= int(n)
        return 0 if dtype == torch.float32 else 4 * min(count, _slab(packed))
    return None
