"""A planned step on a GPU, several times over, where torch's allocator may reserve no more than foreseen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from effcompile.core.reasons import Because, Reason
from effcompile.machine.memory import share_of_gpu

__all__ = ["STEPS", "capped", "said", "within"]

#: Steps that are run on a GPU: from the second on they find the states and segments of the one before.
STEPS = 5

_DEVICE = (
    "on the GPU: {bytes} allocated at the highest instant, {bytes} reserved by torch's allocator, "
    "{bytes} of {bytes} in use by all"
)
_HELD = "steps 2 to 5 ran where torch's allocator may reserve {bytes} and no more, as foreseen"
_NOT_HELD = (
    "steps 2 to 5 did not run where torch's allocator may reserve the {bytes} that were foreseen: they were "
    "run without that limit"
)
T = TypeVar("T")


def within(run: Callable[[], T], reserved: int | None, lasting: int) -> tuple[T, list[Reason]]:
    """What running steps on the current GPU gives, and what the report says of it.

    Args:
        run: the steps.
        reserved: bytes that the allocator was foreseen to reserve with all that lasts, where it was.
        lasting: bytes of it that are there already.
    """
    if reserved is None:
        return run(), []
    torch.cuda.empty_cache()
    allowed = int(torch.cuda.memory_reserved()) + max(0, reserved - lasting)
    try:
        with capped(allowed):
            return run(), [Because(_HELD, (allowed,))]
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return run(), [Because(_NOT_HELD, (allowed,))]


@contextlib.contextmanager
def capped(nbytes: int) -> Iterator[None]:
    """Within it torch's allocator takes no more than so many bytes of the current GPU."""
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    before = share_of_gpu(torch)
    torch.cuda.set_per_process_memory_fraction(min(before, nbytes / size))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before)


def said(peak: int | None, reserved: int) -> list[Reason]:
    """What a step took of the current GPU: of torch's allocator, what that reserved, and what is in use there
    by all.
    """
    if peak is None:
        return []
    free, total = torch.cuda.mem_get_info()
    return [Because(_DEVICE, (peak, reserved, total - free, total))]
