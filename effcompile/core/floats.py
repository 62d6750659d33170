"""Numbers that are made for kernels of ours are fp32, as the kernels are, whatever the user's default is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def in_fp32() -> Iterator[None]:
    """Within, tensors that are made of floats without a dtype are in fp32. The user's own code is not to be
    run here: it reads the default, and so do other threads.
    """
    before = torch.get_default_dtype()
    if before is torch.float32:
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
