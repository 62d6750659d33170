"""The model of torch's CUDA allocator against what the real one did on an H100 (torch 2.11), and what it says of planned steps."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_helpers import gpt2

from effcompile.capture import capture_training
from effcompile.machine.machines import load_target
from effcompile.schedules.blocks import Blocks
from effcompile.schedules.emit import emit
from effcompile.schedules.reserved import Allocator, reserved_bytes
from effcompile.schedules.simulate import allocations, simulate
from effcompile.search.training.prepare import OperatorCosts, cut_step

#: Lives of tensors on an H100: (name, bytes, or 0 where it is freed, memory_allocated after it, memory_reserved after it).
RECORDED = json.loads((Path(__file__).parents[1] / "golden" / "h100_allocator.json").read_text())["traces"]
MIB = 1 << 20


@pytest.mark.parametrize("trace", RECORDED, ids=range(len(RECORDED)))
def test_as_on_an_h100(trace: list[tuple[int, int, int, int]]) -> None:
    allocator = Allocator()
    for at, (name, nbytes, allocated, reserved) in enumerate(trace):
        allocator.run([(name, nbytes)])
        assert (allocator.allocated, allocator.reserved) == (allocated, reserved), at


@settings(max_examples=30)
@given(st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_what_is_freed_is_whole_again(sizes: list[int], order: random.Random) -> None:
    """Whatever the order, nothing is lost. The same again may need more: the best fit of a block may be what a larger one had."""
    allocator = Allocator()
    for _ in range(2):
        for name, nbytes in enumerate(sizes):
            allocator.allocate(name, nbytes)
        assert allocator.allocated >= sum(sizes)
        assert allocator.reserved >= allocator.allocated
        names = list(range(len(sizes)))
        order.shuffle(names)
        for name in names:
            allocator.free(name)
        assert allocator.allocated == 0
        assert sum(size for pool in allocator._free.values() for size, _, _ in pool) == allocator.reserved


@pytest.fixture(scope="module")
def cut() -> Blocks:
    with torch.device("meta"):
        model, batch = gpt2(layers=2, n_embd=256, n_head=4, n_positions=256)
    step = capture_training(model, (), {name: ids.new_empty((8, 256)) for name, ids in batch.items()})
    return cut_step(step, OperatorCosts(target=load_target("h100-sxm"), here=False))


def test_a_planned_step_is_carried_out_by_the_allocator_as_simulated(cut: Blocks) -> None:
    """Each kind of schedule: the allocator's peak is the simulated one, and what it reserves is within a few segments of it."""
    some = random.Random(0)
    every = sorted(cut.decidable)
    for share in (1.0, 0.7, 0.4, 0.0):
        emitted = emit(cut, frozenset(s for s in every if some.random() < share))
        trace, events = simulate(cut, emitted), allocations(cut, emitted)
        allocator = Allocator().run(events)
        assert allocator.allocated == 0
        assert allocator.peak_allocated == pytest.approx(trace.peak_bytes - cut.base_bytes, abs=4096)
        reserved = reserved_bytes([cut.base_bytes], events)
        assert trace.peak_bytes <= reserved <= 1.15 * trace.peak_bytes + 40 * MIB, (share, reserved, trace.peak_bytes)
