"""Copies to the host and back: bits, sizes and strides as they were; the pool's bytes; nothing
left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effcompile.core.errors import UsageError
from effcompile.ops.offload import (
    HostPool,
    arrived,
    ask,
    fetch,
    host_pool,
    is_dense,
    link_seconds,
    offload,
    send,
    sent,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]


@settings(max_examples=40, deadline=None)
@given(
    size=st.lists(st.integers(0, 5), max_size=4),
    dtype=st.sampled_from(DTYPES),
    order=st.randoms(use_true_random=False),
    beside=st.booleans(),
)
def test_a_value_comes_back_as_it_was(
    size: list[int], dtype: torch.dtype, order: object, beside: bool
) -> None:
    axes = list(range(len(size)))
    order.shuffle(axes)
    x = (torch.randn(size) * 100).to(dtype).permute(axes)
    pool = host_pool()
    before = pool.in_use
    slot = sent(send(x), x) if beside else offload(x)
    assert pool.in_use - before == x.numel() * x.element_size()
    found = arrived(ask(slot)) if beside else fetch(slot)
    assert pool.in_use == before
    assert torch.equal(found, x)
    assert found.dtype == x.dtype
    assert (found.stride() == x.stride()) or x.numel() == 0 or not is_dense(tuple(x.shape), x.stride())


def test_dense_is_every_place_once() -> None:
    assert is_dense((2, 3), (3, 1))
    assert is_dense((2, 3), (1, 2))
    assert is_dense((2, 1, 3), (3, 77, 1))
    assert not is_dense((2, 3), (4, 1))
    assert not is_dense((2, 3), (0, 1))
    assert not is_dense((2, 2, 2), (1, 1, 5))


def test_a_part_of_a_tensor_with_gaps_comes_back_too() -> None:
    x = torch.randn(4, 6)[:, ::2]
    assert torch.equal(fetch(offload(x)), x)


def test_the_pool_counts_and_uses_slots_again() -> None:
    pool = HostPool(tempfile.gettempdir())
    a, b = pool.take(5000)[0], pool.take(3)[0]
    assert (pool.in_use, pool.peak) == (5003, 5003)
    size = pool.size
    pool.give_back(a, 5000)
    again = pool.take(5001)[0]
    assert pool.size == size
    assert again.data_ptr() == a.data_ptr()
    assert (pool.in_use, pool.peak) == (5004, 5004)
    pool.give_back(b, 3)
    pool.reset_peak()
    assert pool.peak == 5001


def test_a_slot_that_nobody_holds_is_given_back() -> None:
    pool = host_pool()
    before = pool.in_use
    slot = offload(torch.ones(1000))
    assert pool.in_use == before + 4000
    del slot
    assert pool.in_use == before


def test_a_folder_that_is_none_and_a_full_disk_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"offload\.folder"):
        HostPool(str(tmp_path / "nowhere"))
    pool = HostPool(str(tmp_path))

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match="No space left"):
        pool.take(10)


def test_a_kill_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import os, signal, torch\nfrom effcompile.ops.offload import offload\ns = "
        f"offload(torch.ones(99999), {str(tmp_path)!r})\n"
    )
    code += "print(len(os.listdir('/proc/self/fd')) > 0, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.strip() == "True", done.stderr
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_the_link_is_measured() -> None:
    out, back = link_seconds()
    assert 0 < out < 1
    assert 0 < back < 1
