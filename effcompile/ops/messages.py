"""Collectives made of messages from rank to rank: how gloo's processes gather, scatter and sum.

gloo makes copies in torch's allocator for its own (all_gather_into_tensor: its output, reduce_scatter_tensor:
its input), frees them from another thread a little late, and each of them, a broadcast too, costs a turn of
its threads (32 broadcasts 7 ms, 2 ranks on 2 cores). A message lands where the result is and leaves from
where the operand is, but what is small goes together: a message costs some 45 µs, the time of 75 KB on their
way. So a collective takes no memory but what is said in `collectives.py`.

A thread that does nothing else carries them: while one posts a message it holds the connection's lock, for
which gloo's thread polls without a pause, and a thread that has been computing is taken off the processor
right there (of a step of GPT-2, three layers of 128, gloo's thread spun 24 ms; 7 so).

Legend: W ranks; a whole tensor (N, ...) is W parts of ⌈N / W⌉ rows, of which the last ones may have fewer.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from effcompile.core import torch_compat_ranks
from effcompile.core.errors import RankError
from effcompile.core.stages import first_line

T = TypeVar("T")
#: Bytes of a tensor that goes together with others as small.
SMALL = 32 * 1024
#: Of messages between ranks the first tag: far from what a program of its own would take.
_TAG = 1 << 24


class _Carriers(threading.local):
    """For each thread that computes the one that carries its messages, and whose process that is: no thread
    follows a fork.
    """

    process = 0
    threads: ThreadPoolExecutor

    def carrier(self) -> ThreadPoolExecutor:
        if self.process != os.getpid():
            self.process, self.threads = os.getpid(), ThreadPoolExecutor(1, "effcompile-messages")
        return self.threads


_CARRIERS = _Carriers()


def rows_of_shard(rows: int, world: int) -> int:
    """⌈N / W⌉: as DTensor's Shard(0) divides."""
    return -(-rows // world)


def finish(begun: Iterable[dist.Work | None], group: dist.ProcessGroup) -> None:
    """Begin all of it, then wait for all of it."""
    with answered(group):
        for work in list(begun):
            if work is not None:
                work.wait()


@contextlib.contextmanager
def answered(group: dist.ProcessGroup) -> Iterator[None]:
    """What a backend raises within, where another rank does not answer, is an error that names the rank.

    Raises:
        RankError: which rank fell out.
    """
    try:
        yield
    except RuntimeError as error:
        missing = torch_compat_ranks.missing(group)
        who = f"Rank {', '.join(map(str, missing))}" if missing else "Another rank"
        raise RankError(
            f"{who} fell out of the step: it did not answer in a collective ({first_line(error)}). Its own "
            "output says why. torchrun --max-restarts=3 starts all ranks again; a loop that loads its last "
            "checkpoint goes on from there."
        ) from error


#: Tensors by the rank that they go to, or come from.
ByRank = Mapping[int, Sequence[Tensor]]


def carried(call: Callable[[], T], group: dist.ProcessGroup) -> T:
    """What a call that posts messages returns: on gloo made by the thread that carries them (another one has
    other streams of an accelerator).
    """
    if str(dist.get_backend(group)) != "gloo":
        return call()
    return _CARRIERS.carrier().submit(call).result()


def swap(given: ByRank, taken: ByRank, group: dist.ProcessGroup) -> None:
    """Send contiguous tensors to ranks, and fill others with what ranks send; they are the caller's alone
    afterwards.
    """
    bundles = [(bundle, rank) for rank, tensors in taken.items() for bundle in bundled(tensors)]
    landing = [bundle[0] if len(bundle) == 1 else _room(bundle) for bundle, _ in bundles]
    sent = [
        (bundle[0] if len(bundle) == 1 else torch.cat([tensor.view(-1) for tensor in bundle]), rank)
        for rank, tensors in given.items()
        for bundle in bundled(tensors)
    ]
    arriving = _tagged(zip(landing, (rank for _, rank in bundles), strict=True))
    leaving = _tagged(sent)
    lent = torch_compat_ranks.lent([*landing, *(tensor for tensor, _ in sent)])
    with lent, answered(group):
        carried(lambda: _carry(arriving, leaving, group), group)
    for (bundle, _), room in zip(bundles, landing, strict=True):
        if len(bundle) > 1:
            for tensor, part in zip(bundle, room.split([t.numel() for t in bundle]), strict=True):
                tensor.view(-1).copy_(part)


def bundled(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those of each message to one rank, but for empty ones: the small ones of a dtype go together."""
    alone = [[tensor] for tensor in tensors if tensor.nbytes > SMALL]
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if 0 < tensor.nbytes <= SMALL:
            small.setdefault(tensor.dtype, []).append(tensor)
    return [*alone, *small.values()]


def _room(bundle: Sequence[Tensor]) -> Tensor:
    return bundle[0].new_empty(sum(tensor.numel() for tensor in bundle))


def _tagged(messages: Iterable[tuple[Tensor, int]]) -> list[tuple[Tensor, int, int]]:
    """With a tag that no other message from, or to, the same rank has."""
    counts: Counter[int] = Counter()
    found = []
    for tensor, rank in messages:
        found.append((tensor, rank, _TAG + counts[rank]))
        counts[rank] += 1
    return found


def _carry(
    arriving: list[tuple[Tensor, int, int]], leaving: list[tuple[Tensor, int, int]], group: dist.ProcessGroup
) -> None:
    """Begin all messages (tensor, rank, tag), then wait for all of them. Empties the lists, which a carrier
    may hold longer than this takes.
    """
    # a message that is waited for need not be announced
    works = [dist.irecv(t, group=group, group_src=rank, tag=tag) for t, rank, tag in arriving]
    works += [dist.isend(t, group=group, group_dst=rank, tag=tag) for t, rank, tag in leaving]
    arriving.clear()
    leaving.clear()
    for work in works:
        assert work is not None  # this rank is one of the group
        work.wait()


def parts_of(whole: Tensor, world: int) -> list[Tensor]:
    """Of a tensor (N, ...) the rows of each rank, of which the last ones may have fewer, or none."""
    rows = rows_of_shard(whole.shape[0], world)
    return [whole[rank * rows : (rank + 1) * rows] for rank in range(world)]


def spread(parts: Sequence[Sequence[Tensor]], group: dist.ProcessGroup) -> None:
    """Of each tensor's parts, one for each rank: fill the others' with theirs, and give them this one's."""
    me, others = group.rank(), [rank for rank in range(group.size()) if rank != group.rank()]
    swap(
        {rank: [of[me] for of in parts] for rank in others},
        {rank: [of[rank] for of in parts] for rank in others},
        group,
    )


def gather(padded: Sequence[Tensor], shards: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Fill whole tensors of W equal parts with the ranks' shards."""
    parts = [whole.chunk(group.size()) for whole in padded]
    for of, shard in zip(parts, shards, strict=True):
        of[group.rank()].copy_(shard)
    spread(parts, group)


def scatter(wholes: Sequence[Tensor], shards: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Fill this rank's shards, of ⌈N / W⌉ rows, with sums over ranks."""
    parts = [parts_of(whole, group.size()) for whole in wholes]
    totals = [shard[: of[group.rank()].shape[0]] for shard, of in zip(shards, parts, strict=True)]
    _sum_parts(parts, totals, group)
    for shard, total in zip(shards, totals, strict=True):
        shard[total.shape[0] :].zero_()


def sum_all(tensors: Sequence[Tensor], totals: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Fill `totals`, contiguous, with sums over ranks: each rank makes a part and gives it to the others."""
    found = [parts_of(total.view(-1), group.size()) for total in totals]
    given = [parts_of(tensor.contiguous().view(-1), group.size()) for tensor in tensors]
    _sum_parts(given, [of[group.rank()] for of in found], group)
    spread(found, group)


def _sum_parts(parts: Sequence[Sequence[Tensor]], totals: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Fill `totals` with the sums over ranks of this rank's part of each tensor, one other rank at a time:
    what the first one sends lands there.
    """
    me, world = group.rank(), group.size()
    for turn in range(1, world):
        to, source = (me + turn) % world, (me - turn) % world
        found = totals if turn == 1 else [torch.empty_like(total) for total in totals]
        swap({to: [of[to].contiguous() for of in parts]}, {source: found}, group)
        for total, of, other in zip(totals, parts, found, strict=True):
            total.add_(of[me] if turn == 1 else other)
