"""What a plan says of many devices: the strategy, whether it fits, who holds what, where the step's seconds
go, and what else there was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from effcompile.ir.strategy import Strategy

Verdict = Literal["fits", "marginal", "no"]
#: Columns of a stage's line and of the memory over the step at the most.
MOST_COLUMNS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """What some layers of a stage do: how many they are, what each computes again, whether its gathered
    weights are kept.
    """

    layers: int
    option: str
    kept_bytes: int
    gathered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """What each rank of one place in the pipeline has and does. The ranks along tp, cp and dp are alike.

    Attributes:
        stage: its place in the pipeline. layers: (first, behind the last) of its runs. embedding, head:
            whether it has them.
        in_flight: micro-batches whose kept values stand at once.
        peak_bytes: at its highest instant; instant: which one; parts: what is there, by kind.
        host_bytes: in its node's memory.
        forward_seconds, backward_seconds: of one micro-batch, what is computed again included.
        held: what its layers do.
        line: what it does over the step, one letter for each column: "F", "B", "W" (the weights' part of a
            backward) or a space.
    """

    stage: int
    layers: tuple[tuple[int, int], ...]
    embedding: bool
    head: bool
    in_flight: float
    peak_bytes: int
    instant: str
    parts: Mapping[str, int] = field(hash=False)
    host_bytes: int
    forward_seconds: float
    backward_seconds: float
    held: tuple[RankBytes, ...]
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeak:
    """One rank: where it stands on the mesh, its highest instant."""

    rank: int
    node: int
    dp: int
    tp: int
    pp: int
    cp: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """Another division: its seconds and peak."""

    strategy: Strategy
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """A step on many devices. Predicted throughout.

    Attributes:
        verdict: "fits" (the whole interval does), "marginal", "no".
        peak_bytes: of the fullest rank; low_bytes, high_bytes: less and plus the error of the engine's model;
            limit_bytes: of a device.
        seconds: of one step; low_seconds, high_seconds: the same; bound_seconds: no other division takes
            less.
        strategy: with the layers of every stage. nodes, per_node: how the devices stand.
        global_batch: sequences of one step, each of `sequence` tokens; micro_batches: of each data-parallel
            rank.
        tokens_per_second: of one device. mfu: the model's own operations of all its pairs of tokens, against
            the devices' peak.
        spent: what the slowest rank's seconds go to; they add up to `seconds`.
        rank, instant: which rank is the fullest, and when.
        stages: in the pipeline's order. ranks: every one.
        memory: bytes over the step of the fullest rank, in columns of equal numbers of instants.
        runners_up: the next best, each of another mesh. dropped: why strategies were not looked at → how
            many. considered: had a bound.
        fewest: devices that are enough; None where that was not asked for, or none are.
        nearest: what would make it fit, in the user's words; empty where it does.
        search_seconds: time taken.
    """

    verdict: Verdict
    peak_bytes: int
    low_bytes: int
    high_bytes: int
    limit_bytes: int
    seconds: float
    low_seconds: float
    high_seconds: float
    bound_seconds: float
    strategy: Strategy
    nodes: int
    per_node: int
    global_batch: int
    sequence: int
    micro_batches: int
    tokens_per_second: float
    mfu: float
    spent: Mapping[str, float] = field(hash=False)
    rank: int
    instant: str
    stages: tuple[StagePlan, ...]
    ranks: tuple[RankPeak, ...]
    memory: tuple[int, ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict, hash=False)
    considered: int = 0
    fewest: int | None = None
    nearest: tuple[str, ...] = ()
    search_seconds: float = 0.0

    @property
    def devices(self) -> int:
        return self.strategy.world
