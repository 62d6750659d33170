"""Steps on a GPU under the limit that was foreseen; the GPU is made up, its tensors lie on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train_helpers import gpt2

import effcompile
from effcompile.proof.training import confirm, on_device, updates, verify
from effcompile.search.training import segments

GIB = 1 << 30


class Gpu:
    """One of 64 GiB, of which 10 are reserved, whatever is asked."""

    def __init__(self) -> None:
        self.share, self.shares = 1.0, list[float]()

    def limit(self, share: float) -> None:
        self.share = share
        self.shares.append(share)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    answers = {
        "memory_reserved": 10,
        "max_memory_reserved": 12,
        "memory_allocated": 9,
        "max_memory_allocated": 11,
    }
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name, gib in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, gib=gib: gib * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (40 * GIB, 64 * GIB))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=64 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", made.limit)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: made.share)
    return made


def test_the_limit_is_what_was_foreseen_beyond_what_is_there(gpu: Gpu) -> None:
    seen = []
    found, (note,) = on_device.within(lambda: seen.append(gpu.share), 30 * GIB, 8 * GIB)
    assert seen == [(10 + 22) / 64] and found is None and gpu.share == 1.0
    assert "32.00 GiB and no more" in str(note)


def test_what_does_not_run_within_it_is_run_without_and_told(gpu: Gpu) -> None:
    def run() -> int:
        if gpu.share < 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 5

    found, (note,) = on_device.within(run, 30 * GIB, 8 * GIB)
    assert found == 5 and gpu.shares == [0.5, 1.0] and "did not run where" in str(note)


def test_a_limit_of_the_users_own_is_not_raised(gpu: Gpu) -> None:
    gpu.limit(0.25)
    on_device.within(lambda: None, 30 * GIB, 8 * GIB)
    assert gpu.shares == [0.25, 0.25, 0.25]


def test_nothing_is_limited_where_nothing_was_foreseen(gpu: Gpu) -> None:
    assert on_device.within(lambda: 5, None, 0) == (5, []) and not gpu.shares


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_planned_step_is_run_five_times_on_a_gpu(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, optimizer: bool
) -> None:
    """The whole verification, where the model is said to lie on one."""
    for module in (confirm, updates, verify):
        monkeypatch.setattr(module, "device_of", lambda _: "cuda")
    monkeypatch.setattr(verify, "reserved", lambda: 12 * GIB)
    monkeypatch.setattr(segments, "in_segments", lambda _: True)
    monkeypatch.setattr(confirm, "_alive", lambda *_: 0)
    monkeypatch.setattr(confirm.Room, "of", lambda *_: confirm.Room(device="cpu", allowed=float("inf")))
    counted = list[int]()

    def count(real: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            counted.append(options.get("steps", args[-1]))
            return real(*args, **options)

        return run

    for name in ("run", "repeated"):
        monkeypatch.setattr(updates, name, count(getattr(updates, name)))
    model, batch = gpt2(layers=1)
    asked = {"optimizer": torch.optim.SGD(model.parameters(), lr=1e-3)} if optimizer else {}
    plan = effcompile.optimize(model, inputs=batch, mode="training", **asked).plan
    said = [str(note) for note in plan.notes]
    assert counted == ([2, 5] if optimizer else [4])
    assert any("steps 2 to 5 ran where" in note for note in said)
    assert any(
        "12.00 GiB reserved by torch's allocator, 24.00 GiB of 64.00 GiB in use" in note for note in said
    )
