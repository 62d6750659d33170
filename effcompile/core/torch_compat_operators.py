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


#: What tells that results do not follow from sizes and values of arguments, or their shapes not from sizes.
_UNDETERMINED = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
)


def is_determined(target: object) -> bool:
    """Whether it is an operator of torch's own that computes the same of the same arguments, whose sizes tell
    those of its results, and writes into none of them.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    unset = "empty" in target._schema.name  # empty, new_empty, empty_like, empty_strided
    return not (unset or target._schema.is_mutable or any(tag in target.tags for tag in _UNDETERMINED))


def operators_are_watched() -> bool:
    """Whether a TorchDispatchMode is entered."""
    return bool(torch._C._len_torch_dispatch_stack())
