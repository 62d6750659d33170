"""One step of a pipeline, simulated task by task: when each rank does what, and how many micro-batches it
holds.

A task is the forward, the backward, or (zero bubble) the weights' part of the backward, of one micro-batch on
one virtual stage. It runs when its rank is free and what it reads has come: F(s, i) after F(s − 1, i), B(s,
i) after B(s + 1, i) and F(s, i), a hop later where they stand on other ranks. Each rank does its tasks in a
fixed order (GPipe: Huang et al. 2019; 1F1B: Narayanan et al. 2019; interleaved: Megatron-LM's), and a
zero-bubble rank does what is ready, backwards before forwards before weights (Qi et al. 2023, ZB-H1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from effcompile.ir.strategy import Strategy

What = Literal["F", "B", "W"]
#: The weights' part of a backward, as a share of it.
WEIGHTS_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTask:
    """What a rank does from when to when."""

    what: What
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLine:
    """A step.

    Attributes:
        ranks: of each rank its tasks in order.
        held: most micro-batches that a rank held at once, in units of all its virtual stages.
    """

    seconds: float
    ranks: tuple[tuple[PipelineTask, ...], ...]
    held: tuple[float, ...]


def order(strategy: Strategy, rank: int, micro_batches: int) -> list[tuple[What, int, int]]:
    """The tasks of a rank in order: (what, virtual stage, micro-batch)."""
    p, m = strategy.pp, micro_batches
    if strategy.schedule == "gpipe":
        return [("F", rank, i) for i in range(m)] + [("B", rank, i) for i in range(m)]
    if strategy.schedule == "interleaved":
        return _interleaved(strategy, rank, m)
    warm = min(m, p - rank - 1)
    tasks: list[tuple[What, int, int]] = [("F", rank, i) for i in range(warm)]
    for i in range(m - warm):
        tasks += [("F", rank, warm + i), ("B", rank, i)]
    return tasks + [("B", rank, i) for i in range(m - warm, m)]


def _interleaved(strategy: Strategy, rank: int, m: int) -> list[tuple[What, int, int]]:
    """Megatron's order: groups of pp micro-batches go through the virtual stages in turn; m is a multiple of
    pp.
    """
    p, v = strategy.pp, strategy.vpp

    def at(k: int, forward: bool) -> tuple[What, int, int]:
        chunk = k % (p * v) // p
        chunk = chunk if forward else v - 1 - chunk
        return "F" if forward else "B", chunk * p + rank, k // (p * v) * p + k % p

    total = m * v
    warm = total if m == p else min(total, (p - rank - 1) * 2 + (v - 1) * p)
    tasks = [at(k, True) for k in range(warm)]
    for k in range(total - warm):
        tasks += [at(warm + k, True), at(k, False)]
    return tasks + [at(k, False) for k in range(total - warm, total)]


def simulate(
    strategy: Strategy, micro_batches: int, forward: Sequence[float], backward: Sequence[float], hop: float
) -> TimeLine:
    """Run one step.

    `forward`, `backward`: seconds of each virtual stage and micro-batch, in the model's order.
    """
    if strategy.schedule == "zero-bubble" and strategy.pp > 1:
        return _zero_bubble(strategy, micro_batches, forward, backward, hop)
    p, last = strategy.pp, strategy.stages - 1
    todo = [order(strategy, rank, micro_batches) for rank in range(p)]
    done: dict[tuple[What, int, int], float] = {}
    lines: list[list[PipelineTask]] = [[] for _ in range(p)]
    free, at = [0.0] * p, [0] * p
    waiting = set(range(p))
    while waiting:
        moved = False
        for rank in sorted(waiting):
            while at[rank] < len(todo[rank]):
                what, stage, i = todo[rank][at[rank]]
                ready = _ready(done, what, stage, i, last, hop if p > 1 else 0.0)
                if ready is None:
                    break
                start = max(free[rank], ready)
                end = start + (forward if what == "F" else backward)[stage]
                done[what, stage, i] = free[rank] = end
                lines[rank].append(PipelineTask(what=what, stage=stage, micro_batch=i, start=start, end=end))
                at[rank] += 1
                moved = True
            if at[rank] == len(todo[rank]):
                waiting.discard(rank)
        assert moved, "the schedule waits for itself"
    return _line(strategy, lines)


def _ready(
    done: dict[tuple[What, int, int], float], what: What, stage: int, i: int, last: int, hop: float
) -> float | None:
    """When what a task reads is there; None: not yet known."""
    before: list[tuple[tuple[What, int, int], float]] = []
    if what == "F" and stage:
        before.append((("F", stage - 1, i), hop))
    if what == "B":
        before.append((("F", stage, i), 0.0))
    if what == "B" and stage < last:
        before.append((("B", stage + 1, i), hop))
    if what == "W":
        before.append((("B", stage, i), 0.0))
    if any(key not in done for key, _ in before):
        return None
    return max((done[key] + wait for key, wait in before), default=0.0)


def _zero_bubble(
    strategy: Strategy, m: int, forward: Sequence[float], backward: Sequence[float], hop: float
) -> TimeLine:
    """Of the ranks that can do something, the one that can do it first does; no rank holds more than pp
    micro-batches.
    """
    p = strategy.pp
    seconds = {
        "F": forward,
        "B": [b * (1 - WEIGHTS_SHARE) for b in backward],
        "W": [b * WEIGHTS_SHARE for b in backward],
    }
    count = {(what, rank): 0 for what in "FBW" for rank in range(p)}
    done: dict[tuple[What, int, int], float] = {}
    lines: list[list[PipelineTask]] = [[] for _ in range(p)]
    free = [0.0] * p
    whats: tuple[What, ...] = ("B", "F", "W")
    for _ in range(3 * m * p):
        able = []
        for rank in range(p):
            for turn, what in enumerate(whats):
                i = count[what, rank]
                full = what == "F" and i - count["W", rank] >= p
                ready = None if i == m or full else _ready(done, what, rank, i, p - 1, hop)
                if ready is not None:
                    able.append((max(free[rank], ready), turn, rank, what, i))
        start, _, rank, what, i = min(able)
        end = start + seconds[what][rank]
        done[what, rank, i] = free[rank] = end
        count[what, rank] += 1
        lines[rank].append(PipelineTask(what=what, stage=rank, micro_batch=i, start=start, end=end))
    return _line(strategy, lines)


def _line(strategy: Strategy, lines: list[list[PipelineTask]]) -> TimeLine:
    freeing = "W" if any(task.what == "W" for line in lines for task in line) else "B"
    held = []
    for line in lines:
        now = most = 0
        for task in line:
            now += (task.what == "F") - (task.what == freeing)
            most = max(most, now)
        held.append(most / strategy.vpp)
    end = max((task.end for line in lines for task in line), default=0.0)
    return TimeLine(seconds=end, ranks=tuple(map(tuple, lines)), held=tuple(held))


def least_seconds(
    strategy: Strategy, micro_batches: int, forward: Sequence[float], backward: Sequence[float], hop: float
) -> float:
    """No order of the tasks takes less: each rank waits for its first forward, does all its work, and others
    finish behind it.

    For rank r: Σ of the forwards before its first stage, m times its own work, Σ of the backwards behind its
    first stage (those of its last task: a zero-bubble rank ends with weights, which nothing waits for).
    """
    p, m = strategy.pp, micro_batches
    best, before, behind = 0.0, 0.0, 0.0
    for rank in range(p):
        own = sum(forward[s] + backward[s] for s in range(rank, strategy.stages, p))
        tail = behind * (1 - WEIGHTS_SHARE if strategy.schedule == "zero-bubble" else 1)
        best = max(
            best,
            before
            + m * own
            + (tail if strategy.schedule != "zero-bubble" else 0.0)
            + (1 + (tail > 0)) * rank * hop,
        )
        before, behind = before + forward[rank], behind + backward[rank]
    return best
