"""Values held elsewhere from forward to backward: which may be, what that takes, and the calls that do it.

Forms: "offload" (on the host), "compress" (in 8 bits on the device), "compress+offload" (in 8 bits on the host).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from effcompile.estimate.storages import Storage
from effcompile.ops.compress import packed_bytes
from effcompile.ops.offload import arrived, ask, fetch, is_dense, offload, send, sent
from effcompile.ops.workspace import workspace_bytes
from effcompile.schedule.blocks import Block, Blocks

OFFLOAD, COMPRESS, BOTH = FORMS = ("offload", "compress", "compress+offload")

#: Block's index → storage → the name of the form in which the block holds it.
Away = Mapping[int, Mapping[Storage, str]]

_COMPRESS, _DECOMPRESS = torch.ops.effcompile.compress8.default, torch.ops.effcompile.decompress8.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What a node that moves a value takes.

    Attributes:
        nbytes: device bytes of what it makes; None when it makes nothing on the device (a slot, or what it was given).
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

    target: Any
    arguments: tuple[Any, ...]
    move: Move


def on_host(form: str) -> bool:
    """Whether a form's bytes are on the host."""
    return form != COMPRESS


def in_8_bits(form: str) -> bool:
    """Whether a form changes the value."""
    return form != OFFLOAD


def movable(cut: Blocks, block: Block) -> dict[str, torch.Tensor]:
    """The block's values that may be held elsewhere: it alone decides about them, and a dense tensor fills their storage."""
    found = {}
    handed_on = {s for other in cut.blocks if other is not block for s in other.entering}
    for name, s in block.values.items():
        node = cut.maker.get(s)
        value = None if node is None else node.meta.get("val")
        if s in handed_on or name in {*block.problem.leaving, *block.problem.forced} or not isinstance(value, torch.Tensor):
            continue
        if value.numel() * value.element_size() == cut.held.nbytes[s] > 0 and is_dense(tuple(value.shape), value.stride()):
            found[name] = value
    return found


def pack_workspace(value: torch.Tensor) -> int:
    """Most bytes that packing or unpacking a tensor takes beside it and its packed copy."""
    packed = torch.empty(packed_bytes(value.numel()), dtype=torch.uint8, device="meta")
    there = workspace_bytes(_COMPRESS, [value, list(value.stride())]) or 0
    return max(there, workspace_bytes(_DECOMPRESS, [packed, list(value.shape), list(value.stride()), value.dtype]) or 0)


def putting_away(cut: Blocks, s: Storage, form: str) -> Iterator[Call]:
    """The calls that turn a value into what is handed to the backward."""
    value, nbytes = _value(cut, s), cut.held.nbytes[s]
    if in_8_bits(form):
        nbytes = packed_bytes(value.numel())
        stride = list(value.stride())
        yield Call(_COMPRESS, (stride,), Move(nbytes=nbytes, workspace=workspace_bytes(_COMPRESS, [value, stride]) or 0))
    if on_host(form):
        yield Call(send if cut.host.beside else offload, (cut.host.folder,), Move(host=nbytes))


def ended(slot: fx.Node, source: fx.Node) -> tuple[Any, tuple[fx.Node, fx.Node], Move]:
    """Waiting for the copy of `source` to the host."""
    return sent, (slot, source), Move()


def begun(cut: Blocks, s: Storage, form: str, slot: fx.Node) -> tuple[Any, tuple[fx.Node], Move]:
    """Beginning the copy from the host."""
    if in_8_bits(form):
        return ask, (slot,), Move(nbytes=packed_bytes(_value(cut, s).numel()))
    return ask, (slot,), Move(nbytes=cut.held.nbytes[s], storage=s)


def restoring(cut: Blocks, s: Storage, form: str) -> Iterator[Call]:
    """The calls that make the value again of what was handed over, or of a copy that was begun."""
    value, nbytes = _value(cut, s), cut.held.nbytes[s]
    packed = packed_bytes(value.numel()) if in_8_bits(form) else None
    if on_host(form):
        size = nbytes if packed is None else packed
        if cut.host.beside:
            yield Call(arrived, (), Move(host=-size))
        else:
            yield Call(fetch, (), Move(nbytes=size, storage=s if packed is None else None, host=-size))
    if packed is not None:
        shape, stride = list(value.shape), list(value.stride())
        there = torch.empty(packed, dtype=torch.uint8, device="meta")
        workspace = workspace_bytes(_DECOMPRESS, [there, shape, stride, value.dtype]) or 0
        yield Call(_DECOMPRESS, (shape, stride, value.dtype), Move(nbytes=nbytes, storage=s, workspace=workspace))


def _value(cut: Blocks, s: Storage) -> torch.Tensor:
    value: torch.Tensor = cut.maker[s].meta["val"]
    return value
