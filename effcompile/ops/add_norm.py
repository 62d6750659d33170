"""LayerNorm of a residual sum as one operator, in fp32 on a CPU by `rows.cpp`: for where no compiler fuses
element-wise work.

Defined without torch.library.custom_op, as `int8_linear` is: a call takes a third of the time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.ops import rows_native

__all__ = ["add_layer_norm"]

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> Tensor"
)


def add_layer_norm_on_cpu(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """LayerNorm(x + residual) over the last axis (Ba et al., arXiv 1607.06450), for x and residual (..., D)
    of one shape, weight and bias (D).
    """
    found = rows_native.kernels()
    given = [each for each in (x, residual, weight, bias) if each is not None]
    fits = (
        x.shape == residual.shape
        and x.numel() > 0
        and all(each.dtype is torch.float32 and each.is_contiguous() for each in given)
    )
    if isinstance(found, str) or not fits:
        return F.layer_norm(x + residual, x.shape[-1:], weight, bias, eps)
    return found.add_layer_norm(x, residual, weight, bias, eps)


_LIBRARY.impl("add_layer_norm", add_layer_norm_on_cpu, "CPU")
add_layer_norm = torch.ops.effcompile.add_layer_norm


@torch.library.register_fake("effcompile::add_layer_norm", lib=_LIBRARY)
def _(x, residual, weight, bias, eps):  # type: ignore[no-untyped-def]
    return torch.empty_like(x).contiguous()
