"""The model of torch's CUDA allocator against what the real one did on an H100 (torch 2.11), and what it says
of planned steps.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import FakeExpandable, FakeGpu, OutOfMemoryError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from train_helpers import gpt2

from effcompile.capture import capture_training
from effcompile.core.causes import NotReached
from effcompile.core.errors import InfeasibleError
from effcompile.machine.machines import load_target
from effcompile.schedules.blocks import Blocks
from effcompile.schedules.emit import emit
from effcompile.schedules.expandable import Expandable
from effcompile.schedules.reserved import Allocator, Followed, NoSegmentError, follow
from effcompile.schedules.simulate import allocations, simulate
from effcompile.search.training import fit, segments
from effcompile.search.training.cases import Joint
from effcompile.search.training.operator_costs import OperatorCosts
from effcompile.search.training.prepare import cut_step

#: Lives of tensors on an H100: (name, bytes, or 0 where it is freed, memory_allocated after it,
#: memory_reserved after it).
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
    """Whatever the order, nothing is lost.

    The same again may need more: the best fit of a block may be what a larger one had.
    """
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
        model, batch = gpt2(layers=1, n_embd=256, n_head=4, n_positions=256)
    step = capture_training(model, (), {name: ids.new_empty((8, 256)) for name, ids in batch.items()})
    return cut_step(step, OperatorCosts(target=load_target("h100-sxm"), here=False))


def test_a_planned_step_is_carried_out_by_the_allocator_as_simulated(cut: Blocks) -> None:
    """Each kind of schedule: the allocator's peak is the simulated one, and what it reserves is within a few
    segments of it.
    """
    some = random.Random(0)
    every = sorted(cut.decidable)
    for share in (1.0, 0.7, 0.4, 0.0):
        emitted = emit(cut, frozenset(s for s in every if some.random() < share))
        trace, events = simulate(cut, emitted), allocations(cut, emitted)
        allocator = Allocator().run(events)
        assert allocator.allocated == 0
        assert allocator.peak_allocated == pytest.approx(trace.peak_bytes - cut.base_bytes, abs=4096)
        reserved = follow(Followed(lasting=[cut.base_bytes], step=events)).reserved
        assert trace.peak_bytes <= reserved <= 1.15 * trace.peak_bytes + 40 * MIB, (
            share,
            reserved,
            trace.peak_bytes,
        )


#: What the two allocators are without and with expandable segments, under a device's limit and a process's.
KINDS: dict[str, tuple[Callable[[int], Allocator], Callable[[int], Any]]] = {
    "segments": (lambda room: Allocator(limit=room), FakeGpu),
    "expandable": (lambda room: Expandable(limit=room), lambda room: FakeExpandable(room, capped=False)),
    "expandable, capped": (
        lambda room: Expandable(limit=room, capped=True), lambda room: FakeExpandable(room, capped=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.differing_executors])
@given(
    sizes=st.lists(st.one_of(st.integers(1, 48 * MIB), st.integers(1, MIB)), min_size=4, max_size=40),
    order=st.randoms(use_true_random=False),
    mib=st.integers(40, 400),
)
def test_on_a_device_that_is_too_small(kind: str, sizes: list[int], order: random.Random, mib: int) -> None:
    """To the byte as on the fake device: what is reserved, what is given back, and what cannot be had."""
    ours, fake = (made(mib * MIB) for made in KINDS[kind])
    live: list[int] = []
    for name, nbytes in enumerate(sizes * 3):
        try:
            fake.allocate(name, nbytes)
        except OutOfMemoryError:
            with pytest.raises(NoSegmentError):
                ours.allocate(name, nbytes)
        else:
            ours.allocate(name, nbytes)
            live.append(name)
        while live and order.random() < 0.45:
            gone = live.pop(order.randrange(len(live)))
            ours.free(gone)
            fake.free(gone)
        assert (ours.reserved, ours.allocated) == (fake.reserved, fake.allocated)


#: Schedules, and sizes of each: so many plans. `make gpu-dry` looks at a thousand.
_SCHEDULES, _SIZES = int(os.environ.get("EFFCOMPILE_FAKE_GPU_SCHEDULES", "6")), 25


def plans(cut: Blocks, some: random.Random) -> list[tuple[Followed, int]]:
    """Random plans of a step: what they ask for, and their peak.

    A size is what the step would be of another width or batch.
    """
    found = []
    for _ in range(_SCHEDULES):
        share = some.random()
        emitted = emit(cut, frozenset(s for s in sorted(cut.decidable) if some.random() < share))
        schedule = SimpleNamespace(prepared=SimpleNamespace(cut=cut), emitted=emitted)
        beside = SimpleNamespace(resident_bytes=some.choice([0, 2, 8]) * cut.base_bytes)
        joint: Any = SimpleNamespace(schedule=schedule, case=SimpleNamespace(beside=beside))
        asked = segments.asked(joint)
        for _ in range(_SIZES):
            factor = 2.0 ** some.uniform(-1, 5)
            grown = Followed(
                lasting=[int(n * factor) for n in asked.lasting],
                step=[(name, int(n * factor)) for name, n in asked.step],
                left=[int(n * factor) for n in asked.left],
            )  # fmt: skip
            found.append((grown, follow(grown, steps=2).peak_allocated))
    return found


@pytest.mark.parametrize("expandable", [False, True])
def test_what_is_said_to_fit_fits_a_device_of_that_size(
    cut: Blocks, monkeypatch: pytest.MonkeyPatch, expandable: bool
) -> None:
    """Random plans on devices from their peak to half as much again: five steps of each, under the device's
    own limit, and with expandable segments under a process's, too.
    """
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:{expandable}")
    some, verdicts, tight = random.Random(0), Counter[str](), Counter[bool]()
    timeline: Any = SimpleNamespace(peak_phase="", peak_site="")
    for followed, peak in plans(cut, some):
        monkeypatch.setattr(segments, "asked", lambda _, followed=followed: followed)
        room = int(peak * some.uniform(1.0, 1.5))
        target = replace(load_target("h100-sxm"), memory_bytes=room)
        joint: Joint = SimpleNamespace(peak_bytes=peak)  # type: ignore[assignment]
        verdict = fit.fit(joint, target, timeline, None).verdict
        verdicts[verdict] += 1
        for kind in KINDS:
            if expandable == kind.startswith("expandable"):
                held = five_steps(KINDS[kind][1](room), followed, room)
                assert held or verdict != fit.FITS, (kind, room, peak)
                tight[held] += 1
    plans_seen = verdicts.total()
    assert plans_seen == _SCHEDULES * _SIZES
    assert verdicts[fit.FITS] > 0.3 * plans_seen and tight[False] > (0 if expandable else 0.1 * plans_seen)


def five_steps(device: Any, followed: Followed, room: int) -> bool:
    """Whether they are carried out within its limit.

    A process's limit is not asked for the units that are taken where less than a segment was asked for.
    """
    try:
        for at, nbytes in enumerate(n for n in followed.lasting if n):
            device.allocate(-1 - at, nbytes)
        for turn in range(5):
            for event in followed.step:
                device.run([event])
                assert device.reserved <= room + (20 * MIB if getattr(device, "capped", False) else 0)
            for at, nbytes in enumerate(n for n in followed.left if n and not turn):
                device.allocate(-100_000 - at, nbytes)
    except OutOfMemoryError:
        return False
    return True


def asking(mib: float) -> Any:
    """A plan that asks for one block."""
    return SimpleNamespace(peak_bytes=int(mib * MIB), followed=Followed(lasting=[int(mib * MIB)], step=[]))


def test_a_plan_that_finds_no_segments_is_solved_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is lacking each time, until one goes; where none does, it stays as it was."""
    monkeypatch.setattr(segments, "asked", lambda joint: joint.followed)
    target, plan, tried = (
        replace(load_target("h100-sxm"), memory_bytes=101 * MIB),
        asking(100.5),
        list[float](),
    )

    def solve(budget: int) -> Any:
        tried.append(budget / MIB)
        if budget < least * MIB:
            raise InfeasibleError(NotReached(rounds=1, over=1, node=""), nearest={})
        return asking(budget / MIB)

    least = 0
    assert segments.that_goes(plan, target, solve).peak_bytes == 99.5 * MIB, "102 MiB in steps of 2, of 101"
    assert tried == [99.5]
    least = 100
    assert segments.that_goes(plan, target, solve) is plan
    tried.clear()
    for other in (replace(target, device="cpu"), replace(target, memory_bytes=102 * MIB)):
        assert segments.that_goes(plan, other, solve) is plan
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    assert segments.that_goes(plan, target, solve) is plan
    assert not tried
    (note,) = segments.told(plan, target)
    assert "max_split_size_mb:512" in str(note) and "not known" in str(note)


def test_expandable_segments_are_named_where_they_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine blocks of 11 MiB are nine segments of 12, and one range of five units of 20."""
    monkeypatch.setattr(segments, "asked", lambda joint: joint.followed)
    plan: Any = SimpleNamespace(peak_bytes=99 * MIB, followed=Followed(lasting=[11 * MIB] * 9, step=[]))

    def told(mib: int) -> str:
        (note,) = segments.told(plan, replace(load_target("h100-sxm"), memory_bytes=mib * MIB))
        return str(note)

    assert "reserves 108.0 MiB" in told(108)
    assert "does not find them" in told(104) and "PYTORCH_ALLOC_CONF=expandable_segments:True" in told(104)
    assert "does not find them" in told(99) and "expandable" not in told(99), "nor with it"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "reserves 100.0 MiB for the peak of 99.0 MiB" in told(104)
