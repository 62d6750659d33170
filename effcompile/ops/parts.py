"""A part added or put where the whole lies.

Added: gradients of a value that a loop reads part by part (x[:, 0], x[:, 1], ...). Autograd makes of each
part's gradient a tensor of the whole, zeros but for the part, and adds them: T steps read and write T times
the whole. Here only the part is read and written. Put: what aten.slice_scatter and aten.select_scatter make a
new tensor for.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_select_", "add_slice_", "put_select_", "put_slice_"]

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define("add_select_(Tensor(a!) whole, Tensor part, int dim, int index) -> Tensor(a!)")
_LIBRARY.define(
    "add_slice_(Tensor(a!) whole, Tensor part, int dim, int start, int end, int step) -> Tensor(a!)"
)
_LIBRARY.define("put_select_(Tensor(a!) whole, Tensor part, int dim, int index) -> Tensor(a!)")
_LIBRARY.define(
    "put_slice_(Tensor(a!) whole, Tensor part, int dim=0, int? start=None, int? end=None, int step=1) -> "
    "Tensor(a!)"
)


def _add_select(whole: Tensor, part: Tensor, dim: int, index: int) -> Tensor:
    """whole[..., index, ...] += part, which has one dimension less; returns the whole."""
    whole.select(dim, index).add_(part)
    return whole


def _add_slice(whole: Tensor, part: Tensor, dim: int, start: int, end: int, step: int) -> Tensor:
    """whole[..., start:end:step, ...] += part; returns the whole."""
    torch.ops.aten.slice.Tensor(whole, dim, start, end, step).add_(part)
    return whole


def _put_select(whole: Tensor, part: Tensor, dim: int, index: int) -> Tensor:
    """whole[..., index, ...] = part, which has one dimension less; returns the whole."""
    whole.select(dim, index).copy_(part)
    return whole


def _put_slice(
    whole: Tensor, part: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """whole[..., start:end:step, ...] = part; returns the whole."""
    torch.ops.aten.slice.Tensor(whole, dim, start, end, step).copy_(part)
    return whole


_LIBRARY.impl("add_select_", _add_select, "CompositeImplicitAutograd")
_LIBRARY.impl("add_slice_", _add_slice, "CompositeImplicitAutograd")
_LIBRARY.impl("put_select_", _put_select, "CompositeImplicitAutograd")
_LIBRARY.impl("put_slice_", _put_slice, "CompositeImplicitAutograd")
add_select_ = torch.ops.effcompile.add_select_.default
add_slice_ = torch.ops.effcompile.add_slice_.default
put_select_ = torch.ops.effcompile.put_select_.default
put_slice_ = torch.ops.effcompile.put_slice_.default
