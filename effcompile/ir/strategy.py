"""`Strategy`: how one training step is divided among devices.

What was decided, as data; knows neither a model nor a machine.

The axes multiply to the world: dp × tp × pp × cp devices. Ranks are numbered with tp innermost, then cp, dp
and pp outermost (Megatron-LM's order, Narayanan et al. 2021 §3: what talks most stands closest together).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, get_args

from effcompile.core.errors import UnknownNameError, UsageError, clipped

Schedule = Literal["1f1b", "interleaved", "gpipe", "zero-bubble"]
Recompute = Literal["none", "op", "layer", "full", "planned"]
Precision = Literal["fp32", "bf16", "fp16", "fp8"]
OffloadTo = Literal["none", "optimizer", "all"]
Engine = Literal["ours", "fsdp2", "megatron", "deepspeed"]
Axis = Literal["tp", "cp", "dp", "pp"]

#: The axes of the mesh from the innermost, whose neighbours stand on one node, to the outermost.
AXES: tuple[Axis, ...] = get_args(Axis)
_WORDS: dict[str, tuple[str, ...]] = {
    "schedule": get_args(Schedule),
    "recompute": get_args(Recompute),
    "precision": get_args(Precision),
    "offload": get_args(OffloadTo),
    "engine": get_args(Engine),
}
_COUNTS = ("dp", "tp", "pp", "vpp", "cp", "micro_batch")


class StrategyFields(TypedDict, total=False):
    """The fields of a strategy, as keyword arguments; what is left out is free."""

    dp: int
    tp: int
    pp: int
    vpp: int
    cp: int
    zero: int
    micro_batch: int
    schedule: Schedule
    recompute: Recompute
    sp: bool
    precision: Precision
    offload: OffloadTo
    engine: Engine
    cuts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to divide a step.

    Attributes:
        dp, tp, pp, cp: devices along the data, tensor, pipeline and context axis.
        vpp: stages of the pipeline that each rank holds (interleaving); 1 unless the schedule is
            "interleaved".
        zero: what is sharded over dp × cp: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
            With 3 each block decides whether its gathered weights are kept from forward to backward or
            gathered again.
        micro_batch: sequences of one micro-batch on one data-parallel rank.
        schedule: the order of forwards and backwards of the stages.
        recompute: "planned" is the exact solver's choice block by block; the others are the usual rules:
            "none", "op" (every second product is remade), "layer" (every second layer) and "full" (every
            layer, from its input).
        sp: what stands between split regions is divided along the sequence over tp.
        precision: of the arithmetic; master weights and optimizer states are fp32.
        offload: what stands in the host's memory: "optimizer" states, or "all" of states and sharded
            parameters.
        engine: whose buffers and whose loss head count.
        cuts: layers of each stage in the model's order, pp × vpp of them; empty: as even as can be.

    Raises:
        UsageError: a value that is not allowed, or values that contradict each other.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    zero: int = 0
    micro_batch: int = 1
    schedule: Schedule = "1f1b"
    recompute: Recompute = "planned"
    sp: bool = False
    precision: Precision = "bf16"
    offload: OffloadTo = "none"
    engine: Engine = "ours"
    cuts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields({name: getattr(self, name) for name in _NAMES})
        if self.vpp > 1 and (self.pp == 1 or self.schedule != "interleaved"):
            raise UsageError(
                f"vpp = {self.vpp} needs a pipeline (pp > 1) and schedule = interleaved; here pp = "
                f"{self.pp}, {self.schedule}."
            )
        if self.schedule == "interleaved" and self.vpp == 1:
            raise UsageError(
                "schedule = interleaved needs vpp ≥ 2 stages on each rank. Give vpp=2, or schedule=1f1b."
            )
        if self.sp and self.tp == 1:
            raise UsageError(
                "sp = 1 divides the sequence over the tensor-parallel ranks and needs tp ≥ 2. Give tp=2, "
                "or sp=0."
            )
        if self.schedule == "zero-bubble" and self.recompute not in ("none", "planned"):
            raise UsageError(
                f"schedule = zero-bubble does not combine with recompute = {self.recompute}: its divided "
                "backward keeps what was remade until the weights' turn. Give recompute=none, or "
                "schedule=1f1b."
            )
        if self.cuts and (len(self.cuts) != self.stages or min(self.cuts) < 0 or max(self.cuts) == 0):
            raise UsageError(
                f"cuts = {self.cuts} must be the layers of pp × vpp = {self.stages} stages, none negative."
            )

    @classmethod
    def of(cls, base: Strategy | None = None, /, **changes: object) -> Strategy:
        """A strategy from another one and keyword changes; unknown keywords get a "did you mean".

        Raises:
            UnknownNameError: a keyword that is no field. UsageError: a value that is not allowed.
        """
        check_fields(changes)
        # each is checked
        given: dict[str, Any] = {
            **({name: getattr(base, name) for name in _NAMES} if base else {}),
            **changes,
        }
        return cls(**given)

    @property
    def world(self) -> int:
        """Devices that it takes."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def stages(self) -> int:
        """Pieces that the model is cut into."""
        return self.pp * self.vpp

    @property
    def shards(self) -> int:
        """Ranks that hold the same parameters: what ZeRO divides over."""
        return self.dp * self.cp

    def size(self, axis: Axis) -> int:
        """Devices along an axis."""
        return {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}[axis]

    def stride(self, axis: Axis) -> int:
        """By how much the numbers of neighbours along an axis differ."""
        stride = 1
        for inner in AXES[: AXES.index(axis)]:
            stride *= self.size(inner)
        return stride

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Where a rank stands on each axis.

        Raises:
            UsageError: no such rank.
        """
        if not 0 <= rank < self.world:
            raise UsageError(f"rank = {rank} is not among the {self.world} of this strategy.")
        return {axis: rank // self.stride(axis) % self.size(axis) for axis in AXES}

    def groups(self, axis: Axis) -> Iterator[tuple[int, ...]]:
        """The ranks that differ along one axis only, group by group: every rank is in one of them."""
        stride, size = self.stride(axis), self.size(axis)
        starts = (rank for rank in range(self.world) if rank // stride % size == 0)
        yield from (tuple(start + stride * i for i in range(size)) for start in starts)

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of one step on each rank.

        Raises:
            UsageError: the global batch does not divide; it names the nearest that does.
        """
        at_once = self.dp * self.micro_batch
        if global_batch < 1 or global_batch % at_once:
            near = max(1, round(global_batch / at_once)) * at_once
            raise UsageError(
                f"global_batch = {global_batch} does not divide by dp × micro_batch = {self.dp} × "
                f"{self.micro_batch} = {at_once}. The nearest that does is {near}."
            )
        return global_batch // at_once

    def layers(self, layers: int) -> tuple[int, ...]:
        """Layers of each stage in the model's order: `cuts`, or as even as can be with the later stages
        shorter.

        Raises:
            UsageError: more stages than layers, or cuts of another number of layers.
        """
        if self.stages > layers:
            raise UsageError(
                f"pp × vpp = {self.pp} × {self.vpp} = {self.stages} stages are more than the model's "
                f"{layers} layers."
            )
        if self.cuts and sum(self.cuts) != layers:
            raise UsageError(f"cuts = {self.cuts} hold {sum(self.cuts)} layers; the model has {layers}.")
        each, more = divmod(layers, self.stages)
        return self.cuts or tuple(each + (i < more) for i in range(self.stages))


_NAMES = tuple(f.name for f in fields(Strategy))


def check_fields(given: Mapping[str, object]) -> None:
    """Refuse names and values that no strategy has; for a part of one, too.

    Raises:
        UnknownNameError: no such field. UsageError: a value that is not allowed.
    """
    for name, value in given.items():
        if name not in _NAMES:
            raise UnknownNameError("part of a strategy", name, _NAMES)
        if name in _COUNTS and (
            not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 24
        ):
            raise UsageError(f"{name} = {clipped(repr(value))} must be a whole number, at least 1.")
        if name == "zero" and (isinstance(value, bool) or value not in (0, 1, 2, 3)):
            raise UsageError(f"zero = {clipped(repr(value))} must be 0, 1, 2 or 3.")
        if name == "sp" and value not in (True, False):
            raise UsageError(f"sp = {clipped(repr(value))} must be 0 or 1.")
        if name in _WORDS and value not in _WORDS[name]:
            raise UsageError(
                f"{name} = {clipped(repr(value))} is not allowed. Choose one of: {', '.join(_WORDS[name])}."
            )
        if name == "cuts" and not (isinstance(value, tuple) and all(type(layers) is int for layers in value)):
            raise UsageError(f"cuts = {clipped(repr(value))} must be the layers of each stage.")
