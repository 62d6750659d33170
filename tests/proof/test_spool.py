"""Tensors put aside: the same ones come back, and the large ones are no memory of the process meanwhile."""

import errno

import pytest
import torch

from effcompile.core import past_the_cache
from effcompile.core.past_the_cache import PastTheCache
from effcompile.machine.room import NoRoomError
from effcompile.proof import spool


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


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every tensor that was written past the page cache, where temporary files have such a way."""
    try:
        spool.Spool()._past.write(memoryview(b"x"), 0)  # type: ignore[union-attr]
    except (OSError, AttributeError):
        pytest.skip("no way past the page cache here")
    written: list[int] = []
    write = PastTheCache.write

    def counted(self: PastTheCache, view: memoryview, at: int) -> None:
        write(self, view, at)
        written.append(len(view))

    monkeypatch.setattr(PastTheCache, "write", counted)
    return written


def test_large_ones_go_past_the_page_cache_and_come_back_to_the_bit(
    ways: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_the_cache, "_AT_ONCE", 1 << 16)  # many requests, the last one in part
    torch.manual_seed(0)
    shapes = [(1 << 18,), (300, 1001), (7,), (513, 512)]
    given = {f"{n}": torch.randn(shape) for n, shape in enumerate(shapes)}
    given["turned"] = torch.randn(700, 600).t()
    given["narrow"] = torch.randn(1 << 20).bfloat16()
    held = spool.Spool()
    for name, value in given.items():
        held.put(name, value)
    assert len(ways) == 5 and held.seconds > 0
    given["0"] = torch.randn(shapes[0])
    held.put("0", given["0"])  # in the place of the one before
    for name, value in given.items():
        found = held[name]
        assert found is not None and found.stride() == value.stride()
        torch.testing.assert_close(found, value, rtol=0, atol=0)


def test_what_cannot_go_that_way_goes_the_other(ways: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: PastTheCache, view: memoryview, at: int) -> None:
        raise OSError(errno.EINVAL, "not here")

    held, value = spool.Spool(), torch.randn(1 << 19)
    held.put("before", value)
    monkeypatch.setattr(PastTheCache, "write", refused)
    held.put("after", value + 1)
    held.put("before", value + 2)
    assert len(ways) == 1
    for name, wanted in (("after", value + 1), ("before", value + 2)):
        torch.testing.assert_close(held[name], wanted, rtol=0, atol=0)


@pytest.mark.parametrize("cache_is_faster", [True, False])
def test_the_faster_way_is_taken_once_both_were_tried(
    ways: list[int], monkeypatch: pytest.MonkeyPatch, cache_is_faster: bool
) -> None:
    monkeypatch.setattr(past_the_cache, "_KNOWN", 1)
    held, value = spool.Spool(), torch.randn(1 << 19)
    held.put("first", value)
    held.put("second", value + 1)  # through the cache, to know that, too
    assert len(ways) == 1
    past = held._past
    assert past is not None
    past.written_through(1 << 40, 1e-9 if cache_is_faster else 1e12)
    held.put("third", value + 2)
    assert len(ways) == 1 + (not cache_is_faster)
    for at, name in enumerate(("first", "second", "third")):
        torch.testing.assert_close(held[name], value + at, rtol=0, atol=0)


def test_a_full_disk_is_said(ways: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(1 << 19)

    def full(self: PastTheCache, view: memoryview, at: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PastTheCache, "write", full)
    with pytest.raises(NoRoomError, match="No space"):
        spool.Spool().put("x", value)
