"""Calls of the operators between the products, on made-up values, for timing them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from effcompile.machine.target import KernelCall
from effcompile.ops import rows as op

__all__ = ["body"]

#: Heads that a rotation turns by one position's angles.
_HEADS = 8


def body(call: KernelCall) -> Callable[[], object]:
    """One call of a kernel of rows on dims (rows, columns), on torch's default device."""
    rows, columns = call.dims
    x, other, weight = torch.randn(rows, columns), torch.randn(rows, columns), torch.randn(columns)
    if call.kernel == "rows/rotary":
        heads = _HEADS if rows % _HEADS == 0 else 1
        turned = x.view(1, heads, rows // heads, columns)
        angles = other[: rows // heads].unsqueeze(0)
        return lambda: op.rotary(turned, angles, angles, False)
    made: dict[str, Callable[[], object]] = {
        "rows/rms_norm": lambda: op.rms_norm_alone(x, weight, 1e-6),
        "rows/add_rms_norm": lambda: op.rms_norm(x, other, weight, 1e-6),
        "rows/swiglu": lambda: op.swiglu(x, other),
    }
    return made[call.kernel]
