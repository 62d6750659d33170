"""What torch says of its operators, and who watches them."""

from __future__ import annotations

import torch


def is_view(target: object) -> bool:
    """Whether an operator's result is its first operand's memory."""
    return isinstance(target, torch._ops.OpOverload) and target.is_view


def is_pointwise(target: object) -> bool:
    """Whether an operator computes elements of its result one by one, the same at every call."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags


def operators_are_watched() -> bool:
    """Whether a TorchDispatchMode is entered."""
    return bool(torch._C._len_torch_dispatch_stack())
