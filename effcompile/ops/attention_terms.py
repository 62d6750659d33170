"""What the attention operators are asked to compute, as one value: checked arguments, and which keys a row
may see.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.core.mask import Mask
from effcompile.ops.devices import one_device
from effcompile.ops.mask import OPERANDS, TILES

#: Dtypes of q, k and v.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms(Mask[Tensor, Tensor, int]):
    """The operators' arguments beside q, k and v, see `effcompile.ops.attention`.

    tiles: (partial_count, partial_index, full_count, full_index) of a `TileList`, or nothing.
    """

    bias: Tensor | None = None
    sink: Tensor | None = None
    tiles: tuple[Tensor, ...] = ()
    scale: float
    softcap: float = 0.0
    block_q: int = 0
    block_k: int = 0
    fills: bool = False

    @classmethod
    def of(cls, *rest: object, **form: object) -> Terms:
        """From the operators' arguments, in their order; the first four lists of tiles are read."""
        given: dict[str, Any] = dict(zip((*OPERANDS, "tiles"), rest, strict=False)) | form
        return cls(**{**given, "tiles": tuple((given.get("tiles") or ())[:4])})


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededGradients:
    """Which gradients are wanted beside those of q, k and v, as the backward's arguments name them."""

    bias_gradient: bool = True
    sink_gradient: bool = True

    @classmethod
    def taken_from(cls, form: Mapping[str, object]) -> tuple[NeededGradients, dict[str, object]]:
        """From the backward's keyword arguments, and the others."""
        ours = {name: bool(form[name]) for name in ("bias_gradient", "sink_gradient") if name in form}
        return cls(**ours), {name: value for name, value in form.items() if name not in ours}


ALL_WANTED = NeededGradients()


def sink_rows(sink: Tensor) -> Tensor:
    """A sink as (B, H, Sq), each axis full or 1."""
    return sink[None, :, None] if sink.dim() == 1 else sink


def visible(
    terms: Terms, batch: slice, heads: slice, rows: slice, keys: slice, device: torch.device
) -> Tensor | None:
    """Which of these keys these rows see by all terms but the tiles: bool, broadcastable to (b, h, rows,
    keys); None when all.

    The slices have their bounds.
    """
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=device)
    parts: list[Tensor] = []
    if terms.lo is not None and keys.start - (rows.stop - 1) < terms.lo:
        parts.append((j >= i + terms.lo)[None, None])
    if terms.hi is not None and keys.stop - 1 - rows.start > terms.hi:
        parts.append((j <= i + terms.hi)[None, None])
    if terms.chunk:
        parts.append((j // terms.chunk == i // terms.chunk)[None, None])
    if terms.q_ids is not None and terms.k_ids is not None:
        parts.append(
            (_of(terms.q_ids, batch)[:, rows, None] == _of(terms.k_ids, batch)[:, None, keys])[:, None]
        )
    if terms.valid is not None:
        parts.append(_of(terms.valid, batch)[:, None, None, keys])
    if terms.mask is not None:
        parts.append(part(terms.mask, batch, heads, rows, keys))
    if not parts:
        return None
    whole = reduce(operator.and_, parts)
    return None if bool(whole.all()) else whole


def part(whole: Tensor, *slices: slice) -> Tensor:
    """The slices of a broadcastable tensor: axes of size 1 stay."""
    return whole[tuple(slice(None) if size == 1 else s for size, s in zip(whole.shape, slices, strict=True))]


def _of(per_batch: Tensor, batch: slice) -> Tensor:
    return part(per_batch, batch, slice(None))


def visible_pairs(q: Tensor, k: Tensor, terms: Terms) -> int:
    """Pairs of query and key, over batch and heads, that band, chunk and tiles let through.

    Contents of other masks are not read: an upper bound with them, and with fake tiles.
    """
    b, h, sq, sk = *(int(size) for size in q.shape[:3]), int(k.shape[2])
    heads = b * h
    if terms.tiles and type(terms.tiles[0]) is Tensor and terms.tiles[0].device.type != "meta":
        counts, per_head = (
            (terms.tiles[0], terms.tiles[2]),
            heads // (terms.tiles[0].shape[0] * terms.tiles[0].shape[1]),
        )
        return min(
            per_head * sum(int(c.sum()) for c in counts) * terms.block_q * terms.block_k, heads * sq * sk
        )
    i = torch.arange(sq, dtype=torch.int64)
    first, last = torch.zeros_like(i), torch.full_like(i, sk)
    if terms.chunk:
        first = i // int(terms.chunk) * int(terms.chunk)
        last = (first + int(terms.chunk)).clamp(max=sk)
    if terms.lo is not None:
        first = torch.maximum(first, i + int(terms.lo))
    if terms.hi is not None:
        last = torch.minimum(last, i + int(terms.hi) + 1)
    return heads * int((last - first).clamp(min=0).sum())


def check(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> None:
    """Raises UsageError for what the operators do not take, with the argument's name."""
    operands = {name: getattr(terms, name) for name in OPERANDS}
    one_device("attention", q=q, k=k, v=v, tiles=terms.tiles[0] if terms.tiles else None, **operands)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise UsageError(
                f"attention takes {name} of 4 axes (batch, heads, length, width); given "
                f"{tuple(tensor.shape)}."
            )
        if tensor.dtype not in DTYPES or tensor.dtype != q.dtype:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise UsageError(
                f"attention takes q, k and v of one dtype of {allowed}; {name} is {tensor.dtype}, q "
                f"{q.dtype}. Cast {name}."
            )
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise UsageError(f"attention takes k of q's batch and width; given {shapes}.")
    if v.shape[:3] != k.shape[:3]:
        raise UsageError(f"attention takes v of k's batch, heads and length; given {shapes}.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise UsageError(f"attention takes q with a multiple of k's heads; given {shapes}.")
    if not math.isfinite(terms.scale) or not 0 <= terms.softcap < math.inf:
        raise UsageError(
            f"attention takes a finite scale and a softcap of 0 or more; given {terms.scale} and "
            f"{terms.softcap}."
        )
    if terms.chunk < 0:
        raise UsageError(f"attention takes chunk 0 (none) or more; given {terms.chunk}.")
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    _check_additive("bias", terms.bias, full)
    if terms.sink is not None:
        _check_additive("sink", sink_rows(terms.sink), full[:3])
    _check_masks(terms, full)
    _check_tiles(terms, full)


def _check_additive(name: str, tensor: Tensor | None, full: tuple[int, ...]) -> None:
    if tensor is None:
        return
    if tensor.dtype not in DTYPES:
        raise UsageError(
            f"attention takes a floating {name}; given {tensor.dtype}. A boolean one belongs in mask."
        )
    _check_shape(name, tensor, full)


def _check_masks(terms: Terms, full: tuple[int, ...]) -> None:
    b, _, sq, sk = full
    for name, tensor, shape in (("mask", terms.mask, full), ("valid", terms.valid, (b, sk))):
        if tensor is not None:
            if tensor.dtype != torch.bool:
                raise UsageError(
                    f"attention takes a boolean {name}, True where a key is seen; given {tensor.dtype}."
                )
            _check_shape(name, tensor, shape, free=1 if name == "valid" else 4)
    if (terms.q_ids is None) != (terms.k_ids is None):
        raise UsageError(
            f"attention takes q_ids and k_ids together; {'q_ids' if terms.q_ids is None else 'k_ids'} is "
            "missing."
        )
    for name, tensor, shape in (("q_ids", terms.q_ids, (b, sq)), ("k_ids", terms.k_ids, (b, sk))):
        if tensor is not None:
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                raise UsageError(f"attention takes {name} of integers; given {tensor.dtype}.")
            _check_shape(name, tensor, shape, free=1)


def _check_shape(name: str, tensor: Tensor, full: tuple[int, ...], *, free: int = 4) -> None:
    """Each axis full or, if among the first `free`, 1."""
    fits = tensor.dim() == len(full) and all(
        bool(size == want) or (axis < free and bool(size == 1))
        for axis, (size, want) in enumerate(zip(tensor.shape, full, strict=True))
    )
    if not fits:
        raise UsageError(
            f"attention takes {name} broadcastable to {tuple(full)}, with as many axes; given "
            f"{tuple(tensor.shape)}."
        )


def _check_tiles(terms: Terms, full: tuple[int, ...]) -> None:
    if not terms.tiles:
        return
    if len(terms.tiles) != 4 or terms.block_q < 1 or terms.block_k < 1:
        raise UsageError(
            "attention takes tiles as 4 or 8 tensors (TileList.tensors()) with block_q and block_k of 1 or "
            f"more; given {len(terms.tiles)} tensors, block_q {terms.block_q} and block_k {terms.block_k}."
        )
    counts = (*full[:2], -(-full[2] // terms.block_q), -(-full[3] // terms.block_k))
    for name, tensor, shape in zip(TILES, terms.tiles, (counts[:3], counts) * 2, strict=True):
        if tensor.dtype != torch.int32:
            raise UsageError(f"attention takes tiles of int32; {name} is {tensor.dtype}.")
        _check_shape(f"tiles' {name}", tensor, shape, free=2)
