"""Collectives as operators of a graph: gather shards, sum and scatter, sum.

One call takes a list, so that a block is one launch.

An operator names an axis of the mesh ("dp", "tp") and its size; which processes these are is said where the
graph runs (`over`). So a graph is data: it can be planned, simulated and saved where there is one process,
and nobody measures a collective by running it alone.

On gloo they are made of messages from rank to rank (`ops/messages.py`), which take no memory but what is said
below; other backends take their own coalesced calls.

Legend: W ranks; a whole tensor (N, ...) is W shards of ⌈N / W⌉ rows, the last ones padded.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from effcompile.core import torch_compat_ranks
from effcompile.core.errors import LoweringError
from effcompile.ops import messages
from effcompile.ops.messages import answered, finish, parts_of, rows_of_shard, spread

__all__ = [
    "gather",
    "is_collective",
    "link_bytes",
    "mean",
    "message_count",
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


@torch.library.custom_op("effcompile::gather", mutates_args=())
def gather(shards: list[Tensor], rows: list[int], axis: str, world: int) -> list[Tensor]:
    """The whole tensors (N, ...) of padded shards (⌈N / W⌉, ...); `rows`: their N."""
    group = _group(axis, world)
    padded = [shard.new_empty((world * shard.shape[0], *shard.shape[1:])) for shard in shards]
    if _copies(group):
        messages.gather(padded, shards, group)
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
        messages.scatter(wholes, shards, group)
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
    if _copies(group):
        totals = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        messages.sum_all(tensors, totals, group)
        return totals
    totals = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    finish((_all_reduce(total, group) for total in totals), group)
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
    if _copies(group):
        spread([parts_of(whole, group.size()) for whole in wholes], group)
        return
    finish(
        (
            _broadcast(part, source, group)
            for whole in wholes
            for source, part in enumerate(parts_of(whole, group.size()))
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
    return group.size() > 1 and str(dist.get_backend(group)) == "gloo"


def _broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work | None:
    return dist.broadcast(tensor, group=group, group_src=source, async_op=True) if tensor.numel() else None


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    return dist.all_reduce(tensor, group=group, async_op=True) if tensor.numel() else None


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


def _gather_bytes(shards: Sequence[Tensor], world: int) -> int:
    """What goes together, for every other rank, and what comes so from each."""
    return 2 * (world - 1) * _bundled_bytes([(shard.nbytes, shard.dtype) for shard in shards])


def _scatter_bytes(wholes: Sequence[Tensor], world: int) -> int:
    """Parts that are not contiguous, on their way; what goes and comes together; what arrives from the third
    rank.
    """
    rows = [rows_of_shard(int(whole.shape[0]), world) for whole in wholes]
    each = [whole.nbytes // max(1, int(whole.shape[0])) for whole in wholes]
    parts = [count * nbytes for count, nbytes in zip(rows, each, strict=True)]
    copied = sum(part for part, whole in zip(parts, wholes, strict=True) if not whole.is_contiguous())
    together = _parts_bytes(
        [(int(w.shape[0]), nbytes, w.dtype) for w, nbytes in zip(wholes, each, strict=True)], world
    )
    return copied + 2 * together + (sum(parts) if world > 2 else 0)


def _sum_bytes(tensors: Sequence[Tensor], world: int) -> int:
    """Tensors that are not contiguous; what goes and comes together; what arrives from the third rank, or,
    once there are sums, what goes together with each.
    """
    copied = sum(tensor.nbytes for tensor in tensors if not tensor.is_contiguous())
    parts = sum(rows_of_shard(tensor.numel(), world) * tensor.element_size() for tensor in tensors)
    together = _parts_bytes([(t.numel(), t.element_size(), t.dtype) for t in tensors], world)
    return copied + max(2 * together + (parts if world > 2 else 0), 2 * (world - 1) * together)


def _parts_bytes(tensors: Sequence[tuple[int, int, torch.dtype]], world: int) -> int:
    """Of tensors (rows, bytes of a row, dtype) what goes together to that rank to which it is most: the last
    ranks have fewer rows.
    """
    shards = [(rows_of_shard(rows, world), rows, nbytes, dtype) for rows, nbytes, dtype in tensors]
    ranks = {0, *(rows // each for each, rows, _, _ in shards if each and rows // each < world)}
    return max(
        _bundled_bytes([(max(0, min(each, n - rank * each)) * nbytes, t) for each, n, nbytes, t in shards])
        for rank in ranks
    )


def _bundled_bytes(parts: Sequence[tuple[int, torch.dtype]]) -> int:
    """Of tensors (bytes, dtype) for one rank those that go together with others (`messages.bundled`)."""
    small: dict[torch.dtype, list[int]] = defaultdict(list)
    for nbytes, dtype in parts:
        if 0 < nbytes <= messages.SMALL:
            small[dtype].append(nbytes)
    return sum(sum(sizes) for sizes in small.values() if len(sizes) > 1)


#: Operator → the bytes that it takes for itself (gloo's ways above; other backends take no more), and that
#: cross a rank's link.
_WORKSPACE: dict[str, Callable[[Sequence[Tensor], int], int]] = {
    "effcompile::gather": _gather_bytes,
    "effcompile::scatter_mean": _scatter_bytes,
    "effcompile::summed": _sum_bytes,
    "effcompile::mean_over_ranks": _sum_bytes,
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


def message_count(target: object, args: Sequence[object]) -> int | None:
    """Messages from a rank to another one where they are made of messages; None where `target` is no
    collective.
    """
    if (name := _name(target)) not in _LINK:
        return None
    tensors, world = args[0], args[-1]
    assert isinstance(tensors, (list, tuple)) and isinstance(world, int)
    parts = world if name != "effcompile::gather" else 1  # that a tensor is divided into
    sizes = [(t.nbytes // parts, t.dtype) for t in tensors if t.nbytes]
    large = sum(nbytes > messages.SMALL for nbytes, _ in sizes)
    once = large + len({dtype for nbytes, dtype in sizes if nbytes <= messages.SMALL})
    return once if name in ("effcompile::gather", "effcompile::scatter_mean") else 2 * once
