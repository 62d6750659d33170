"""Weights and activations as codes in groups of 32, in torch: what the compiled linears (`group_linear.cpp`)
compute.

    W: 4 bits  scale = the value of largest magnitude / −8 or −7.5, codes −8 … 7
       8 bits  scale = max |w| / 127, 126.6 or 127.4, codes −127 … 127
    x:         scale = max |x| / 127                       codes = round(x · (127 / max |x|))
    y = Σ over groups (codes · codes) · (scale of W · scale of x) + bias

Of a group's scales that one is taken which leaves least of its weights. All are rounded to bf16 before codes
are taken: nearly as wide as a code of 8 bits, so that of three one lies well. (Logits of four layers of
Qwen2.5-0.5B's shape, random: with one scale 1.07 and 1.01 times the error of llama.cpp's q8_0 and q4_0, so
1.01 and 0.98.)

Legend: x (M, K), W (N, K), its codes (N, K) of s8 and scales (N, ⌈K/32⌉); packed (⌈N/16⌉, ⌈K/32⌉, 32 + 64 ·
bits) of u8, as told in `group_linear.cpp`: 16 scales, then the codes, raised by half of their range so that
missing rows and columns are 8 or 128.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.machine.instructions import integer_isas
from effcompile.machine.native import library
from effcompile.ops.instruction_sets import ARGUMENT, POINTER, WORDS, best_of
from effcompile.ops.int8_codes import followed, row_codes

__all__ = ["BITS", "GROUP", "bits_of", "linear_by_torch", "pack", "quantize", "rounded", "unpack"]

_SOURCE = Path(__file__).with_name("group_codes.cpp")

GROUP = 32
BITS = (4, 8)
_LANES = 16
#: Bits → what the largest magnitude of a group is divided by, to be tried.
_PARTS = {4: (-8.0, -7.5), 8: (127.0, 126.6, 127.4)}
#: Weights that are rounded at a time: what is made meanwhile stays in the cache.
_AT_ONCE = 1 << 18
#: Bytes of a block's scales.
_SCALES = 2 * _LANES


def quantize(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(codes (N, K) of s8, scales (N, ⌈K/32⌉) of bf16) of a weight (N, K).

    A group with an infinity or NaN has a scale that is none.
    """
    if (made := _coder(weight)) is not None:
        return made.quantize(weight, bits)
    return quantize_by_torch(weight, bits)


def quantize_by_torch(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The same without a compiled kernel, three times as slow."""
    n, k = weight.shape
    scales = weight.new_empty((n, -(-k // GROUP)), dtype=torch.bfloat16)
    codes = weight.new_empty((n, k), dtype=torch.int8)
    some = max(1, _AT_ONCE // max(1, k))
    for at in range(0, n, some):
        rows = slice(at, at + some)
        groups = F.pad(weight[rows].float(), (0, -k % GROUP)).view(-1, scales.shape[1], GROUP)
        scales[rows] = _scales(groups, bits)
        codes[rows] = _codes(groups, scales[rows], bits).flatten(1)[:, :k].to(torch.int8)
    return codes, scales


def _scales(groups: Tensor, bits: int) -> Tensor:
    """Of those that are tried the one that leaves least of each group."""
    low, high = groups.amin(2), groups.amax(2)
    top = torch.where(high > -low, high, low) if bits == 4 else torch.maximum(high, -low)
    found = least = torch.empty(0)
    for part in _PARTS[bits]:
        tried = (top / part).to(torch.bfloat16)
        tried = torch.where(tried == 0, torch.ones_like(tried), tried)
        left = _codes(groups, tried, bits).mul_(tried.float()[..., None]).sub_(groups).square_().sum(2)
        if part != _PARTS[bits][0]:
            better = left < least
            tried, left = torch.where(better, tried, found), torch.where(better, left, least)
        found, least = tried, left
    return found


def _codes(groups: Tensor, scales: Tensor, bits: int) -> Tensor:
    low, high = (-8, 7) if bits == 4 else (-127, 127)
    whole = torch.div(groups, scales.float()[..., None]).round_()
    return whole.nan_to_num_(0.0, 0.0, 0.0).clamp_(low, high)


def rounded(weight: Tensor, bits: int) -> Tensor:
    """A weight (N, K) as its codes and scales stand for it, in its own dtype."""
    if (made := _coder(weight)) is not None:
        return made.rounded(weight, bits)
    codes, scales = quantize(weight, bits)
    return _dequantized(codes, scales).to(weight.dtype)


def _coder(weight: Tensor) -> Coder | None:
    """The kernel, where it takes the weight."""
    plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.device.type == "cpu"
    if not plain or weight.dtype is not torch.float32 or not weight.is_contiguous():
        return None
    found = kernels()
    return None if isinstance(found, str) else found


@functools.cache
def kernels() -> Coder | str:
    """The best kernel that this machine runs, or why there is none."""
    return best_of(Coder, integer_isas())


class Coder:
    """The compiled kernel (`group_codes.cpp`) of one instruction set.

    `instead`: why better sets are not used; "" where there is none.
    """

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when it cannot be compiled."""
        self.isa, self.instead = isa, instead
        self._call = library(_SOURCE, {"WIDTH": WORDS[isa]}, isa).group_codes
        self._call.argtypes = (POINTER, *(ARGUMENT,) * 3, *(POINTER,) * 3, ARGUMENT)
        self._call.restype = None

    def quantize(self, weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        """See the function of this name."""
        codes = torch.empty_like(weight, dtype=torch.int8)
        return codes, self._scales(weight, bits, codes, None)

    def rounded(self, weight: Tensor, bits: int) -> Tensor:
        """See the function of this name."""
        made = torch.empty_like(weight.detach())
        self._scales(weight, bits, None, made)
        return made

    def _scales(self, weight: Tensor, bits: int, codes: Tensor | None, rounded: Tensor | None) -> Tensor:
        n, k = weight.shape
        scales = weight.new_empty((n, -(-k // GROUP)), dtype=torch.bfloat16)
        self._call(
            weight.data_ptr(), n, k, bits, None if codes is None else codes.data_ptr(), scales.data_ptr(),
            None if rounded is None else rounded.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return scales

    def objection(self) -> str | None:
        """None, or that codes or scales are others than torch's: whole groups and rests, zeros, an infinity,
        a NaN. Numbers are such that no two scales leave as good as the same.
        """
        weight = (torch.arange(37 * 71) * 0.37).sin().mul((torch.arange(37 * 71) * 0.011).cos()).view(37, 71)
        weight[0], weight[1, 40], weight[2, 3], weight[3, 70] = 0, torch.inf, torch.nan, -torch.inf
        for bits in BITS:
            ours, right = self.quantize(weight, bits), quantize_by_torch(weight, bits)
            same = torch.equal(ours[0], right[0]) and torch.equal(
                *(each[1].nan_to_num() for each in (ours, right))
            )
            if not same or not torch.equal(
                self.rounded(weight[4:], bits), _dequantized(*(each[4:] for each in right))
            ):
                return f"the compiled {self.isa} kernel gave wrong codes of weights in groups"
        return None


def pack(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Codes and scales in the order in which the kernels read them."""
    n, k = codes.shape
    padded = F.pad(codes, (0, -k % GROUP, 0, -n % _LANES)).view(torch.uint8)
    padded = padded + (1 << bits - 1)  # as bytes wrap
    # (panels, groups, 8, 16, 4), four bytes at a time
    quads = padded.view(torch.int32).view(-1, _LANES, padded.shape[1] // GROUP, GROUP // 4)
    pieces = quads.permute(0, 2, 3, 1).contiguous().view(torch.uint8).unflatten(3, (_LANES, 4))
    if bits == 4:
        pieces = pieces[:, :, :4] | pieces[:, :, 4:] << 4
    held = (
        F.pad(scales, (0, 0, 0, -n % _LANES)).view(-1, _LANES, scales.shape[1]).transpose(1, 2).contiguous()
    )
    return torch.cat([held.view(torch.uint8), pieces.flatten(2)], 2)


def bits_of(packed: Tensor) -> int:
    """Of one code; 0 where no weight of this form has blocks of that size."""
    bits = (packed.shape[2] - _SCALES) // 64 if packed.dim() == 3 else 0
    return (
        bits if bits in BITS and packed.shape[2] == _SCALES + 64 * bits and packed.dtype == torch.uint8 else 0
    )


def unpack(packed: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """The codes and scales that were packed."""
    bits, (panels, groups, _) = bits_of(packed), packed.shape
    scales = (
        packed[:, :, :_SCALES]
        .contiguous()
        .view(torch.bfloat16)
        .transpose(1, 2)
        .reshape(panels * _LANES, groups)
    )
    pieces = packed[:, :, _SCALES:]
    if bits == 4:
        pieces = torch.cat([pieces & 15, pieces >> 4], 2)
    tiles = pieces.view(panels, groups, 8, _LANES, 4).permute(0, 3, 1, 2, 4)
    codes = (tiles.to(torch.int16) - (1 << bits - 1)).to(torch.int8).reshape(panels * _LANES, -1)
    return codes[:n, :k], scales[:n]


def _dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    n, k = codes.shape
    if k % GROUP:
        return codes.float() * scales.float().repeat_interleave(GROUP, 1)[:, :k]
    return codes.float().view(n, -1, GROUP).mul_(scales.float()[..., None]).view(n, k)


def linear_by_torch(x: Tensor, weight: Tensor, n: int, bias: Tensor | None, after: str) -> Tensor:
    """What the kernels compute, slowly: the sums of a group's products are exact."""
    k = x.shape[-1]
    flat = x.reshape(-1, k)
    if not flat.numel():
        return x.new_zeros((*x.shape[:-1], n))
    codes, scales = unpack(weight, n, k)
    groups = F.pad(flat, (0, -k % GROUP)).view(-1, GROUP)
    x_codes, x_scales = row_codes(groups)
    wide = F.pad(codes, (0, -k % GROUP)).view(n, -1, GROUP).float()
    y = flat.new_zeros(len(flat), n)
    for at in range(scales.shape[1]):  # whole numbers below 2^24, so that fp32 holds the sums exactly
        sums = x_codes.view(len(flat), -1, GROUP)[:, at] @ wide[:, at].T
        y += sums * (scales[:, at].float() * x_scales.view(len(flat), -1)[:, at, None])
    return followed(y if bias is None else y + bias, after).view(*x.shape[:-1], n)
