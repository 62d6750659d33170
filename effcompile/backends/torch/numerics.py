"""The arithmetic of each precision in plain aten calls: written once, traced into graphs and timed on its
own.

u8 activations are affine, q = round(x / scale) + zero, s8 weights symmetric; oneDNN computes in s32 and
returns fp32. Ranges always include 0, so that padding stays exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from effcompile.core import torch_compat
from effcompile.core.reasons import Reason, Unsupported
from effcompile.core.torch_compat_narrow import has_bf16_products, products_saturate
from effcompile.ir.formats import (
    BF16,
    INT8_CHANNEL,
    INT8_DYNAMIC,
    INT8_STATIC,
    INT8_TOKEN,
    INT13_TOKEN,
    LINEAR_FORMATS,
    TABLE_INT8,
    TABLE_INT8_GROUPS,
    TABLE_INT8_ROWS,
    W8,
    WeightFormat,
)
from effcompile.machine.target import KernelCall
from effcompile.ops import group_codes, group_linear, int8_linear, int13_linear

aten = torch.ops.aten
#: Of a table's codes, its scales and ids: rows in fp32.
LookUp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

#: Columns of K that may share a scale in `_weight_int4pack_mm_for_cpu`.
_W4_GROUPS = (32, 64, 128, 256)
#: N must be a multiple of this for int4 packing (16 columns per tile, two values per byte).
W4_COLUMNS = 32
_ROWS_AT_ONCE = 256


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
    return quantize_with(x, 1.0 / scale, float(zero))


def quantize_with(x: torch.Tensor, inverse: float | torch.Tensor, zero: float | torch.Tensor) -> torch.Tensor:
    """The same of the inverse of a scale, either as a number or as a tensor with one for each column."""
    q = aten.add.Tensor(aten.round.default(aten.mul.Tensor(x, inverse)), zero)
    return aten.to.dtype(aten.clamp.default(q, 0.0, 255.0), torch.uint8)


def quantize_weight(weight: torch.Tensor, *, per_channel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(s8 (N, K), fp32 scales (N,) or (1,)) of an (N, K) weight, with the ranges that torch's own observers
    choose.
    """
    observer = torch_compat.weight_observer(per_channel=per_channel)
    observer(weight)
    scale, _ = observer.calculate_qparams()
    scale = scale.to(torch.float32).reshape(-1)
    q = torch.clamp(torch.round(weight / scale[:, None]), -128, 127).to(torch.int8)
    return q.contiguous(), scale


def quantize_w8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(s8 (N, K), bf16 scales (N,)); the codes are those of the rounded scales."""
    _, exact = quantize_weight(weight, per_channel=True)
    scale = exact.to(torch.bfloat16)
    q = torch.clamp(torch.round(weight / scale.float()[:, None]), -128, 127).to(torch.int8)
    return q.contiguous(), scale


def quantize_w4(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed 4-bit weight, (K/group, N, 2) bf16 of scale and zero), where w ≈ (q − 8) · scale + zero, q in
    0…15.

    Symmetric, as every backend has it: zero is 0, and the scale makes the value of largest magnitude −8.
    """
    n, k = weight.shape
    groups = weight.reshape(n, k // group, group)
    low, high = groups.amin(2), groups.amax(2)
    scale = torch.where(high > -low, high, low).div(-8.0).to(torch.bfloat16)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    q = torch.round(groups / scale.float()[..., None]) + 8.0
    q = q.clamp(0, 15).to(torch.int32).reshape(n, k)
    packed = aten._convert_weight_to_int4pack_for_cpu(q, 1)
    return packed, torch.stack([scale, torch.zeros_like(scale)], dim=2).transpose(0, 1).contiguous()


def quantize_rows(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(s8 (V, C), fp32 scales (V, 1)) of an embedding table, or of a weight (N, K)."""
    codes = torch.empty(table.shape, dtype=torch.int8, device=table.device)
    scales = torch.empty((len(table), 1), dtype=torch.float32, device=table.device)
    # what is made of some at a time stays in the cache
    some = (each.split(_ROWS_AT_ONCE) for each in (table, codes, scales))
    for rows, code, scale in zip(*some, strict=True):
        scale.copy_((rows.abs().amax(1, keepdim=True) / 127.0).clamp(min=1e-12))
        code.copy_((rows / scale).round_().clamp_(-127, 127))
    return codes, scales


def lookup_int8(table: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """fp32 rows of an int8 table."""
    rows = aten.to.dtype(aten.embedding.default(table, ids), torch.float32)
    return aten.mul.Tensor(rows, aten.embedding.default(scale, ids))


def coded_table(table: torch.Tensor, held: WeightFormat) -> tuple[torch.Tensor, torch.Tensor, LookUp] | None:
    """A table's codes and scales in a form, and what looks its rows up; None where it is held as it is."""
    if held == TABLE_INT8_GROUPS:
        return *group_codes.quantize(table.detach(), held.bits), lookup_groups(table.shape[1])
    return (*quantize_rows(table.detach()), lookup_int8) if held == TABLE_INT8_ROWS else None


def lookup_groups(width: int) -> LookUp:
    """What looks up fp32 rows of a table of so many columns in codes, with a scale for each group of them
    (`group_codes.quantize`).
    """

    def rows_of(table: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = aten.to.dtype(aten.embedding.default(table, ids), torch.float32)
        by_group = aten.to.dtype(aten.embedding.default(scales, ids), torch.float32)
        whole = aten.repeat_interleave.self_int(by_group, group_codes.GROUP, -1)
        return aten.mul.Tensor(rows, aten.slice.Tensor(whole, -1, 0, width))

    return rows_of


def why_not(held: WeightFormat, m: int, k: int, n: int) -> Reason | None:
    """None, or why torch has no such linear; on this machine, where the lack is this machine's."""
    if held.family not in LINEAR_FORMATS or held.family == W8.family:
        instead = "; its 8-bit weights have a scale per output channel: w8_channel" if held.bits == 8 else ""
        return Unsupported("torch has no linear '{name}'" + instead, (held.name,))
    if held.family == "fp32":
        return None
    if held == INT8_TOKEN:
        return int8_linear.refusal(k)
    if held == INT13_TOKEN:
        return int13_linear.refusal(m)
    if held.activation == "int8 groups":
        return group_linear.refusal(held.group)
    if held.group and held.group not in _W4_GROUPS:
        return Unsupported(
            "torch's 4-bit weights come in groups of {name}, not of {}",
            (", ".join(map(str, _W4_GROUPS)), held.group),
        )
    if held.family == "w4" and (k % held.group or n % W4_COLUMNS):
        return Unsupported(
            "4-bit weights need K a multiple of {} and N of {}; here K = {}, N = {}",
            (held.group, W4_COLUMNS, k, n),
        )
    if held.family == "w8_channel" and k % 16:
        return Unsupported(
            "torch's 8-bit weight-only kernel crashes where K is no multiple of 16; here K = {}", (k,)
        )
    if not torch_compat.has_onednn():
        return Unsupported("this torch was built without oneDNN")
    if "int8" in held.activation and not held.group and not torch_compat.has_onednn_int8():
        return Unsupported("this torch has no oneDNN int8 linear")
    operator = {"w8_channel": "_weight_int8pack_mm", "w4": "_weight_int4pack_mm_for_cpu"}.get(held.family)
    there = operator is None or hasattr(aten, operator)
    return (
        None
        if there
        else Unsupported("this torch has no linear with weights in {} bits on CPU", (held.bits,))
    )


def not_here(held: WeightFormat) -> Reason | None:
    """None, or why this processor has no such linear, though others have."""
    if held == BF16 and not has_bf16_products():
        return Unsupported("oneDNN has no bf16 products on this processor")
    if held in (INT8_DYNAMIC, INT8_CHANNEL, INT8_STATIC) and products_saturate():
        return Unsupported(
            "oneDNN cuts sums of int8 products at 16 bits on this processor, which has no VNNI; "
            "int8_token does not"
        )
    return None


def lacks(call: KernelCall) -> Reason | None:
    """See `backends.base.Backend.lacks`."""
    held = call.format
    if held is None:
        return None
    if call.kernel.startswith("embedding/"):
        return (
            Unsupported("torch's tables of 8 bits have scales per row: int8_rows, int8_row_groups")
            if held == TABLE_INT8
            else None
        )
    m, k, n = call.dims[:3]
    return why_not(held, m, k, n)
