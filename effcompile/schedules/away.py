"""Values held elsewhere from forward to backward: which may be, what that takes, and the calls that do it
(ways.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from effcompile.core.types import Args
from effcompile.estimate.storages import Storage
from effcompile.ops.offload import arrived, ask, fetch, is_dense, offload, send, sent
from effcompile.schedules.blocks import Block, Blocks
from effcompile.schedules.ways import Way

#: Block's index → storage → the way in which the block holds it.
Away = Mapping[int, Mapping[Storage, Way]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What a node that moves a value takes.

    Attributes:
        nbytes: device bytes of what it makes; None when it makes nothing on the device (a slot, or what it
            was given).
        storage: the storage that it makes anew, where it does.
        host: bytes of host memory that it takes, or gives back when negative.
        workspace: device bytes alive only while it runs.
    """

    nbytes: int | None = None
    storage: Storage | None = None
    host: int = 0
    workspace: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """`target(value, *arguments)`."""

    target: Callable[..., object]
    arguments: Args
    move: Move


def movable(cut: Blocks, block: Block) -> dict[str, torch.Tensor]:
    """The block's values that may be held elsewhere: it alone decides about them, and a dense tensor fills
    their storage.
    """
    found = {}
    handed_on = {s for other in cut.blocks if other is not block for s in other.entering}
    for name, s in block.values.items():
        node = cut.maker.get(s)
        value = None if node is None else node.meta.get("val")
        if (
            s in handed_on
            or name in {*block.problem.leaving, *block.problem.forced}
            or not isinstance(value, torch.Tensor)
        ):
            continue
        if value.numel() * value.element_size() == cut.held.nbytes[s] > 0 and is_dense(
            tuple(value.shape), value.stride()
        ):
            found[name] = value
    return found


def putting_away(cut: Blocks, s: Storage, way: Way) -> Iterator[Call]:
    """The calls that turn a value into what is handed to the backward."""
    value, nbytes, codec = _value(cut, s), cut.held.nbytes[s], way.codec
    if codec is not None:
        nbytes = codec.packed_bytes(value.numel())
        yield Call(
            codec.pack, (list(value.stride()),), Move(nbytes=nbytes, workspace=codec.pack_workspace(value))
        )
    if way.on_host:
        yield Call(send if cut.host.beside else offload, (cut.host.folder,), Move(host=nbytes))


def ended(slot: fx.Node, source: fx.Node) -> tuple[Callable[..., object], tuple[fx.Node, fx.Node], Move]:
    """Waiting for the copy of `source` to the host."""
    return sent, (slot, source), Move()


def begun(
    cut: Blocks, s: Storage, way: Way, slot: fx.Node
) -> tuple[Callable[..., object], tuple[fx.Node], Move]:
    """Beginning the copy from the host."""
    if way.codec is not None:
        return ask, (slot,), Move(nbytes=way.codec.packed_bytes(_value(cut, s).numel()))
    return ask, (slot,), Move(nbytes=cut.held.nbytes[s], storage=s)


def restoring(cut: Blocks, s: Storage, way: Way) -> Iterator[Call]:
    """The calls that make the value again of what was handed over, or of a copy that was begun."""
    value, nbytes, codec = _value(cut, s), cut.held.nbytes[s], way.codec
    packed = None if codec is None else codec.packed_bytes(value.numel())
    if way.on_host:
        size = nbytes if packed is None else packed
        if cut.host.beside:
            yield Call(arrived, (), Move(host=-size))
        else:
            yield Call(fetch, (), Move(nbytes=size, storage=s if packed is None else None, host=-size))
    if codec is not None:
        move = Move(nbytes=nbytes, storage=s, workspace=codec.unpack_workspace(value))
        yield Call(codec.unpack, (list(value.shape), list(value.stride()), value.dtype), move)


def _value(cut: Blocks, s: Storage) -> torch.Tensor:
    value: torch.Tensor = cut.maker[s].meta["val"]
    return value
