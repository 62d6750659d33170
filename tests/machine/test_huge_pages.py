"""Weights in large pages: the same numbers, in storages of their own."""

from __future__ import annotations

import copy
import gc
import io
import mmap
import sys
import weakref

import pytest
import torch
from torch import nn

from effcompile.machine import huge_pages

LINUX = hasattr(mmap, "MADV_HUGEPAGE")


def weight(mebibytes: float, fill: int = 0) -> torch.Tensor:
    return torch.arange(int(mebibytes * (1 << 20))).add(fill).to(torch.uint8)


@pytest.mark.skipif(not LINUX, reason="the system has no madvise(MADV_HUGEPAGE)")
def test_they_lie_side_by_side_and_hold_the_same() -> None:
    weights = [weight(1.5), nn.Parameter(weight(2.25, 7).view(-1, 16), requires_grad=False), weight(0.25, 9)]
    before = [each.clone() for each in weights]
    huge_pages.move(weights)
    assert all(torch.equal(a, b) and a.shape == b.shape for a, b in zip(weights, before, strict=True))
    starts = [each.data_ptr() for each in weights]
    assert not starts[0] % huge_pages.PAGE and starts == sorted(starts)
    assert starts[1] - starts[0] == weights[0].nbytes and isinstance(weights[1], nn.Parameter)


@pytest.mark.skipif(not LINUX, reason="the system has no madvise(MADV_HUGEPAGE)")
def test_packed_pairs_lie_there_too() -> None:
    """Weights of two bytes as kernels read them, and no others."""
    pairs = [torch.randn(96, 200, 16, 2).to(dtype) for dtype in (torch.bfloat16, torch.int16)] * 2
    plain = torch.randn(600, 2000).bfloat16()
    before, place = [each.clone() for each in pairs], plain.data_ptr()
    huge_pages.move([*pairs, plain])
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(pairs, before, strict=True))
    assert not pairs[0].data_ptr() % huge_pages.PAGE and pairs[1].data_ptr() - pairs[0].data_ptr() == 1228800
    assert plain.data_ptr() == place


@pytest.mark.skipif(not LINUX, reason="the system has no madvise(MADV_HUGEPAGE)")
def test_each_is_saved_and_copied_alone_and_goes_when_it_goes() -> None:
    first, second = weight(2), weight(1)
    huge_pages.move([first, second])
    content = io.BytesIO()
    torch.save(second, content)
    assert content.tell() < 1.2 * second.nbytes and second.untyped_storage().nbytes() == second.nbytes
    assert torch.equal(copy.deepcopy(first), first)
    gone = weakref.ref(first.untyped_storage())
    del first
    gc.collect()
    assert gone() is None and int(second[3]) == 3


@pytest.mark.skipif(not LINUX, reason="the system has no madvise(MADV_HUGEPAGE)")
def test_what_one_looks_at_goes_with_it() -> None:
    """torch.export.load gives views of what it read."""
    read = weight(3)
    seen, before = read.view(3, -1), read.clone()
    gone = weakref.ref(read.untyped_storage())
    huge_pages.move([seen])
    gc.collect()
    assert gone() is None and torch.equal(read, before) and torch.equal(seen.flatten(), before)
    assert read.data_ptr() == seen.data_ptr()


def test_what_is_small_of_another_kind_or_seen_in_parts_stays() -> None:
    others = [weight(0.5), torch.zeros(1 << 20), weight(4)[::2], weight(4).to("meta")]
    places = [each.data_ptr() for each in others[:3]]
    huge_pages.move(others)
    assert [each.data_ptr() for each in others[:3]] == places


def test_one_that_is_given_twice_is_moved_once() -> None:
    one = weight(3)
    huge_pages.move([one, one])
    assert torch.equal(one, weight(3))


def test_a_system_without_them_leaves_all_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    one = weight(3)
    place = one.data_ptr()
    huge_pages.move([one])
    assert one.data_ptr() == place


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux")
def test_where_they_are_nothing_moves() -> None:
    """Whatever the kernel does of it: small ones, a view that is not dense and an empty one, too."""
    weights = [torch.randn(3 << 20), torch.randn(700, 1000), torch.randn(4, 4), torch.randn(9, 5).T]
    weights += [torch.empty(0), weights[0][1000 : 2 << 20]]
    before = [(each.data_ptr(), each.clone()) for each in weights]
    huge_pages.collapse(weights)
    assert all(
        each.data_ptr() == at and torch.equal(each, was)
        for each, (at, was) in zip(weights, before, strict=True)
    )
