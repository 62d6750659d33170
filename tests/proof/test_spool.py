"""Tensors put aside: the same ones come back, and the large ones are no memory of the process meanwhile."""

import errno
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from effcompile.core import torch_compat_memory
from effcompile.machine.room import NoRoomError, Room
from effcompile.proof import spool
from effcompile.proof.training import lean as lean_module
from effcompile.proof.training import verify
from effcompile.proof.training.lean import lean


@pytest.mark.parametrize("large", [True, False])
def test_what_is_put_aside_comes_back(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "_LARGE", 1 if large else 1 << 30)
    values = [
        torch.randn(3, 5),
        torch.arange(6).view(2, 3).t(),
        torch.tensor(float("nan")),
        torch.zeros(0, 4),
    ]
    aside = spool.put_aside(values)
    assert isinstance(aside, tuple) is not large
    assert (
        len(aside) == 4
        and aside[-1].shape == (0, 4)
        and [t.dtype for t in aside[:2]] == [torch.float32, torch.int64]
    )
    for found, wanted in zip(aside, values, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert (aside[0] is values[0]) is not large
    with pytest.raises(IndexError):
        aside[4]


@pytest.mark.parametrize("value", [torch.randn(300, 400), torch.randn(400, 300).t(), torch.ones(2).bool()])
def test_a_mapped_tensor_is_the_same_and_its_own(value: torch.Tensor) -> None:
    """What is written to it is not in the file, and it outlives the spool."""
    aside = spool.Spool()
    aside.put("before", torch.ones(3))
    aside.put("x", value)
    found, again = aside.mapped("x"), aside.mapped("x")
    assert found is not None and again is not None
    assert found.stride() == value.stride() and torch.equal(found, value)
    found.zero_()
    assert torch.equal(again, value) and torch.equal(aside["x"], value)  # type: ignore[arg-type]
    del aside
    assert torch.equal(again, value) and not found.any()


def test_asking_for_a_name_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    aside = spool.Spool()
    aside.put("x", torch.ones(3))
    monkeypatch.setattr(spool.Spool, "__getitem__", None)
    assert "x" in aside and "y" not in aside


PLENTY = Room(device="cpu", allowed=float("inf"))


class Disk:
    """A disk that writes when it is told to."""

    def __init__(self) -> None:
        self.free, self.full, self.written, self.write = threading.Event(), False, 0, os.pwrite

    def pwrite(self, file: int, view: memoryview, at: int) -> int:
        assert self.free.wait(20)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written += 1
        return self.write(file, view, at)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found = Disk()
    monkeypatch.setattr(os, "pwrite", found.pwrite)
    yield found
    found.free.set()


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("effcompile-spool")]


def test_what_is_put_is_written_while_others_are_made(disk: Disk) -> None:
    """Of bytes that wait there are no more than were allowed; a larger tensor waits alone."""
    aside = spool.Spool(behind=8000)
    values = {name: torch.randn(1000) for name in ("first", "second")}
    for name, value in values.items():
        aside.put(name, value)
    assert aside.waiting == 8000 and not disk.written
    threading.Timer(0.05, disk.free.set).start()
    aside.put("third", torch.ones(5000))  # waits for both
    assert aside.waiting in (0, 20000) and disk.written >= 2
    values["first"] += 1  # what is written is not what is changed
    aside.settle()
    assert aside.waiting == 0 and disk.written == 3
    assert torch.equal(aside["second"], values["second"])  # type: ignore[arg-type]
    assert torch.equal(aside["first"] + 1, values["first"])  # type: ignore[operator]
    aside.put("first", torch.zeros(1000))
    assert aside.mapped("first") is not None and not aside["first"].any()  # type: ignore[union-attr]


def test_what_is_changed_before_it_is_written_is_refused(disk: Disk) -> None:
    aside, value = spool.Spool(behind=1 << 20), torch.ones(4)
    aside.put("x", value)
    value.add_(1)
    disk.free.set()
    for read in (aside.__getitem__, aside.mapped):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            read("x")
    aside.put("x", value)
    assert torch.equal(aside["x"], value)  # type: ignore[arg-type]


def test_a_full_disk_is_told_at_every_reading_and_at_the_next_writing(disk: Disk) -> None:
    aside, disk.full = spool.Spool(behind=1 << 20), True
    aside.put("x", torch.ones(4))
    disk.free.set()
    for tell in (lambda: aside["x"], lambda: aside.mapped("x"), lambda: aside["x"]):
        with pytest.raises(NoRoomError, match=r"No space left on device\. Set TMPDIR"):
            tell()
    disk.free.clear()
    aside.put("y", torch.ones(4))
    aside.put("z", torch.ones(4))
    disk.free.set()
    with pytest.raises(NoRoomError):
        aside.settle()
    disk.full = False


def test_what_was_written_is_freed_by_the_thread_that_put_it() -> None:
    """A profile of memory sees frees of the thread that it watches."""
    aside = spool.Spool(behind=1 << 20)
    with torch_compat_memory.watched_memory("cpu") as peak:
        for number in range(40):
            aside.put(str(number), torch.ones(1 << 16))  # 256 KiB
        aside.settle()
    assert peak() <= (1 << 20) + (1 << 18)


class Interrupted(nn.Module):
    """Its second half stops as the user's Ctrl+C, or a bug, would stop it."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.error, self.layers = error, nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == 5 and self.error is not None:
                raise self.error
        return x.sum()


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Lean steps put all aside, and behind; the files without a name that were open before them."""
    for name, value in (("_LOOK_AFTER", 1), ("_SHORT", 2.0), ("_AMPLE", 3.0), ("_MOST_BEHIND", 1 << 16)):
        monkeypatch.setattr(lean_module, name, value)
    gc.collect()
    return unlinked_files()


def lean_step(model: nn.Module) -> verify.Result:
    x, gradients = torch.linspace(-1, 1, 640).view(10, 64), spool.Spool(behind=1 << 16)
    with lean(model, {}, gradients, PLENTY):
        return verify.run(lambda: model(x), model, spool=gradients)


def test_a_lean_step_that_writes_behind_is_the_models_own(before: set[str]) -> None:
    model, x = Interrupted(None), torch.linspace(-1, 1, 640).view(10, 64)
    found, wanted = lean_step(model), verify.run(lambda: model(x), model)
    check = verify.compare(found, wanted, None)
    assert (
        check.passed
        and check.error == 0
        and (unlinked_files() - before or not os.path.isdir("/proc/self/fd"))
    )
    del found
    assert_nothing_is_left(before)


class Conjugates(nn.Module):
    """Saves a value, and the same conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = torch.view_as_complex(self.layer(x).unflatten(-1, (32, 2)))
        return (pair * pair.conj() + pair * pair).abs().sum()


def test_a_conjugate_is_put_aside_as_what_it_is(before: set[str]) -> None:
    model, x = Conjugates(), torch.linspace(-1, 1, 640).view(10, 64)
    gradients = spool.Spool()
    with lean(model, {}, gradients, PLENTY):
        found = verify.run(lambda: model(x), model, spool=gradients)
    check = verify.compare(found, verify.run(lambda: model(x), model), None)
    assert check.passed and check.error == 0


def test_a_value_that_is_saved_twice_is_one() -> None:
    model, x = nn.Linear(1, 1), torch.ones(4, 4, dtype=torch.complex64)
    saved = lean_module._Saved(model, PLENTY)
    one = saved.put_aside(x)
    assert saved.put_aside(x) is one
    others = [saved.put_aside(other) for other in (x.conj(), x.T, x[1:], x.view(torch.float32))]
    assert len({id(held) for held in (one, *others)}) == 5
    x.mul_(2)
    assert saved.put_aside(x) is not one
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.read_back(one)


def test_what_lies_in_the_file_is_no_more_known() -> None:
    """Its memory may be another value's by now."""
    model, x = nn.Linear(1, 1), torch.ones(4)
    saved = lean_module._Saved(model, PLENTY)
    one = saved.put_aside(x)
    saved.spool.put(one.name, one.value)
    one.value = None
    again = saved.put_aside(x)
    assert again is not one
    torch.testing.assert_close(saved.read_back(one), saved.read_back(again))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug of the model")])
def test_of_a_lean_step_that_ends_early_nothing_is_left(error: BaseException, before: set[str]) -> None:
    model = Interrupted(error)
    with pytest.raises(type(error)):
        lean_step(model)
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
    assert_nothing_is_left(before)


@pytest.mark.parametrize("writes", [0, 3, 12, 20])
def test_a_lean_step_on_a_full_disk_says_so(
    writes: int, before: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forward, in the backward, or when a gradient is read."""
    done, write = list[int](), os.pwrite

    def full(file: int, view: memoryview, at: int) -> int:
        done.append(at)
        if len(done) > writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, view, at)

    monkeypatch.setattr(os, "pwrite", full)

    def run() -> Any:
        return list(lean_step(Interrupted(None)).gradients.values())

    with pytest.raises(NoRoomError, match="No space left"):
        run()
    assert_nothing_is_left(before)


def unlinked_files() -> set[str]:
    """What this process has open that has no name any more, as a spool's file."""
    folder = "/proc/self/fd"
    links = [os.path.join(folder, name) for name in (os.listdir(folder) if os.path.isdir(folder) else ())]
    return {target for link in links if os.path.islink(link) and "(deleted)" in (target := os.readlink(link))}


def assert_nothing_is_left(before: set[str]) -> None:
    """No thread that writes, and no file."""
    gc.collect()
    for thread in writers():
        thread.join(10)
    assert not writers() and unlinked_files() <= before
