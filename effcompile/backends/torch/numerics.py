"""The arithmetic of each precision in plain aten calls: written once, traced into graphs and timed on its own.

u8 activations are affine, q = round(x / scale) + zero, s8 weights symmetric; oneDNN computes in s32 and returns fp32.
Ranges always include 0, so that padding stays exact.
"""

from __future__ import annotations

import torch

from effcompile.core import torch_compat

aten = torch.ops.aten

#: Columns of K that share a scale in w4. `_weight_int4pack_mm_for_cpu` takes 32, 64, 128 or 256.
W4_GROUP = 32
#: N must be a multiple of this for int4 packing (16 columns per tile, two values per byte).
W4_COLUMNS = 32


def quantize_dynamic(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(u8 of x's shape, scale fp32 scalar, zero i32 scalar) from the range of this very tensor."""
    low = aten.clamp.default(aten.amin.default(x), None, 0.0)
    high = aten.clamp.default(aten.amax.default(x), 0.0)
    scale = aten.clamp.default(aten.mul.Tensor(aten.sub.Tensor(high, low), 1.0 / 255.0), 1e-12)
    inverse = aten.reciprocal.default(scale)
    zero = aten.neg.default(aten.round.default(aten.mul.Tensor(low, inverse)))
    q = aten.add.Tensor(aten.round.default(aten.mul.Tensor(x, inverse)), zero)
    q = aten.to.dtype(aten.clamp.default(q, 0.0, 255.0), torch.uint8)
    return q, scale, aten.to.dtype(zero, torch.int32)


def quantize_static(x: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
    """u8 of x's shape; values outside the calibrated range saturate."""
    q = aten.add.Tensor(aten.round.default(aten.mul.Tensor(x, 1.0 / scale)), float(zero))
    return aten.to.dtype(aten.clamp.default(q, 0.0, 255.0), torch.uint8)


def quantize_weight(weight: torch.Tensor, *, per_channel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(s8 (N, K), fp32 scales (N,) or (1,)) of an (N, K) weight, with the ranges that torch's own observers choose."""
    observer = torch_compat.weight_observer(per_channel=per_channel)
    observer(weight)
    scale, _ = observer.calculate_qparams()
    scale = scale.to(torch.float32).reshape(-1)
    q = torch.clamp(torch.round(weight / scale[:, None]), -128, 127).to(torch.int8)
    return q.contiguous(), scale


def quantize_w4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed 4-bit weight, (K/32, N, 2) bf16 of scale and zero), where w ≈ (q − 8) · scale + zero, q in 0…15."""
    n, k = weight.shape
    groups = weight.reshape(n, k // W4_GROUP, W4_GROUP)
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / 15.0).clamp(min=1e-9)
    zero = low + 8.0 * scale
    scale, zero = scale.to(torch.bfloat16), zero.to(torch.bfloat16)
    q = torch.round((groups - zero.float()[..., None]) / scale.float()[..., None]) + 8.0
    q = q.clamp(0, 15).to(torch.int32).reshape(n, k)
    packed = aten._convert_weight_to_int4pack_for_cpu(q, 1)
    return packed, torch.stack([scale, zero], dim=2).transpose(0, 1).contiguous()


def quantize_rows(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(s8 (V, C), fp32 scales (V, 1)) of an embedding table."""
    scale = (table.abs().amax(1, keepdim=True) / 127.0).clamp(min=1e-12).to(torch.float32)
    return torch.clamp(torch.round(table / scale), -127, 127).to(torch.int8), scale


def lookup_int8(table: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """fp32 rows of an int8 table."""
    rows = aten.to.dtype(aten.embedding.default(table, ids), torch.float32)
    return aten.mul.Tensor(rows, aten.embedding.default(scale, ids))


def why_not(option: str, m: int, k: int, n: int) -> str | None:
    """None, or why this machine's torch has no such linear."""
    if option == "fp32":
        return None
    if not torch_compat.has_onednn():
        return "this torch was built without oneDNN"
    if option.startswith("int8") and not torch_compat.has_onednn_int8():
        return "this torch has no oneDNN int8 linear"
    if option == "w8" and not hasattr(aten, "_weight_int8pack_mm"):
        return "this torch has no 8-bit weight-only linear"
    if option == "w8" and k % 16:
        return f"torch's 8-bit weight-only kernel crashes where K is no multiple of 16; here K = {k}"
    if option == "w4" and not hasattr(aten, "_weight_int4pack_mm_for_cpu"):
        return "this torch has no 4-bit weight-only linear on CPU"
    if option == "w4" and (k % W4_GROUP or n % W4_COLUMNS):
        return f"4-bit weights need K a multiple of {W4_GROUP} and N of {W4_COLUMNS}; here K = {k}, N = {n}"
    return None if option in OPTIONS else f"torch has no linear {option!r}"


#: The options of a linear, in the words of the plan.
OPTIONS = ("fp32", "bf16", "int8_dynamic", "int8_channel", "int8_static", "w8", "w4")
