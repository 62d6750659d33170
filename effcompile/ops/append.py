"""Rows appended to a cache where they stand.

A cache tensor (batch, heads, rows, width) is a view of a buffer that has room for more rows: appending writes
behind the view and returns a longer one. It says nothing but what `torch.cat` says, and copies only where
there is no room. A tensor that is held nowhere else may be given; one that was appended to before, and then
shortened, is overwritten behind its end.
"""

from __future__ import annotations

import torch

from effcompile.ops import elsewhere
from effcompile.ops.cache_rows import into


def room(rows: torch.Tensor) -> tuple[int, int]:
    """(rows of the buffer behind this tensor, the first of them that it shows); (its own rows, 0) where it is
    no such view.
    """
    own = (rows.shape[2], 0)
    batch, heads, length, width = rows.shape
    if not batch * heads:
        return own
    stride, elements = rows.stride(), _elements(rows)
    if width == 0 or stride[3] != 1 or stride[2] != width or rows.storage_offset() % width:
        return own
    total = elements // (batch * heads * width)
    regular = (heads == 1 or stride[1] == total * width) and (
        batch == 1 or stride[0] == heads * total * width
    )
    first = rows.storage_offset() // width
    if not regular or elements != batch * heads * total * width or first + length > total:
        return own
    return total, first


def _elements(rows: torch.Tensor) -> int:
    """Of the storage behind a tensor."""
    return rows.untyped_storage().nbytes() // rows.element_size()


def buffer(like: torch.Tensor, capacity: int) -> torch.Tensor:
    """A view of no rows, of a new buffer that has room for so many."""
    batch, heads, _, width = like.shape
    return torch.empty((batch, heads, capacity, width), dtype=like.dtype, device=like.device)[:, :, :0]


def append(past: torch.Tensor, new: torch.Tensor, capacity: int) -> torch.Tensor:
    """`torch.cat([past, new], 2)`, in the buffer behind `past` where it has room, else in a new one of at
    least `capacity` rows.

    New rows are rounded to what `past` holds: bf16, or codes with a scale (cache_rows.py).
    """
    longer = lengthened(past, new.shape[2], capacity)
    own = elsewhere.kernel("append_rows", new)
    if own is None or not own(longer, new, past.shape[2]):
        longer[:, :, past.shape[2] :] = into(new, longer.dtype)
    return longer


def lengthened(past: torch.Tensor, more: int, capacity: int) -> torch.Tensor:
    """The same with so many rows at the end that hold anything."""
    rows = past.shape[2]
    total, first = room(past)
    if first + rows + more <= total:
        return _longer(past, int(past.storage_offset()), rows + more)
    if rows + more <= total:  # a window that came to the end of its buffer: back to its beginning
        kept = past.clone()
        longer = _longer(past, 0, rows + more)
        longer[:, :, :rows] = kept
        return longer
    longer = _longer(buffer(past, max(capacity, rows + more)), 0, rows + more)
    longer[:, :, :rows] = past
    return longer


def _longer(view: torch.Tensor, offset: int, rows: int) -> torch.Tensor:
    batch, heads, _, width = view.shape
    return view.as_strided((batch, heads, rows, width), view.stride(), offset)


def last(rows: torch.Tensor, count: int, capacity: int) -> torch.Tensor:
    """The last rows, and no buffer of more than `capacity` kept for them."""
    kept = rows[:, :, -count:] if rows.shape[2] > count else rows
    if room(kept)[0] <= capacity:
        return kept
    return append(buffer(kept, capacity), kept, capacity)
