"""How few devices are enough, and what else would make a step fit: by the closed form of the leanest choice
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from effcompile.core.errors import UsageError
from effcompile.core.units import format_bytes
from effcompile.ir.strategy import StrategyFields
from effcompile.planner.parallel.division import Division, DivisionProblem
from effcompile.planner.parallel.engines import ENGINES
from effcompile.planner.parallel.search import strategies
from effcompile.planner.parallel.strategy import check_model

#: No more devices are looked at than this.
MOST = 1 << 14


def counts(per_node: int) -> Iterator[int]:
    """Numbers of devices that are looked at: divisors of a node, then 1 to 4 nodes, and two steps to each
    doubling from there.
    """
    yield from (n for n in range(1, per_node) if not per_node % n)
    nodes, step = 1, 1
    while nodes * per_node <= MOST:
        yield nodes * per_node
        nodes += step
        step = step * 2 if nodes >= 4 * step else step


def leanest(problem: DivisionProblem, asked: StrategyFields) -> Division | None:
    """The division that needs the least memory; None: nothing divides.

    What only adds bytes is not looked at: several sequences at a time (in flight are the step's sequences or
    the pipeline's micro-batches, whichever are fewer), whole values between split regions, states on the
    device, several stages a rank.
    """
    lean: StrategyFields = {"micro_batch": 1, **asked}
    if asked.get("engine", "ours") in ("ours", "deepspeed"):
        lean = {"offload": "optimizer", **lean}
    if asked.get("schedule", "1f1b") != "interleaved":
        lean = {"vpp": 1, **lean}
    best: Division | None = None
    for strategy in strategies(problem, lean):
        model = problem.model
        try:
            check_model(
                strategy, layers=model.depth, heads=model.heads, key_heads=model.key_heads,
                sequence=model.sequence, global_batch=problem.global_batch,
            )  # fmt: skip
        except UsageError:
            continue
        division = Division(problem=problem, strategy=strategy)
        if best is None or division.leanest < best.leanest:
            best = division
    return best


def fewest(
    problem: Callable[[int], DivisionProblem],
    per_node: int,
    asked: StrategyFields,
    limit: int,
    below: int | None = None,
) -> int | None:
    """The smallest number of devices on which the leanest division fits with the model's error on top; None:
    none does.
    """
    room = int(limit / (1 + ENGINES[asked.get("engine", "ours")].error))
    least = 0
    for devices in counts(per_node):
        if below is not None and devices >= below:
            return None
        if least / devices > room:
            continue
        try:
            here = problem(devices)
            found = leanest(here, asked)
        except UsageError:
            continue
        least = 2 * here.model.parameters  # a weight's bytes at least, wherever they stand
        if found is not None and found.leanest <= room:
            return devices
    return None


def nearest_changes(
    problem: DivisionProblem, asked: StrategyFields, limit: int, enough: int | None, peak: int
) -> Iterator[str]:
    """Single changes that would make it fit, in the user's words."""
    if enough is not None:
        yield f"--devices {enough}: the fewest that are enough"
    room = int(limit / (1 + ENGINES[asked.get("engine", "ours")].error))
    for name in asked:
        if name in ("engine", "precision"):
            continue
        fewer: StrategyFields = {k: v for k, v in asked.items() if k != name}  # type: ignore[assignment]
        found = leanest(problem, fewer)
        if found is not None and found.leanest <= room:
            value = getattr(found.strategy, name)
            yield f"--strategy without {name}={asked[name]}: {name}={value} fits"  # type: ignore[literal-required]
    yield f"devices of {format_bytes(peak * (1 + ENGINES[asked.get('engine', 'ours')].error))} and more"
