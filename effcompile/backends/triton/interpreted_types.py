"""What the interpreter of triton says of types over and over, said once.

An operation of a tile is some microseconds of numpy. Around it the stock interpreter makes the type of its
result anew, wraps each axis of its shape, compares shapes axis by axis, and computes by six more operations
of its own whether integers overflow, of which it then says nothing: most of the time of a launch. Here what
overflows is an error. Nothing else that a kernel can see differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic

__all__ = ["remember_types"]

#: What the stock interpreter hands around: tensors and types of its own, for which it has no annotations.
Handle = Any
_ARITHMETIC: dict[str, Callable[..., Handle]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def remember_types() -> None:
    """Once in a process, after whatever else is mended."""
    block, tensor, semantic = (_open(owner) for owner in (tl.block_type, tl.tensor, TritonSemantic))
    block.__init__ = _block_type({}, block.__init__)
    tensor.__init__ = _tensor(tensor.__init__)
    semantic.broadcast_impl_value = _broadcast(semantic.broadcast_impl_value)
    semantic.binary_op_sanitize_overflow_impl = _overflow


def _open(owner: Handle) -> Handle:
    """A class whose methods are replaced."""
    return owner


def _block_type(known: dict[Handle, Handle], original: Callable[..., None]) -> Callable[..., None]:
    """Types of equal elements and shapes have the same attributes, and nobody writes to them."""

    def init(self: Handle, element_ty: Handle, shape: Handle) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        pointer = (element_ty.address_space, element_ty.const) if element_ty.is_ptr() else ()
        key = (element_ty.name, pointer, sizes)
        if key not in known:
            original(self, element_ty, shape)
            known[key] = self.__dict__
        self.__dict__ = known[key]

    return init


def _tensor(original: Callable[..., None]) -> Callable[..., None]:
    """All of a tensor but its handle follows from its type, which keeps it."""

    def init(self: Handle, handle: Handle, type: Handle) -> None:
        if rest := type.__dict__.get("_of_tensors"):
            self.__dict__.update(rest)
            self.handle = handle
        else:
            original(self, handle, type)
            type._of_tensors = {name: one for name, one in self.__dict__.items() if name != "handle"}

    return init


def _broadcast(original: Callable[..., Handle]) -> Callable[..., Handle]:
    """Two of one shape are as they are."""

    def broadcast(self: Handle, lhs: Handle, rhs: Handle) -> Handle:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and list(left.shape) == list(right.shape):
            return lhs, rhs
        return original(self, lhs, rhs)

    return broadcast


def _overflow(self: Handle, lhs: Handle, rhs: Handle, binary_op: Callable[..., Handle]) -> None:
    """The stock interpreter makes operations of its check, of which the last, outside of a debugger, is
    none.
    """
    scalar = lhs.type.scalar
    if scalar.int_bitwidth < 64:
        wide = [np.asarray(one.handle.data).astype(np.int64) for one in (lhs, rhs)]
        result = _ARITHMETIC[binary_op.__name__](*wide)
        if (result > scalar.get_int_max_value()).any() or (result < scalar.get_int_min_value()).any():
            raise OverflowError(f"{binary_op.__name__} of two {scalar} gives {result}")
