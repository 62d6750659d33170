"""On which GPUs which families of kernels are PyTorch's: operators are registered for a type of device, and a
box may hold several GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from effcompile.backends.triton.configs import architecture

__all__ = ["leave", "runs"]

#: (family, index of a GPU) whose results were not right there.
_left: set[tuple[str, int | None]] = set()


def leave(families: Iterable[str], device: torch.device) -> None:
    """From now on these families are PyTorch's on this GPU, whatever is registered for its type."""
    _left.update((family, device.index) for family in families)


def runs(family: str, device: torch.device) -> bool:
    """Whether the kernels of a family may be launched on a device: there are tiles for it, and nothing was
    seen to be wrong there.
    """
    return device.type != "cuda" or (architecture(device) is not None and (family, device.index) not in _left)
