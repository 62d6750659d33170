"""Ranks of one machine say which network interface they cannot meet on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from effcompile.core.errors import RankError
from effcompile.proof.parallel.processes import on_ranks


def _sum(rank: int) -> float:
    found = torch.tensor([rank + 1.0])
    dist.all_reduce(found)
    return float(found)


def test_an_interface_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(RankError, match=r"\$GLOO_SOCKET_IFNAME names 'nosuch0'; .* here: .*lo"):
        on_ranks(_sum, 2)
