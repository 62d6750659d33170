"""A lowered step of generation at work: one call takes new tokens and a Hugging Face cache, and leaves that
cache longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import fx, nn

from effcompile.backends.onnxruntime import OnnxModel, OpenedStep
from effcompile.backends.openvino.steps import OpenVinoGraph
from effcompile.backends.torch import TorchLowered
from effcompile.backends.torch.in_place import in_place, in_place_of_many
from effcompile.backends.torch.regions import FEW
from effcompile.backends.torch.still import still
from effcompile.capture.caches import HFCache, fill, held, records, seen_by
from effcompile.capture.generation import Boundary
from effcompile.capture.images import ImageToken
from effcompile.core.autocast import within
from effcompile.core.errors import GuardError, LoweringError
from effcompile.ir.cache import CacheLayout, CacheLeaf, Growth
from effcompile.ir.program import TensorSpec
from effcompile.machine import huge_pages
from effcompile.ops.append import buffer, last
from effcompile.runtime.carry import carried
from effcompile.runtime.generation.images import between, between_images
from effcompile.runtime.inputs import check_index

#: How the memory of a cache is taken: all at once, or as it is needed.
CacheMemory = Literal["static", "growing"]
Run = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoom:
    """What a cache has room for.

    Attributes:
        context: tokens of a row at the most, past and new.
        memory: "static" takes the rows of the whole context at the first token; "growing" those that are
            there.
        chunk: tokens of a prompt that are given to the graph at once, a rest first; 0: all.
    """

    context: int
    chunk: int = 0
    memory: CacheMemory = "static"

    def capacity(self, leaf: CacheLeaf) -> int:
        """Rows of a new buffer; 0: as many as are needed."""
        return leaf.capacity(self.context) if self.memory == "static" else 0


@dataclass(frozen=True, kw_only=True)
class LoweredStep:
    """Flat functions that a backend made, and what their tensors are.

    Attributes:
        tables: input of a graph that is looked up as it is → rows of the smallest table that it is looked up
            in.
        many: runs a step of more than FEW tokens, where that is another function.
        image: what stands for one, where the step takes images.
        eye: makes rows of features of one, which is given as `eye_inputs` say.
        recorded: what of it is a CUDA graph, for a report.
    """

    boundary: Boundary
    layout: CacheLayout
    room: CacheRoom
    inputs: tuple[TensorSpec, ...]
    tables: Mapping[str, int]
    run: Run
    many: Run | None = None
    source: Run | None = None
    encoder: Run | None = None
    image: ImageToken | None = None
    eye: Run | None = None
    eye_inputs: tuple[TensorSpec, ...] = ()
    recorded: str = ""

    @cached_property
    def device(self) -> torch.device:
        """Where its weights are; a runtime's are its own, on the processor."""
        held = self.run.parameters() if isinstance(self.run, nn.Module) else iter(())
        return next((p.device for p in held), torch.device("cpu"))

    def __call__(
        self, given: Mapping[str, torch.Tensor], cache: HFCache, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The logits of new tokens; the cache is longer by them afterwards.

        Raises:
            GuardError: more tokens than there is room for, ids that are none, or a cache of another kind.
            LoweringError: the backend cannot run with these tensors.
        """
        self.check_indices(given)
        tokens = given["tokens"]
        past, new = seen_by(cache), tokens.shape[1]
        if self.layout.grows and past + new > self.room.context:
            raise GuardError(
                f"{past} past and {new} new tokens are {past + new}; the plan has room for context = "
                f"{self.room.context}. Give a shorter prompt or fewer new tokens, or plan again with "
                f"context={past + new} or more.",
                place="inputs",
            )
        chunk = self.room.chunk or new
        ends: Sequence[int] = range(new % chunk or chunk, new + 1, chunk)
        if "kinds" in given:
            ends = between_images(given["kinds"][:, past:], ends)
        parts = [self._chunk(given, cache, hidden, *at) for at in itertools.pairwise((0, *ends))]
        parts = [part for part in parts if part.shape[1]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def check_indices(self, given: Mapping[str, torch.Tensor]) -> None:
        """Raises GuardError for inputs, by name, that are not in the tables where they are looked up."""
        for name, size in self.tables.items():
            if name in given:
                check_index(name, given[name], size)

    def _chunk(
        self,
        given: Mapping[str, torch.Tensor],
        cache: HFCache,
        hidden: torch.Tensor | None,
        start: int,
        end: int,
    ) -> torch.Tensor:
        """The logits of some of the new tokens, of those rows of them that are wanted."""
        tokens = given["tokens"]
        if (start, end) != (0, tokens.shape[1]):
            given = _part(given, start, end, self)
        flat, wanted = self.flat(given, cache, hidden), given.get("rows")
        few = given["tokens"].numel() <= FEW
        logits, *after = carried_out(self.run if self.many is None or few else self.many, flat)
        del flat
        expected = end - start if wanted is None else max(1, wanted.numel())
        if logits.shape[1:2] != (expected,):
            raise LoweringError(
                f"A planned step returned logits of {list(logits.shape)} where {expected} of a text's tokens "
                "were asked for: its graph is not the one that was planned. Write its folder again."
            )
        if wanted is not None and not wanted.numel():
            logits = logits[:, :0].clone()  # a view would hold the row that is not wanted
        beside = end - start if records(cache) else 0
        kept = [
            self._kept(self.layout.leaves[at], rows, beside)
            for at, rows in zip(self.layout.written, after, strict=True)
        ]
        fill(cache, self.layout, kept, end - start)
        return logits

    def flat(
        self, given: Mapping[str, torch.Tensor], cache: HFCache, hidden: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """The graph's inputs in order."""
        leaves = iter(self._found(cache, given["tokens"], hidden))
        return [
            next(leaves) if spec.name.startswith("past") else _given(given[spec.name], spec)
            for spec in self.inputs
        ]

    def _found(self, cache: HFCache, tokens: torch.Tensor, hidden: torch.Tensor | None) -> list[torch.Tensor]:
        """The leaves of a cache; empty ones of an empty cache, and those of the encoder's output made now."""
        found, specs = held(cache, self.layout), self.inputs[-len(self.layout) :]
        places = [
            at for at, leaf in enumerate(self.layout) if leaf.growth is Growth.SOURCE and found[at] is None
        ]
        if places and self.source is not None:
            if hidden is None:
                raise GuardError(
                    "The first call of a decoder needs encoder_outputs, which generate() gives it.",
                    place="inputs",
                )
            # rows of a head side by side: each token reads all of them
            made = [rows.contiguous() for rows in carried_out(self.source, (hidden, tokens))]
            fill(cache, self.layout, made, 0, places)
            found = held(cache, self.layout)
        self._check_sizes(found, tokens)
        return [
            self._empty(leaf, spec, tokens) if tensor is None else tensor
            for tensor, leaf, spec in zip(found, self.layout, specs, strict=True)
        ]

    def _check_sizes(self, found: Sequence[torch.Tensor | None], tokens: torch.Tensor) -> None:
        """Raises GuardError for a cache of more or fewer rows than there are tokens of, in any layer: one row
        would be spread over all, and kernels believe the sizes. And for one of another model.
        """
        name, rows = self.boundary.cache, tokens.shape[0]
        for tensor, leaf in zip(found, self.layout, strict=True):
            if tensor is None or leaf.holds(tensor.shape, rows):
                continue
            held = tensor.shape[0]
            raise GuardError(
                f"{name} has {held} rows in layer {leaf.layer}, and there are tokens of {rows}. Give each "
                "row its own cache."
                if held != rows
                else f"{name} holds {list(tensor.shape)} as {leaf.name}, which the planned model does not. "
                "Give a cache that this model filled.",
                place=f"inputs[{name!r}]",
            )

    def _empty(self, leaf: CacheLeaf, spec: TensorSpec, tokens: torch.Tensor) -> torch.Tensor:
        dtype = getattr(torch, leaf.held or spec.dtype)
        if leaf.growth is Growth.STATE:
            return tokens.new_zeros((tokens.shape[0], *leaf.shape), dtype=dtype)
        like = torch.empty((tokens.shape[0], leaf.shape[0], 0, leaf.width), dtype=dtype, device=tokens.device)
        return buffer(like, self.room.capacity(leaf))

    def _kept(self, leaf: CacheLeaf, rows: torch.Tensor, beside: int) -> torch.Tensor:
        """What is kept of the rows that a step returns: all, or a window and `beside` rows that may be taken
        back.
        """
        if leaf.growth is not Growth.WINDOW:
            return rows
        return last(rows, leaf.window + beside, max(leaf.capacity(self.room.context), leaf.window) + beside)


def carried_out(run: Run, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The outputs of a graph.

    Raises:
        LoweringError: it cannot run with these tensors.
    """
    with torch.no_grad(), within():
        return carried(
            "A planned step",
            lambda: run(*flat),
            "Give token ids, a mask, positions and a cache that the model itself takes; if it does take "
            "them, please report it.",
        )


def _given(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """An input as the graph takes it: logits of no row are those of the first."""
    return tensor.new_zeros(1) if spec.name == "rows" and not tensor.numel() else tensor


def _part(
    given: Mapping[str, torch.Tensor], start: int, end: int, step: LoweredStep
) -> dict[str, torch.Tensor]:
    """The inputs of the tokens from `start` to `end` alone."""
    total = given["tokens"].shape[1]
    made = dict(given)
    made["tokens"] = given["tokens"][:, start:end].contiguous()
    first = start if step.boundary.local else 0
    made["mask"] = given["mask"][:, first : given["mask"].shape[1] - (total - end)].contiguous()
    if "kinds" in given:
        made["kinds"] = given["kinds"][:, : given["kinds"].shape[1] - (total - end)].contiguous()
    for name in given:
        if name.startswith("positions"):
            made[name] = given[name][:, start:end].contiguous()
    if "rows" in given:
        rows = given["rows"]
        made["rows"] = rows[(rows >= start) & (rows < end)] - start
    if step.image is not None:
        names = [name for name in given if name.startswith("images")]
        seen = between(given["tokens"], step.image.id, [given[name] for name in names], start, end)
        made |= zip(names, seen, strict=True)
    return made


def input_bytes(boundary: Boundary, batch: int, tokens: int, chunk: int) -> int:
    """Of what a call of so many tokens, which wants the last one's logits, holds while its last chunk runs:
    ids, mask and positions, and of those their parts, where a part is not dense as it lies.
    """
    counted = bool(boundary.positions) * max(1, boundary.axes)
    whole = 8 * batch * tokens * (2 + counted + bool(boundary.kinds)) + 8 * boundary.rows
    if chunk >= tokens:
        return whole
    copied = 8 * batch * chunk * (1 + counted + boundary.local) if batch > 1 else 0
    return whole + copied + 8 * boundary.rows


def assembled(
    boundary: Boundary, layout: CacheLayout, room: CacheRoom, inputs: tuple[TensorSpec, ...],
    tables: Mapping[str, int], runs: Mapping[str, Run], image: ImageToken | None = None,
    eye_inputs: tuple[TensorSpec, ...] = (),
) -> LoweredStep:  # fmt: skip
    """The parts of a step put together; the cache of torch's graphs grows in place.

    Raises:
        LoweringError: rows are to be held in another dtype, and something that reads them takes only their
            own.
    """
    run, many, recorded = runs["step"], None, ""
    if isinstance(run, OpenVinoGraph):
        entering = [at for at, spec in enumerate(inputs) if spec.name.startswith("past")]
        run.carrying(
            {
                entering[at]: 1 + out
                for out, at in enumerate(layout.written)
                if layout.leaves[at].growth is Growth.FULL
            }
        )
    if isinstance(run, OnnxModel | OpenedStep):
        names = [spec.name for spec in inputs if spec.name.startswith("past")]
        run.in_place.rooms = dict(zip(names, map(room.capacity, layout), strict=True))
    graph = run.run if isinstance(run, TorchLowered) else run
    if isinstance(graph, fx.GraphModule):
        holders = [at for at, spec in enumerate(inputs) if spec.name.startswith("past")]
        narrow = [holders[at] for at in layout.written if layout.leaves[at].held]
        huge_pages.collapse(graph.parameters())
        rooms = {holders[at]: room.capacity(layout.leaves[at]) for at in layout.appended}
        run, many = in_place(graph, rooms, narrow), in_place_of_many(graph, rooms, narrow)
        made = still(graph, run, inputs, layout, room.context)
        run, recorded = (run, f"none: {made}") if isinstance(made, str) else (made, "each token")
    return LoweredStep(
        boundary=boundary, layout=layout, room=room, inputs=inputs, tables=tables, run=run, many=many,
        source=runs.get("source"), encoder=runs.get("encoder"), image=image, recorded=recorded,
        eye=runs.get("eye"), eye_inputs=eye_inputs,
    )  # fmt: skip
