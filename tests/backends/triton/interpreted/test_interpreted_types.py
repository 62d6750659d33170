"""What is said of types once says what the stock interpreter says each time."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _more(x, most):
    at = tl.arange(0, 8)
    tl.store(x + at, tl.load(x + at) + most)


def test_integers_that_overflow_are_found() -> None:
    x = torch.arange(8, dtype=torch.int32)
    _more[(1,)](x, 2**31 - 8)
    assert x[-1] == 2**31 - 1
    with pytest.raises(InterpreterError, match="add of two int32 gives"):
        _more[(1,)](x, 2**31 - 8)


def test_types_of_other_shapes_elements_and_pointers_are_others() -> None:
    pointer = tl.pointer_type(tl.float32)
    kinds = [
        tl.block_type(tl.float32, [8]),
        tl.block_type(tl.float32, [tl.constexpr(8), 1]),
        tl.block_type(tl.int32, [8]),
        tl.block_type(pointer, [8]),
        tl.block_type(tl.pointer_type(tl.float32, const=True), [8]),
    ]
    assert all((a == b) == (a is b) for a in kinds for b in kinds)
    assert tl.block_type(pointer, [8]) == kinds[3]
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [9])
