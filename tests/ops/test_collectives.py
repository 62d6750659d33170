"""Collectives on gloo ranks against sums and slices in one process; their memory; what is said where no mesh
is, or a rank falls out.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from effcompile.core import torch_compat, torch_compat_memory
from effcompile.core.errors import LoweringError, RankError, UsageError
from effcompile.ops import collectives
from effcompile.ops.collectives import (
    gather,
    link_bytes,
    mean,
    over,
    rows_of_shard,
    scatter_mean,
    summed,
    workspace_bytes,
)
from effcompile.proof.parallel.processes import on_ranks

SHAPES = ((6, 4), (7,), (1, 3), (9, 2, 2))


def wholes(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Small whole numbers: sums of them are exact in any order and in 16 bits."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape in SHAPES]


def shard_of(whole: Tensor, rank: int, ranks: int) -> Tensor:
    rows = rows_of_shard(whole.shape[0], ranks)
    padded = whole.new_zeros((rows * ranks, *whole.shape[1:]))
    padded[: whole.shape[0]] = whole
    return padded[rank * rows : (rank + 1) * rows].clone()


def all_of_them(rank: int, ranks: int, dtype: torch.dtype, coalesced: bool) -> None:
    if coalesced:  # what other backends take
        collectives._copies = lambda group: False
    theirs = [wholes(r, dtype) for r in range(ranks)]
    with over({"dp": dist.group.WORLD}):
        rows = [shape[0] for shape in SHAPES]
        found = gather([shard_of(whole, rank, ranks) for whole in theirs[0]], rows, "dp", ranks)
        assert all(torch.equal(a, b) for a, b in zip(found, theirs[0], strict=True))
        totals = [sum(each) for each in zip(*theirs, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(summed(theirs[rank], "dp", ranks), totals, strict=True))
        means = [total / ranks for total in totals]
        assert all(torch.equal(a, b) for a, b in zip(mean(theirs[rank], "dp", ranks), means, strict=True))
        shards = scatter_mean(theirs[rank], "dp", ranks)
        assert all(torch.equal(a, shard_of(b, rank, ranks)) for a, b in zip(shards, means, strict=True))
        # operands stay as they are
        assert all(torch.equal(a, b) for a, b in zip(theirs[rank], wholes(rank, dtype), strict=True))


@pytest.mark.parametrize(
    ("ranks", "dtype", "coalesced"),
    [(2, torch.float32, False), (3, torch.bfloat16, False), (3, torch.float32, True)],
)
def test_collectives_are_sums_and_slices(ranks: int, dtype: torch.dtype, coalesced: bool) -> None:
    """Rows that divide by no number of ranks, a tensor with fewer rows than ranks, 16 bits."""
    on_ranks(all_of_them, ranks, ranks, dtype, coalesced)


def peaks(rank: int) -> list[tuple[int, int]]:
    given = [torch.ones(1000, 30), torch.ones(999), torch.ones(31), torch.ones(12, 30)]
    calls = [
        (gather, [shard_of(t, rank, 2) for t in given], ([1000, 999, 31, 12], "dp", 2)),
        (scatter_mean, given, ("dp", 2)), (summed, given, ("dp", 2)), (mean, given, ("dp", 2)),
    ]  # fmt: skip
    found = []
    with over({"dp": dist.group.WORLD}):
        for operator, tensors, rest in calls:
            for _ in range(2):
                with torch_compat_memory.watched_memory("cpu") as peak:
                    made = operator(tensors, *rest)
                results = sum(t.untyped_storage().nbytes() for t in made)
            said = workspace_bytes(operator._qualname, (tensors, *rest))
            assert said is not None
            found.append((peak(), results + said))
    return found


def test_workspace_is_the_allocators() -> None:
    """gloo's thread lets go of what it worked on before the operator returns, or a peak would depend on the
    moment.
    """
    for rank in on_ranks(peaks, 2):
        for real, said in rank:
            assert 0 <= real - said <= 64, (real, said)  # a divisor is a tensor of one number


def test_small_tensors_are_summed_together_in_the_room_of_the_largest() -> None:
    """Each once, none beside another dtype; rows that are padding count."""
    sizes, dtypes = (3, 40, 7, 20, 1, 19, 0), (torch.float32,) * 6 + (torch.bfloat16,)
    given = [torch.empty(n, 4, dtype=dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    found = collectives._buckets(given, 2)
    assert sorted(i for bucket in found for i in bucket) == list(range(len(given)))
    assert len(found) == 4  # 40, 20 with 19, what is left, and the one in 16 bits
    for bucket in found:
        assert len({given[i].dtype for i in bucket}) == 1
        assert sum(collectives._padded_bytes(given[i], 2) for i in bucket) <= 40 * 4 * 4
    assert collectives._buckets([], 2) == []


def test_fakes_have_the_shapes_and_bytes_of_results() -> None:
    with torch_compat.fake_mode():
        shard = torch.empty(4, 3)
        (whole,) = torch.ops.effcompile.gather.default([shard], [7], "dp", 2)
        (mine,) = torch.ops.effcompile.scatter_mean.default([torch.empty(7, 3)], "dp", 2)
    assert (tuple(whole.shape), whole.untyped_storage().nbytes()) == ((7, 3), 8 * 3 * 4)
    assert tuple(mine.shape) == (4, 3)


def test_link_bytes_are_those_of_a_ring() -> None:
    given = [torch.empty(8, 4)]
    assert link_bytes(collectives.GATHER, (given, [32], "dp", 4)) == 3 * 128
    assert link_bytes(collectives.SCATTER_MEAN, (given, "dp", 4)) == 0.75 * 128
    assert link_bytes(collectives.MEAN, (given, "dp", 4)) == 1.5 * 128
    assert link_bytes(torch.ops.aten.mm.default, ()) is None


def test_without_a_mesh_it_says_where_it_runs() -> None:
    with pytest.raises(LoweringError, match=r"axis 'dp' .* no mesh is.*torchrun"):
        gather([torch.ones(2)], [4], "dp", 2)


def on_another_mesh(rank: int) -> None:
    with over({"dp": dist.group.WORLD}):
        summed([torch.ones(2)], "dp", 4)


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(LoweringError, match="plan has 4 ranks along 'dp' and the mesh has 2"):
        on_ranks(on_another_mesh, 2)


def one_leaves(rank: int, how: str) -> str:
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), 9)
    if rank == 1:
        time.sleep(6.0)
    try:
        with over({"dp": dist.group.WORLD}):
            summed([torch.ones(2)], "dp", 2)
    except RankError as error:
        return str(error)
    return "went on"


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankError, match="Rank 1 ended by the signal SIGKILL"):
        on_ranks(one_leaves, 2, "killed", silence=2.0)


def test_a_rank_that_hangs_is_named_after_the_time_out() -> None:
    said = on_ranks(one_leaves, 2, "hung", silence=1.0)[0]
    assert said.startswith("Rank 1 fell out of the step") and "torchrun --max-restarts" in said


@pytest.mark.parametrize("ranks", [0, 17])
def test_a_wrong_number_of_ranks_is_refused(ranks: int) -> None:
    with pytest.raises(UsageError, match=f"ranks = {ranks}"):
        on_ranks(on_another_mesh, ranks)
