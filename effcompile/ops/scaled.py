"""A tensor times one number, where it lies; not touched where that is 1, as a loss's own gradient is, unless
it is scaled. A GPU is not asked what the number is: that would wait for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["scale_"]

_LIBRARY = torch.library.Library("effcompile", "FRAGMENT")
_LIBRARY.define("scale_(Tensor(a!) x, Tensor factor) -> Tensor(a!)")


def _scale(x: Tensor, factor: Tensor) -> Tensor:
    """x, which has been multiplied by factor, ()."""
    return x.mul_(factor)


def _scale_on_cpu(x: Tensor, factor: Tensor) -> Tensor:
    return x if float(factor) == 1.0 else x.mul_(factor)


_LIBRARY.impl("scale_", _scale, "CompositeExplicitAutograd")
_LIBRARY.impl("scale_", _scale_on_cpu, "CPU")
scale_ = torch.ops.effcompile.scale_.default


@torch.library.register_fake("effcompile::scale_", lib=_LIBRARY)
def _(x, factor):  # type: ignore[no-untyped-def]
    return x
