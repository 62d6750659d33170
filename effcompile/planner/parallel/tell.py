"""From a solved division to what the plan says of it."""

from __future__ import annotations

from collections import Counter

from effcompile.ir.distributed import (
    MOST_COLUMNS,
    Distributed,
    RankBytes,
    RankPeak,
    RunnerUp,
    StagePlan,
    Verdict,
)
from effcompile.planner.parallel import bytes as held
from effcompile.planner.parallel.division import DivisionProblem, Solved
from effcompile.planner.parallel.engines import ENGINES
from effcompile.planner.parallel.pipeline import PipelineTask
from effcompile.planner.parallel.rank import Rank, RankChoice, RankWay
from effcompile.planner.parallel.search import Found

#: Lines are of so many columns.
_COLUMNS = 64
#: Of a longer step the memory of its beginning is shown: the steady state is like itself.
_MOST_TASKS = 4096


def verdict_on(peak: int, error: float, limit: int) -> tuple[Verdict, int, int]:
    """(verdict, low, high) of a predicted peak that may be off by a share."""
    low, high = int(peak * (1 - error)), int(peak * (1 + error))
    return "fits" if high <= limit else "no" if low > limit else "marginal", low, high


def tell(
    problem: DivisionProblem,
    solved: Solved,
    found: Found,
    limit: int,
    fewest: int | None,
    nearest: tuple[str, ...],
) -> Distributed:
    """The plan's account of a division. `limit`: bytes that a device may hold."""
    strategy, cluster, engine = solved.strategy, problem.cluster, ENGINES[solved.strategy.engine]
    verdict, low, high = verdict_on(solved.peak_bytes, engine.error, limit)
    sequences, world = problem.global_batch, solved.strategy.world
    peak_flops = problem.target.peak_flops.get(strategy.precision, 0.0)
    return Distributed(
        verdict=verdict,
        peak_bytes=solved.peak_bytes,
        low_bytes=low,
        high_bytes=high,
        limit_bytes=limit,
        seconds=solved.seconds,
        low_seconds=solved.seconds * (1 - engine.seconds_error),
        high_seconds=solved.seconds * (1 + engine.seconds_error),
        bound_seconds=min(found.bound, solved.seconds) if found.best is not None else solved.bound,
        strategy=strategy,
        nodes=cluster.nodes,
        per_node=cluster.per_node,
        global_batch=sequences,
        sequence=problem.model.sequence,
        micro_batches=strategy.micro_batches(sequences),
        tokens_per_second=sequences * problem.model.sequence / solved.seconds / world,
        mfu=sequences * problem.model.flops / solved.seconds / world / peak_flops,
        spent={name: max(seconds, 0.0) for name, seconds in solved.parts.items()},
        rank=solved.fullest * strategy.stride("pp"),
        instant=solved.chosen[solved.fullest].instant,
        stages=tuple(_stage(problem, solved, r) for r in range(strategy.pp)),
        ranks=tuple(_ranks(solved, cluster.per_node)),
        memory=memory(solved, solved.fullest),
        runners_up=tuple(
            RunnerUp(strategy=s.strategy, seconds=s.seconds, peak_bytes=s.peak_bytes)
            for s in found.runners_up
        ),
        dropped={reason: count for reason, count in found.dropped.items() if count},
        considered=found.considered,
        fewest=fewest,
        nearest=nearest,
        search_seconds=found.seconds,
    )


def _ranks(solved: Solved, per_node: int) -> list[RankPeak]:
    s = solved.strategy
    where = [s.coordinates(rank) for rank in range(s.world)]
    return [
        RankPeak(
            rank=rank,
            node=rank // per_node,
            dp=at["dp"],
            tp=at["tp"],
            pp=at["pp"],
            cp=at["cp"],
            peak_bytes=solved.chosen[at["pp"]].peak,
        )
        for rank, at in enumerate(where)
    ]


def _stage(problem: DivisionProblem, solved: Solved, r: int) -> StagePlan:
    rank, chosen, strategy = solved.ranks[r], solved.chosen[r], solved.strategy
    tasks, first = solved.line.ranks[r], {"F": 0.0, "B": 0.0, "W": 0.0}
    for task in tasks:
        first[task.what] += (task.end - task.start) / strategy.micro_batches(problem.global_batch)
    ways = Counter((way.option.label, way.kept, way.gathered) for way in chosen.ways)
    return StagePlan(
        stage=r,
        layers=rank.place.runs,
        embedding=rank.place.first,
        head=rank.place.last,
        in_flight=rank.copies,
        peak_bytes=chosen.peak,
        instant=chosen.instant,
        parts=ledger(rank, chosen),
        host_bytes=int(held.host_bytes(problem.model, strategy, rank.place)),
        forward_seconds=first["F"],
        backward_seconds=first["B"] + first["W"],
        held=tuple(
            RankBytes(layers=count, option=label or "keep all", kept_bytes=kept, gathered=gathered)
            for (label, kept, gathered), count in ways.most_common()
        ),
        line=_line(tasks, solved.line.seconds),
    )


def _line(tasks: tuple[PipelineTask, ...], seconds: float) -> str:
    """What a rank does at each column's middle."""
    columns, letters, at = min(_COLUMNS, MOST_COLUMNS), [], 0
    for column in range(columns):
        when = (column + 0.5) / columns * seconds
        while at < len(tasks) and tasks[at].end <= when:
            at += 1
        letters.append(tasks[at].what if at < len(tasks) and tasks[at].start <= when else " ")
    return "".join(letters)


def ledger(rank: Rank, chosen: RankChoice) -> dict[str, int]:
    """What a rank holds at its highest instant, by kind; it adds up to the peak."""
    parts = {name: int(size) for name, size in rank.standing.items()}
    parts[held.IN_FLIGHT] = int((rank.copies - 1) * chosen.kept)
    at = next(
        (i for i, layer in enumerate(rank.place.layers) if chosen.instant.endswith(f"layer {layer}")), None
    )
    parts[held.KEPT] = chosen.kept if at is None else sum(way.kept for way in chosen.ways[:at])
    parts[held.LOGITS if at is None else held.WORKING] = 0
    rest = chosen.peak - sum(parts.values())
    parts[held.LOGITS if at is None else held.WORKING] = max(rest, 0)
    return {name: size for name, size in parts.items() if size > 0}


def memory(solved: Solved, r: int) -> tuple[int, ...]:
    """Bytes of a rank over the step, in columns: layer by layer of every task, with what other micro-batches
    keep.
    """
    rank, chosen = solved.ranks[r], solved.chosen[r]
    runs = _runs(rank, chosen)
    share = [sum(way.kept for way in run) for run in runs]
    live, points = 0, [rank.base]
    for task in solved.line.ranks[r][:_MOST_TASKS]:
        run = runs[task.stage // solved.strategy.pp]
        if task.what == "F":
            before = 0
            for way in run:
                points.append(rank.base + live + before + way.forward)
                before += way.kept
            live += before
            if rank.place.last and task.stage == solved.strategy.stages - 1:
                points.append(rank.base + live + rank.head)
        elif task.what == "B":
            before = share[task.stage // solved.strategy.pp]
            for way in reversed(run):
                before -= way.kept
                points.append(
                    rank.base + live - share[task.stage // solved.strategy.pp] + before + way.backward
                )
            live -= share[task.stage // solved.strategy.pp]
    size = max(1, -(-len(points) // MOST_COLUMNS))
    return tuple(max(points[i : i + size]) for i in range(0, len(points), size))


def _runs(rank: Rank, chosen: RankChoice) -> list[tuple[RankWay, ...]]:
    runs, at = [], 0
    for begin, end in rank.place.runs:
        runs.append(chosen.ways[at : at + end - begin])
        at += end - begin
    return runs
