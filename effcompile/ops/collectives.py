"""Collectives as operators of a graph: gather shards, sum and scatter, sum.

One call takes a list, so that a block is one launch.

An operator names an axis of the mesh ("dp", "tp") and its size; which processes these are is said where the
graph runs (`over`). So a graph is data: it can be planned, simulated and saved where there is one process,
and nobody measures a collective by running it alone.

gloo makes copies in torch's allocator for its gathers and scatters (all_gather_into_tensor: its output,
reduce_scatter_tensor: its input), and frees them from another thread a little late. Broadcasts and reductions
in place make none and take no longer (measured, 2 and 4 ranks), so these are what is used there: then the
allocator's peak is the simulated one to the byte. Other backends take their own coalesced calls.

Legend: W ranks; a whole tensor (N, ...) is W shards of ⌈N / W⌉ rows, the last ones padded.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from effcompile.core import torch_compat_ranks
from effcompile.core.errors import LoweringError, RankError
from effcompile.core.stages import first_line

__all__ = [
    "gather",
    "is_collective",
    "link_bytes",
    "mean",
    "over",
    "rows_of_shard",
    "scatter_mean",
    "summed",
    "workspace_bytes",
]

#: Axis of the mesh → the processes along it.
Groups = Mapping[str, "dist.ProcessGroup"]


class _Local(threading.local):
    groups: Groups | None = None


_LOCAL = _Local()


@contextlib.contextmanager
def over(groups: Groups) -> Iterator[None]:
    """Collectives within, in this thread, are among these processes."""
    before, _LOCAL.groups = _LOCAL.groups, groups
    try:
        yield
    finally:
        _LOCAL.groups = before


def rows_of_shard(rows: int, world: int) -> int:
    """⌈N / W⌉: as DTensor's Shard(0) divides."""
    return -(-rows // world)


@torch.library.custom_op("effcompile::gather", mutates_args=())
def gather(shards: list[Tensor], rows: list[int], axis: str, world: int) -> list[Tensor]:
    """The whole tensors (N, ...) of padded shards (⌈N / W⌉, ...); `rows`: their N."""
    group = _group(axis, world)
    padded = [shard.new_empty((world * shard.shape[0], *shard.shape[1:])) for shard in shards]
    if _copies(group):
        _gather(padded, shards, group)
    else:
        with answered(group):
            torch_compat_ranks.gather_into(padded, [shard.contiguous() for shard in shards], group)
    return [whole[:count] for whole, count in zip(padded, rows, strict=True)]


@gather.register_fake
def _(shards, rows, axis, world):  # type: ignore[no-untyped-def]
    padded = [shard.new_empty((world * shard.shape[0], *shard.shape[1:])) for shard in shards]
    return [whole[:count] for whole, count in zip(padded, rows, strict=True)]


@torch.library.custom_op("effcompile::scatter_mean", mutates_args=())
def scatter_mean(wholes: list[Tensor], axis: str, world: int) -> list[Tensor]:
    """The rank's padded shard (⌈N / W⌉, ...) of the mean over ranks of each tensor (N, ...)."""
    group = _group(axis, world)
    shards = [_shard_like(whole, world) for whole in wholes]
    if _copies(group):
        for bucket in _buckets(wholes, world):
            _scatter([wholes[i] for i in bucket], [shards[i] for i in bucket], group)
    else:
        even = [w.contiguous() if w.shape[0] % world == 0 else _padded_copy(w, world) for w in wholes]
        with answered(group):
            torch_compat_ranks.reduce_scatter_into(shards, even, group)
    for shard in shards:
        shard.div_(world)
    return shards


@scatter_mean.register_fake
def _(wholes, axis, world):  # type: ignore[no-untyped-def]
    return [_shard_like(whole, world) for whole in wholes]


@torch.library.custom_op("effcompile::summed", mutates_args=())
def summed(tensors: list[Tensor], axis: str, world: int) -> list[Tensor]:
    """The sum over ranks of each tensor, on every rank, to the same bits."""
    group = _group(axis, world)
    totals = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    with torch_compat_ranks.lent(totals):
        _finish((_all_reduce(total, group) for total in totals), group)
    return totals


@summed.register_fake
def _(tensors, axis, world):  # type: ignore[no-untyped-def]
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


@torch.library.custom_op("effcompile::mean_over_ranks", mutates_args=())
def mean(tensors: list[Tensor], axis: str, world: int) -> list[Tensor]:
    """The mean over ranks of each tensor, on every rank, to the same bits."""
    return [total.div_(world) for total in summed(tensors, axis, world)]


@mean.register_fake
def _(tensors, axis, world):  # type: ignore[no-untyped-def]
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


def exchange_rows(wholes: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank what each has of whole tensors (N, ...), in place: the first ⌈N / W⌉ rows the first."""
    with torch_compat_ranks.lent(wholes):
        _finish(
            (
                _broadcast(part, source, group)
                for whole in wholes
                for source, part in enumerate(whole.split(rows_of_shard(whole.shape[0], group.size())))
            ),
            group,
        )


#: As graphs have them.
GATHER, SCATTER_MEAN = torch.ops.effcompile.gather.default, torch.ops.effcompile.scatter_mean.default
MEAN, SUMMED = torch.ops.effcompile.mean_over_ranks.default, torch.ops.effcompile.summed.default


def _group(axis: str, world: int) -> dist.ProcessGroup:
    """The processes along an axis.

    Raises:
        LoweringError: none are known here, or another number of them.
    """
    group = None if _LOCAL.groups is None else _LOCAL.groups.get(axis)
    if group is None:
        raise LoweringError(
            f"A collective over the axis {axis!r} of the mesh was run where no mesh is. A plan for {world} "
            "ranks runs under torchrun, by effcompile.optimize(model, ..., mesh=...)."
        )
    if group.size() != world:
        raise LoweringError(
            f"The plan has {world} ranks along {axis!r} and the mesh has {group.size()}. Plan again for "
            "this mesh."
        )
    return group


def _copies(group: dist.ProcessGroup) -> bool:
    """Whether the backend copies what it gathers and scatters."""
    return str(dist.get_backend(group)) == "gloo"


def _broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work | None:
    return dist.broadcast(tensor, group=group, group_src=source, async_op=True) if tensor.numel() else None


def _reduce(tensor: Tensor, into: int, group: dist.ProcessGroup) -> dist.Work | None:
    return dist.reduce(tensor, group=group, group_dst=into, async_op=True) if tensor.numel() else None


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    view = tensor.view(tensor.shape)  # whoever holds it holds the storage once more, which `lent` sees
    return dist.all_reduce(view, group=group, async_op=True) if tensor.numel() else None


def _finish(begun: Iterable[dist.Work | None], group: dist.ProcessGroup) -> None:
    """Begin all of it, then wait for all of it."""
    with answered(group):
        works = list(begun)
        while works:
            if (work := works.pop(0)) is not None:
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


def _buckets(wholes: Sequence[Tensor], world: int) -> list[list[int]]:
    """Which tensors are copied together: of one dtype, and in no more bytes than the largest has alone.

    A reduction of gloo's costs both processes a turn, whatever its size: a layer's in buckets took about
    two thirds of the time that they took one by one (2 ranks on 2 cores, 64 to 256 wide).
    """
    room = max((_padded_bytes(whole, world) for whole in wholes), default=0)
    found: list[tuple[torch.dtype, int, list[int]]] = []
    for i in sorted(range(len(wholes)), key=lambda i: -_padded_bytes(wholes[i], world)):
        dtype, size = wholes[i].dtype, _padded_bytes(wholes[i], world)
        at = next((at for at, (of, held, _) in enumerate(found) if of == dtype and held + size <= room), None)
        if at is None:
            found.append((dtype, size, [i]))
        else:
            found[at] = (dtype, found[at][1] + size, [*found[at][2], i])
    return [bucket for _, _, bucket in found]


def _scatter(wholes: Sequence[Tensor], shards: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over ranks, of which this rank has its shards then: one reduction for each rank."""
    counts = [shard.numel() for shard in shards]
    copy = wholes[0].new_zeros((group.size(), sum(counts)))
    places = [row.split(counts) for row in copy]  # rank → of each tensor
    for at, (whole, shard) in enumerate(zip(wholes, shards, strict=True)):
        for place, part in zip(places, whole.split(max(1, shard.shape[0])), strict=False):
            place[at][: part.numel()].view(part.shape).copy_(part)
    with torch_compat_ranks.lent([copy]):
        _finish((_reduce(row, into, group) for into, row in enumerate(copy)), group)
    for shard, found in zip(shards, places[group.rank()], strict=True):
        shard.copy_(found.view(shard.shape))


def _small(shards: Sequence[Tensor]) -> list[int]:
    """Which shards are sent together, for a broadcast of gloo's costs a turn, too: vectors beside weights."""
    room = max((shard.nbytes for shard in shards), default=0) // 4
    found: list[int] = []
    for i, shard in enumerate(shards):
        if shard.nbytes <= min(room, 1 << 14) and shard.dtype == shards[(found or [i])[0]].dtype:
            found.append(i)
            room -= shard.nbytes
    return found if len(found) > 1 else []


def _gather(padded: Sequence[Tensor], shards: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Fill whole tensors with the ranks' shards, in place."""
    me, small = group.rank(), _small(shards)
    large = [i for i in range(len(shards)) if i not in small]
    counts = [shards[i].numel() for i in small]
    copies = [shards[small[0]].new_empty((group.size(), sum(counts)))] if small else []
    for copy in copies:
        for place, i in zip(copy[me].split(counts), small, strict=True):
            place.view(shards[i].shape).copy_(shards[i])
    for i in large:
        padded[i].chunk(group.size())[me].copy_(shards[i])
    lent = [*(padded[i] for i in large), *copies]
    with torch_compat_ranks.lent(lent):
        _finish(
            (
                _broadcast(part, source, group)
                for whole in lent
                # held by gloo alone, so that `lent` sees when it lets go
                for source, part in enumerate(whole.chunk(group.size()))
            ),
            group,
        )
    for copy in copies:
        for places, i in zip(copy.split(counts, 1), small, strict=True):
            padded[i].view(places.shape).copy_(places)


def _shard_like(whole: Tensor, world: int) -> Tensor:
    return whole.new_empty((rows_of_shard(whole.shape[0], world), *whole.shape[1:]))


def _padded_copy(whole: Tensor, world: int) -> Tensor:
    """A copy (W ⌈N / W⌉, ...) whose last rows are 0."""
    rows = world * rows_of_shard(whole.shape[0], world)
    copy = whole.new_empty((rows, *whole.shape[1:]))
    copy[: whole.shape[0]].copy_(whole)
    copy[whole.shape[0] :].zero_()
    return copy


# ------------------------------------------------------------------ what they cost


def _padded_bytes(tensor: Tensor, world: int) -> int:
    rows = world * rows_of_shard(int(tensor.shape[0]), world)
    return rows * (tensor.numel() // max(1, int(tensor.shape[0]))) * tensor.element_size()


#: Operator → the bytes that it takes for itself (gloo's ways above; other backends take no more), and that
#: cross a rank's link.
_WORKSPACE: dict[str, Callable[[Sequence[Tensor], int], int]] = {
    "effcompile::gather": lambda tensors, world: world * sum(tensors[i].nbytes for i in _small(tensors)),
    "effcompile::scatter_mean": lambda tensors, world: max(_padded_bytes(t, world) for t in tensors),
    "effcompile::summed": lambda tensors, world: 0,
    "effcompile::mean_over_ranks": lambda tensors, world: 0,
}
_LINK: dict[str, Callable[[int, int], float]] = {
    "effcompile::gather": lambda nbytes, world: nbytes * (world - 1),  # of shards
    "effcompile::scatter_mean": lambda nbytes, world: nbytes * (world - 1) / world,
    "effcompile::summed": lambda nbytes, world: 2 * nbytes * (world - 1) / world,
    "effcompile::mean_over_ranks": lambda nbytes, world: 2 * nbytes * (world - 1) / world,
}


def _name(target: object) -> str:
    return str(getattr(target, "name", lambda: "")()).removesuffix(".default")


def is_collective(target: object) -> bool:
    """Whether a graph node's target is one of these operators."""
    return _name(target) in _LINK


def workspace_bytes(name: str, args: Sequence[object]) -> int | None:
    """Bytes alive at the highest instant inside, beyond inputs and outputs; None where `name` is no
    collective.
    """
    if name not in _WORKSPACE:
        return None
    tensors, world = args[0], args[-1]
    assert isinstance(tensors, (list, tuple)) and isinstance(world, int)
    return _WORKSPACE[name](tensors, world)


def link_bytes(target: object, args: Sequence[object]) -> float | None:
    """Bytes that each rank receives in a ring (Thakur et al. 2005); None where `target` is no collective."""
    if (name := _name(target)) not in _LINK:
        return None
    tensors, world = args[0], args[-1]
    assert isinstance(tensors, (list, tuple)) and isinstance(world, int)
    return _LINK[name](sum(t.numel() * t.element_size() for t in tensors), world)
