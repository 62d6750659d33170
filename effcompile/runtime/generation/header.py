"""What stands beside the graphs of a saved generation, and what of it cannot be."""

from __future__ import annotations

import re

import msgspec
import torch

from effcompile.capture.generation import Boundary
from effcompile.ir.cache import CacheLayout, CacheLeaf, Growth
from effcompile.ir.plan import Plan
from effcompile.ir.program import TensorSpec
from effcompile.runtime.generation.steps import CacheRoom

#: More rows, layers or numbers of a row than this no cache has.
_MOST = 1 << 31
_PARTS = {"step", "source", "encoder", "eye"}
_LEAF = re.compile(r"\w+\.[0-9]{1,5}\.\w+(\.[0-9]{1,5})?")


class SavedGraph(msgspec.Struct, kw_only=True, frozen=True):
    """One graph: its file, and the names of its tensors in the order in which it is given them."""

    file: str
    inputs: tuple[str, ...]


class Header(msgspec.Struct, kw_only=True, frozen=True):
    """What stands beside the graphs.

    Attributes:
        kind: the model's class in transformers.
        inputs: of the step.
        graphs: part ("step", "source", "encoder", "eye") → what it is.
        eye: what the graph of an image is given.
        tables: as in `LoweredStep`.
    """

    kind: str
    boundary: Boundary
    layout: CacheLayout
    room: CacheRoom
    inputs: tuple[TensorSpec, ...]
    graphs: dict[str, SavedGraph]
    tables: dict[str, int]
    eye: tuple[TensorSpec, ...] = ()

    @property
    def encoder(self) -> tuple[str, ...]:
        """Names of the encoder's inputs; none where there is no encoder."""
        return self.graphs["encoder"].inputs if "encoder" in self.graphs else ()


def objection(header: Header, plan: Plan) -> str | None:
    """What of a header cannot be so, in words; None where all can."""
    if "step" not in header.graphs or header.graphs.keys() - _PARTS:
        return f"graphs are {', '.join(header.graphs) or 'none'}; there is a step, perhaps {sorted(_PARTS)}"
    names = [spec.name for spec in header.inputs]
    if list(header.graphs["step"].inputs) != names:
        return "graphs.step.inputs are others than inputs"
    if plan.goal.context not in (None, header.room.context) or not 0 < header.room.context < _MOST:
        return f"room.context = {header.room.context}, and the plan's is {plan.goal.context}"
    if not 0 <= header.room.chunk < _MOST:
        return f"room.chunk = {header.room.chunk} is no count of tokens"
    for spec in (*header.inputs, *header.eye):
        if not isinstance(vars(torch).get(spec.dtype), torch.dtype):
            return f"{spec.name}.dtype = {spec.dtype!r} is no dtype"
        if any(isinstance(size, int) and not 0 < size < _MOST for size in spec.shape):
            return f"{spec.name}.shape = {list(spec.shape)} is none"
    if wrong := [name for name, rows in header.tables.items() if not 0 < rows < 1 << 62]:
        return f"tables.{wrong[0]} = {header.tables[wrong[0]]} is no count of rows"
    count = len(header.layout)
    if names[len(names) - count :] != [name for name in names if name.startswith("past")]:
        return f"layout has {count} leaves, and inputs do not end with as many"
    held = zip(header.layout, header.inputs[len(names) - count :], strict=True)
    return next(filter(None, (_of_leaf(leaf, spec) for leaf, spec in held)), None)


def _of_leaf(leaf: CacheLeaf, spec: TensorSpec) -> str | None:
    if not _LEAF.fullmatch(leaf.name) or not 0 <= leaf.layer < _MOST:
        return f"no leaf of a cache is named {leaf.name[:80]!r}, of layer {leaf.layer}"
    if not leaf.shape or not all(0 < size < _MOST for size in leaf.shape) or not 0 <= leaf.window < _MOST:
        return f"{leaf.name} has the shape {list(leaf.shape)} and a window of {leaf.window}"
    if leaf.held not in ("", "bfloat16", "int8", "uint8") or leaf.item_bytes not in (1, 2, 4, 8):
        return f"{leaf.name} is held in {leaf.held[:40]!r} of {leaf.item_bytes} bytes"
    given = spec.shape[1:] if leaf.growth is Growth.STATE else (*spec.shape[1:2], *spec.shape[3:])
    if len(given) != len(leaf.shape) or any(
        isinstance(size, int) and size != own for size, own in zip(given, leaf.shape, strict=True)
    ):
        return f"{leaf.name} has the shape {list(leaf.shape)}, and {spec.name} {list(spec.shape)}"
    return None
