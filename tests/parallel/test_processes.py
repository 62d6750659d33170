"""Ranks of one machine run what they are given, or say what keeps them from it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from effcompile.core import torch_compat_aot
from effcompile.core.errors import RankError, UsageError
from effcompile.proof.parallel.processes import on_ranks


def _sum(rank: int) -> float:
    found = torch.tensor([rank + 1.0])
    dist.all_reduce(found)
    return float(found)


def test_an_interface_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(RankError, match=r"\$GLOO_SOCKET_IFNAME names 'nosuch0'; .* here: .*lo"):
        on_ranks(_sum, 2)


def test_ranks_that_tell_each_other_nothing_meet_all_the_same() -> None:
    """One that left at once closed what the others were still connecting to."""
    for _ in range(10):
        assert on_ranks(lambda rank: rank, 4) == [0, 1, 2, 3]


def test_a_fork_that_may_run_no_backward_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch refuses it once autograd has threads for a GPU."""

    def refused() -> None:
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing"
        )

    monkeypatch.setattr(torch_compat_aot, "small_backward", refused)
    with pytest.raises(UsageError, match=r"threads for a GPU.*CUDA_VISIBLE_DEVICES="):
        on_ranks(_sum, 2)


AFTER_FAKE_TENSORS = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from effcompile.core.torch_compat_aot import begin_autograd, small_backward
from effcompile.proof.parallel.processes import on_ranks

begin_autograd()
with FakeTensorMode():
    torch.ones(2, device="cpu")
small_backward()
print(on_ranks(lambda rank: small_backward() or rank, 2))
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="autograd has threads for the GPU")
def test_ranks_run_backwards_after_fake_tensors() -> None:
    """torch's build with CUDA counts stand-ins for devices from the first fake tensor on."""
    found = subprocess.run(
        [sys.executable, "-c", AFTER_FAKE_TENSORS], capture_output=True, text=True, check=False
    )
    assert found.stdout.split() == ["[0,", "1]"], found.stderr
