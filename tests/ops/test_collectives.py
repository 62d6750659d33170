"""Collectives on gloo ranks against sums and slices in one process; their memory; what is said where no mesh
is, or a rank falls out.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

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
    message_count,
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


def sent(rank: int) -> list[tuple[int, int]]:
    """(messages that were sent, said) of each operator, of large and small tensors of two dtypes."""
    shapes = [(20_000, 2), (7,), (3, 5), (0, 4), (16_384,)]
    given = [
        (torch.arange(torch.Size(shape).numel()) % 11 + rank).view(shape).to(dtype)
        for shape, dtype in zip(shapes, [torch.float32, torch.float32, torch.bfloat16] * 2, strict=False)
    ]
    posted, own, found = [0], dist.isend, []

    def counted(*args: object, **kwargs: object) -> object:
        posted[0] += 1
        return own(*args, **kwargs)

    dist.isend = counted
    with over({"dp": dist.group.WORLD}):
        for operator, target in ((scatter_mean, collectives.SCATTER_MEAN), (summed, collectives.SUMMED)):
            posted[0] = 0
            made = operator(given, "dp", 2)
            assert all(torch.isfinite(t.float()).all() for t in made)
            found.append((posted[0], message_count(target, (given, "dp", 2)) or 0))
        posted[0] = 0
        shards, rows = [shard_of(t, rank, 2) for t in given], [t.shape[0] for t in given]
        wholes = gather(shards, rows, "dp", 2)
        for whole, mine in zip(wholes, given, strict=True):  # the other's rows are off by one
            half = rows_of_shard(mine.shape[0], 2)
            other = mine + (1 - 2 * rank)
            want = torch.cat([mine[:half], other[half:]] if rank == 0 else [other[:half], mine[half:]])
            assert torch.equal(whole, want)
        found.append((posted[0], message_count(collectives.GATHER, (shards, rows, "dp", 2)) or 0))
    return found


def test_what_is_small_goes_in_one_message_for_each_dtype() -> None:
    for calls in on_ranks(sent, 2):
        assert all(real == said for real, said in calls), calls
        assert calls[0][0] == 3  # 80 KB; 32 KB and 16 B of fp32; what is of bf16


#: Bytes of a row of the tensors below.
ROW = 30 * 4


def peaks(rank: int, ranks: int) -> list[tuple[int, int]]:
    across = torch.ones(1000, 60)[:, :30]  # not contiguous
    given = [torch.ones(1000, 30), torch.ones(999), across, torch.ones(31), torch.ones(12, 30)]
    rows = [1000, 999, 1000, 31, 12]
    calls = [
        (gather, [shard_of(t, rank, ranks) for t in given], (rows, "dp", ranks)),
        (scatter_mean, given, ("dp", ranks)), (summed, given, ("dp", ranks)), (mean, given, ("dp", ranks)),
    ]  # fmt: skip
    found = []
    with over({"dp": dist.group.WORLD}):
        for operator, tensors, rest in calls:
            for _ in range(3):
                with torch_compat_memory.watched_memory("cpu") as peak:
                    made = operator(tensors, *rest)
                results = sum(t.untyped_storage().nbytes() for t in made)
                said = workspace_bytes(operator._qualname, (tensors, *rest))
                assert said is not None
                found.append((peak(), results + said))
                del made
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_workspace_is_the_allocators(ranks: int) -> None:
    """At each call: nothing that carries a message holds it when the operator returns."""
    for rank, calls in enumerate(on_ranks(peaks, ranks, ranks)):
        for real, said in calls:
            # a divisor is a tensor of one number; what goes to the last rank may be some rows shorter
            assert -64 <= said - real <= (ranks - 1) * len(SHAPES) * ROW, (rank, real, said)


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


def one_leaves(rank: int, how: str, operator: Callable[..., object]) -> str:
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), 9)
    if rank == 1:
        time.sleep(4.0)
    try:
        with over({"dp": dist.group.WORLD}):
            operator([torch.ones(2)], *([[4]] if operator is gather else []), "dp", 2)
    except RankError as error:
        return str(error)
    return "went on"


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankError, match="Rank 1 ended by the signal SIGKILL"):
        on_ranks(one_leaves, 2, "killed", summed, silence=2.0)


@pytest.mark.parametrize("operator", [summed, gather, scatter_mean])
def test_a_rank_that_hangs_is_named_after_the_time_out(operator: Callable[..., object]) -> None:
    said = on_ranks(one_leaves, 2, "hung", operator, silence=1.0)[0]
    assert said.startswith("Rank 1 fell out of the step") and "torchrun --max-restarts" in said


def in_threads(rank: int) -> list[float]:
    """Two steps at once, of other processes' groups, in threads that come to them in another order."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    found: dict[int, float] = {}

    def step(number: int) -> None:
        time.sleep(0.2 * abs(number - rank))
        with over({"dp": groups[number]}):
            (total,) = summed([torch.full((9,), float(number + 1))], "dp", 2)
        found[number] = float(total[0])

    threads = [threading.Thread(target=step, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(2)]


def test_steps_in_threads_do_not_wait_for_each_other() -> None:
    assert on_ranks(in_threads, 2, silence=10.0) == [[2.0, 4.0]] * 2


@pytest.mark.parametrize("ranks", [0, 17])
def test_a_wrong_number_of_ranks_is_refused(ranks: int) -> None:
    with pytest.raises(UsageError, match=f"ranks = {ranks}"):
        on_ranks(on_another_mesh, ranks)
