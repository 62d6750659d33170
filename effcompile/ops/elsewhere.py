"""Kernels that plain functions of ours have on a type of device (backends/triton puts them here): operators
of a step of generation that no dispatcher knows, as it would take longer than they do on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["any_on", "kernel", "put"]

#: From the arguments of the function to its result; None for what the kernel does not take.
Kernel = Callable[..., Any]

_kernels: dict[tuple[str, str], Kernel] = {}


def put(name: str, device: str, kernel: Kernel) -> None:
    """From now on it is asked first, for tensors on that type of device."""
    _kernels[name, device] = kernel


def kernel(name: str, tensor: Tensor) -> Kernel | None:
    """That of a function where a tensor lies."""
    return _kernels.get((name, tensor.device.type)) if _kernels else None


def any_on(device: str) -> bool:
    """Whether a type of device has some: a CPU where kernels are interpreted, in the place of a GPU."""
    return any(where == device for _, where in _kernels)
