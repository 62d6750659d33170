"""What is watched is what was allocated meanwhile, whenever Python's collector comes."""

import gc
from collections.abc import Iterator

import pytest
import torch

from effcompile.core import torch_compat_memory


class Circle:
    """Garbage that only the collector frees, with a tensor."""

    def __init__(self) -> None:
        self.itself, self.tensor = self, torch.zeros(1 << 16)


@pytest.fixture
def _lazy_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1 << 30)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("_lazy_collector")
def test_garbage_of_before_is_not_taken_off() -> None:
    with torch_compat_memory.watched_memory("cpu"):
        # of what torch's profiler has not seen it does not know the bytes
        left = [Circle()]
    with torch_compat_memory.watched_memory("cpu") as peak:
        left.clear()
        gc.set_threshold(1)
        held = [[[]] for _ in range(1000)], torch.zeros(1000)
    assert peak() == 4000 and gc.isenabled()
    del held
