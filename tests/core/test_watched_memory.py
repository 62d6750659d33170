"""What is watched is what was allocated meanwhile, whenever Python's collector comes."""

import gc
from collections.abc import Iterator

import pytest
import torch

from effcompile.core import torch_compat


class Circle:
    """Garbage that only the collector frees, with a tensor."""

    def __init__(self) -> None:
        self.itself, self.tensor = self, torch.zeros(1 << 16)


@pytest.fixture
def _eager_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.disable()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)
    gc.enable()


@pytest.mark.usefixtures("_eager_collector")
def test_garbage_of_before_is_not_taken_off() -> None:
    Circle()
    gc.enable()
    with torch_compat.watched_memory("cpu") as peak:
        held = torch.zeros(1000), [[] for _ in range(1000)]
    assert peak() == 4000 and gc.isenabled()
    del held
