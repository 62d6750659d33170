"""The numerics of each precision, emulated in fp32: what a backend's quantiser does to weights and
activations.

Rules as in ONNX Runtime, which quantises in the lowered model: symmetric s8 weights with scale max|w| / 127
(`onnxruntime.quantization.quant_utils.compute_scale_zp`), u8 activations by the ONNX operator
DynamicQuantizeLinear, and weight-only groups along K with scale = (the value of largest magnitude, with its
sign) / −2^(bits−1) (`quantize_matmul_4bits` / `_8bits`). Tests compare each with the library.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from effcompile.ir.formats import WeightFormat
from effcompile.ops import group_codes, int8_codes, int13_codes

#: Weights that are rounded at a time.
_AT_ONCE = 1 << 18
#: Range of a tensor: (least, greatest).
Range = tuple[float, float]


def per_tensor(w: torch.Tensor, peak: float | None = None) -> torch.Tensor:
    """s8 with one scale. `peak`: the largest magnitude to scale by, where other tensors share the scale."""
    scale = (peak_of(w) if peak is None else peak) / 127
    return torch.div(w, scale).round_().mul_(scale) if scale > 0 else w


def peak_of(w: torch.Tensor) -> float:
    """The largest magnitude."""
    low, high = range_of(w)
    return max(-low, high)


def per_channel(w_nk: torch.Tensor, most: int = 127) -> torch.Tensor:
    """s8, or codes of another largest magnitude, with one scale per row."""
    scale = _largest(w_nk, 1).div_(most)
    scale[scale == 0] = 1
    return torch.div(w_nk, scale).round_().mul_(scale)


def _largest(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The largest magnitude along a dimension, which is kept; nothing of x's size is made for it, as |x|
    would be.
    """
    return torch.maximum(x.amax(dim, keepdim=True), x.amin(dim, keepdim=True).neg_())


def grouped(w_nk: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Signed `bits`-bit weights in groups along K; the value of largest magnitude is exact.

    K must be a multiple of the group.
    """
    groups = w_nk.reshape(w_nk.shape[0], -1, group_size)
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    half = 2 ** (bits - 1)
    scale = torch.where(high > -low, high, low).div_(-half)
    scale[scale == 0] = 1
    return torch.div(groups, scale).round_().clamp_(-half, half - 1).mul_(scale).view(w_nk.shape)


def block_int8(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """s8 activations with one scale per group along the last axis, as MatMulNBits rounds them at
    accuracy_level 4.
    """
    groups = x.reshape(*x.shape[:-1], -1, group_size)
    scale = _largest(groups, -1).div_(127)
    scale[scale == 0] = 1
    return torch.div(groups, scale).round_().mul_(scale).view(x.shape)


def bf16(x: torch.Tensor) -> torch.Tensor:
    """Rounded to bf16 and back."""
    return x.to(torch.bfloat16).to(x.dtype)


def rows(x: torch.Tensor) -> torch.Tensor:
    """8 bits with a scale for each row of the last axis."""
    return per_channel(x.reshape(-1, x.shape[-1])).view(x.shape)


def lowered_rows(x: torch.Tensor) -> torch.Tensor:
    """The same of codes that are lowered by the middle of their row."""
    codes, scales, lower = int8_codes.lowered_codes(x.reshape(-1, x.shape[-1]))
    return codes.add_(lower).mul_(scales).view(x.shape)


def range_of(x: torch.Tensor) -> Range:
    """Least and greatest value, 0 included so that it is represented exactly."""
    low, high = torch.aminmax(x)
    return min(float(low), 0.0), max(float(high), 0.0)


def uint8(x: torch.Tensor, within: Range | None = None) -> torch.Tensor:
    """u8 with a zero point, over the tensor's own range (dynamic) or a given one (static: values outside
    saturate).
    """
    low, high = within or range_of(x)
    scale = (high - low) / 255
    if scale == 0:
        return x
    zero = round(min(max(-low / scale, 0.0), 255.0))
    return torch.div(x, scale).round_().add_(zero).clamp_(0, 255).sub_(zero).mul_(scale)


def weight(w_nk: torch.Tensor, held: WeightFormat, peak: float | None = None) -> torch.Tensor:
    """A linear's weight as the format stores it. `peak`: see `per_tensor`."""
    if held.activation == "int8 groups":
        return group_codes.rounded(w_nk, held.bits)
    if held.scale == "group":
        return _some_rows_at_once(lambda rows: grouped(rows, held.bits, held.group), w_nk)
    if held.scale == "tensor":
        peak = peak_of(w_nk) if peak is None else peak
        return _some_rows_at_once(lambda rows: per_tensor(rows, peak), w_nk)
    if held.scale == "channel":
        return _some_rows_at_once(lambda rows: per_channel(rows, _most(held)), w_nk)
    return _some_rows_at_once(bf16, w_nk) if held.bits == 16 else w_nk


def _some_rows_at_once(rounded: Callable[[torch.Tensor], torch.Tensor], w_nk: torch.Tensor) -> torch.Tensor:
    """What rounds each row by itself, of so many rows at a time that what it makes meanwhile stays in the
    cache: the same numbers.
    """
    made = torch.empty_like(w_nk, memory_format=torch.contiguous_format)
    some = max(1, _AT_ONCE // max(1, w_nk[:1].numel()))
    for rows, place in zip(w_nk.split(some), made.split(some), strict=True):
        place.copy_(rounded(rows))
    return made


def activation(x: torch.Tensor, held: WeightFormat, within: Range | None) -> torch.Tensor:
    """What a linear in this format multiplies. `within`: the range that a static one is fixed to."""
    if held.activation == "bf16":
        return bf16(x)
    if held.activation in ("int8 rows", "int13 rows"):
        return per_channel(x.reshape(-1, x.shape[-1]), _most(held)).view(x.shape)
    if held.activation in ("int8 blocks", "int8 groups"):
        return block_int8(x, held.group)
    return x if held.activation == "as given" else uint8(x, within)


def _most(held: WeightFormat) -> int:
    return int13_codes.MOST if held.activation == "int13 rows" else 127


def table_rows(rows: torch.Tensor, held: WeightFormat, within: Range) -> torch.Tensor:
    """Rows of a table (…, width) in this format. `within`: the range of the whole table."""
    if held.scale == "tensor":
        return uint8(rows, within)
    flat = rows.reshape(-1, rows.shape[-1])
    return (group_codes.rounded(flat, held.bits) if held.scale == "group" else per_channel(flat)).view(
        rows.shape
    )
