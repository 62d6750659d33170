"""One device for all tensors of a call: a kernel that is given a pointer to another one's memory reads
garbage, or ends the process.
"""

from __future__ import annotations

from torch import Tensor

from effcompile.core.errors import UsageError

__all__ = ["one_device"]


def one_device(operator: str, **tensors: Tensor | None) -> None:
    """Raises UsageError where a tensor lies on another device than the first one; it names both."""
    first: tuple[str, Tensor] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first = name, tensor
        elif tensor.device != first[1].device:
            raise UsageError(
                f"{operator} takes tensors of one device; {name} is on {tensor.device}, {first[0]} on "
                f"{first[1].device}. Move one of them: {name}.to({str(first[1].device)!r})."
            )
