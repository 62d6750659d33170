"""The search over all ways to divide a step: every divisor, a bound in closed form for each, the best solved
exactly.

The axes of a strategy are choices of the whole program, like the loss head or the precision of one device:
each case is a strategy whose bound (Division.least_seconds) no choice of its ranks is below. Cases are taken
in the order of their bounds, each solved rank by rank and simulated (a bound is first made tighter by solving
the ranks that it looks at); when the next bound is not below the best step found, no other division is faster
(branch and bound, planner/search.py). So the result is the best of the exhaustive search of the simulator,
within the gap of the ranks' proofs, and no rule of thumb prunes.

    minimise    seconds(strategy, choices)
    over        dp · tp · pp · cp = devices; vpp, zero, micro_batch, sp, offload, schedule, cuts; an option
                for each layer of each rank
    subject to  peak(rank) · (1 + error) ≤ memory     for every rank ("fits"); without the error where
                                                      nothing does ("marginal")
                host bytes of a node ≤ its memory, where that is known
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from effcompile.core.errors import InfeasibleError, UsageError
from effcompile.ir.strategy import Engine, Strategy, StrategyFields
from effcompile.planner.parallel import bytes as held
from effcompile.planner.parallel.division import Division, DivisionProblem, Solved
from effcompile.planner.parallel.engines import ENGINES
from effcompile.planner.parallel.strategy import check_model
from effcompile.planner.search import Node, Record

#: Exact solves at the most, and beyond the best this many runners-up; both are told where they cut the search
#: short.
MOST_SOLVES, RUNNERS_UP = 64, 5
_MOST_VPP = 8
# strategies that were not solved for their bounds, as reasons of options that were not taken
_MOST_TOLD = 2000


@dataclass(frozen=True, kw_only=True)
class StrategyCase:
    """A strategy as the search takes it up."""

    division: Division
    least_seconds: float

    @property
    def options(self) -> Mapping[str, str]:
        return words(self.division.strategy)


@dataclass(kw_only=True)
class Found:
    """What a search came to.

    Attributes:
        best: the fastest that fits; None: none does. `marginal`: only without the error on top.
        nearest: the division that needs the least memory. considered: how many strategies had a bound.
        dropped: why others had none → how many. record: of those that were solved, or not for their bound.
        next_bound: of the next strategy that was not solved. seconds: time taken.
    """

    best: Solved | None = None
    marginal: bool = False
    nearest: Division | None = None
    considered: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    runners_up: list[Solved] = field(default_factory=list)
    record: Record[StrategyCase, Solved] | None = None
    next_bound: float | None = None
    solves: int = 0
    seconds: float = 0.0

    @property
    def bound(self) -> float:
        """No division takes less, within the gap of the ranks' proofs."""
        assert self.best is not None
        known = [self.best.bound] if self.next_bound is None else [self.best.bound, self.next_bound]
        return min(known)


def words(strategy: Strategy) -> dict[str, str]:
    """What is decided → the option, as the record keeps it."""
    names = (
        "dp",
        "tp",
        "pp",
        "vpp",
        "cp",
        "zero",
        "micro_batch",
        "sp",
        "schedule",
        "recompute",
        "precision",
        "offload",
    )
    return {
        name: f"{getattr(strategy, name):d}" if name == "sp" else str(getattr(strategy, name))
        for name in names
    }


def divisors(n: int) -> list[int]:
    """All of them, rising."""
    small = [d for d in range(1, int(n**0.5) + 1) if not n % d]
    return sorted({*small, *(n // d for d in small)})


def strategies(problem: DivisionProblem, asked: StrategyFields) -> Iterator[Strategy]:
    """Every strategy of so many devices that says what is asked."""
    model, devices, engine = problem.model, problem.cluster.devices, asked.get("engine", "ours")
    for tp, cp in product(_one(asked, "tp", divisors(devices)), _one(asked, "cp", divisors(devices))):
        if devices % (tp * cp) or model.heads % tp:
            continue
        for pp in _one(asked, "pp", divisors(devices // tp // cp)):
            dp, left = divmod(devices, tp * cp * pp)
            if left or pp > model.depth or asked.get("dp", dp) != dp or problem.global_batch % dp:
                continue
            for inner in _inner(problem, asked, engine, pp=pp, tp=tp, dp=dp, cp=cp):
                yield from _cut(problem, Strategy(**{**inner, **asked}))  # type: ignore[arg-type]


def _one(asked: StrategyFields, name: str, free: list[int]) -> list[int]:
    given = asked.get(name)
    return free if not isinstance(given, int) else [given]


def _inner(
    problem: DivisionProblem, asked: StrategyFields, engine: Engine, *, pp: int, tp: int, dp: int, cp: int
) -> Iterator[dict[str, object]]:
    """What is chosen within a mesh: zero, micro-batch, sequence parallelism, offload, virtual stages, the
    rule of recomputation.
    """
    free: dict[str, list[object]] = {
        "zero": list(_zeros(engine, pp, dp * cp)),
        "micro_batch": list(divisors(problem.global_batch // dp)),
        "sp": [True] if tp > 1 and engine != "ours" else [False, True] if tp > 1 else [False],
        "offload": ["none", "optimizer"] if engine in ("ours", "deepspeed") else ["none"],
        "recompute": ["planned"] if engine == "ours" else ["none", "op", "layer", "full"],
        "vpp": [1, *range(2, min(_MOST_VPP, problem.model.depth // pp) + 1)]
        if pp > 1 and engine != "deepspeed"
        else [1],
    }
    if "vpp" not in asked and "schedule" in asked:
        free["vpp"] = [v for v in free["vpp"] if (v != 1) == (asked["schedule"] == "interleaved")]
    chosen = {name: [asked[name]] if name in asked else options for name, options in free.items()}  # type: ignore[literal-required]
    mesh = {"pp": pp, "tp": tp, "dp": dp, "cp": cp, "engine": engine}
    for values in product(*chosen.values()):
        inner = dict(zip(chosen, values, strict=True))
        schedule = asked.get("schedule", "interleaved" if inner["vpp"] != 1 else "1f1b")
        m, left = divmod(problem.global_batch // dp, int(str(inner["micro_batch"])))
        if left:
            continue
        if inner["vpp"] != 1 and (schedule != "interleaved" or m % pp or pp == 1):
            continue
        if inner["vpp"] == 1 and schedule == "interleaved":
            continue
        if inner["sp"] and tp == 1:
            continue
        if inner["offload"] != "none" and "offload" not in asked and not (inner["zero"] or dp * cp == 1):
            continue
        yield {**mesh, **inner, "schedule": schedule}


def _zeros(engine: Engine, pp: int, shards: int) -> tuple[int, ...]:
    """What may be sharded: nothing alone; gradients and parameters not under a pipeline, which would gather
    for each micro-batch.
    """
    if shards == 1:
        return (0,)
    if engine == "fsdp2":
        return (2, 3)
    if engine == "megatron":
        return (0, 1)
    return (0, 1, 2, 3) if pp == 1 else (0, 1)


def _cut(problem: DivisionProblem, strategy: Strategy) -> Iterator[Strategy]:
    """With even stages, and with those that balance the loss head's seconds (and the table's bytes) against
    layers.
    """
    yield strategy
    if strategy.cuts or strategy.pp == 1 or strategy.vpp > 1:
        return
    key = (
        "cuts",
        strategy.tp,
        strategy.cp,
        strategy.sp,
        strategy.micro_batch,
        strategy.pp,
        strategy.precision,
        strategy.engine,
    )
    if key not in problem.known_cuts:
        problem.known_cuts[key] = balanced(Division(problem=problem, strategy=strategy))
    cuts = problem.known_cuts[key]
    if cuts != strategy.layers(problem.model.depth):
        yield replace(strategy, cuts=cuts)


def balanced(division: Division) -> tuple[int, ...]:
    """Layers of each stage such that the slowest takes the least: the head counts as the layers that take as
    long.
    """
    model, p = division.problem.model, division.strategy.pp
    each = sum(map(sum, division.plain)) / model.depth
    each -= sum(division.clock.head) / model.depth
    head = round(sum(division.clock.head) / each) if each else 0
    level = -(-(model.depth + head) // p)
    last = max(0 if p > 1 else model.depth, min(level - head, model.depth // p))
    rest, more = divmod(model.depth - last, max(p - 1, 1))
    return (*(rest + (p - 1 - i <= more) for i in range(p - 1)), last)


def search(problem: DivisionProblem, asked: StrategyFields, budget: int | None = None) -> Found:
    """The fastest division within the target's memory, or the budget where that is less.

    Raises:
        UsageError: what is asked divides neither the devices nor the model; it says what would.
    """
    start = time.monotonic()
    if "precision" in asked and asked["precision"] not in problem.target.peak_flops:
        known = ", ".join(problem.target.peak_flops)
        raise UsageError(
            f"precision = {asked['precision']}: {problem.target.name} has no such arithmetic. It has: "
            f"{known}."
        )
    limit = problem.memory if budget is None else min(budget, problem.memory)
    found = Found()
    divisions = _divisions(problem, asked, found)
    error = ENGINES[asked.get("engine", "ours")].error
    for room, marginal in ((int(limit / (1 + error)), False), (limit, True)):
        found.marginal = marginal
        _within(found, divisions, room)
        if found.best is not None:
            break
    found.seconds = time.monotonic() - start
    return found


def _divisions(problem: DivisionProblem, asked: StrategyFields, found: Found) -> list[Division]:
    """Those that divide the model and that the host has room for, the leanest noted."""
    divisions, refused = [], None
    model = problem.model
    for strategy in strategies(problem, asked):
        try:
            check_model(
                strategy, layers=model.depth, heads=model.heads, key_heads=model.key_heads,
                sequence=model.sequence, global_batch=problem.global_batch,
            )  # fmt: skip
        except UsageError as error:
            refused = refused or error
            found.dropped["does not divide the model's heads, layers or tokens"] += 1
            continue
        division = Division(problem=problem, strategy=strategy)
        if _host_too_small(division):
            found.dropped["above the host's memory"] += 1
            continue
        divisions.append(division)
    if not divisions:
        # of what was left free, the first that did not divide is no more at fault than the others
        raise refused if refused is not None and _PARTS & asked.keys() else _nothing(problem, asked)
    return divisions


def _host_too_small(division: Division) -> bool:
    memory = division.problem.target.host_memory_bytes
    if memory is None or division.strategy.offload == "none":
        return False
    per_node = min(division.problem.cluster.per_node, division.strategy.world)
    return (
        per_node
        * max(held.host_bytes(division.problem.model, division.strategy, r.place) for r in division.ranks)
        > memory
    )


#: The parts of a strategy that have to divide the model.
_PARTS = {"tp", "pp", "cp", "vpp", "sp", "cuts"}


def _nothing(problem: DivisionProblem, asked: StrategyFields) -> UsageError:
    given = ", ".join(f"{name}={value}" for name, value in asked.items())
    model = problem.model
    return UsageError(
        f"{given}{': no such' if given else 'No'} strategy divides {problem.cluster.devices} devices, "
        f"{model.depth} layers, {model.heads} heads ({model.key_heads} of keys) and a global batch of "
        f"{problem.global_batch} sequences of {model.sequence} tokens. dp × tp × pp × cp must be the number "
        "of devices, dp × micro_batch divide the batch, tp the heads, 2 × cp (× tp with sp) the tokens, and "
        "pp × vpp be no more than the layers."
    )


def _within(found: Found, divisions: list[Division], room: int) -> None:
    """Take cases in the order of their bounds until none can be faster than the best."""
    cases = []
    for division in divisions:
        least = division.least_seconds(room)
        if least is not None:
            cases.append(StrategyCase(division=division, least_seconds=least))
    found.dropped[_OVER] = len(divisions) - len(cases)
    found.considered = len(divisions)
    if not cases:
        found.nearest = min(divisions, key=lambda division: division.leanest)
        return
    cases.sort(key=lambda case: (case.least_seconds, _plainness(case.division.strategy)))
    record: Record[StrategyCase, Solved] = Record(solve=lambda case: case.division.solve(room))
    found.record, solved, best = record, 0, float("inf")
    waiting = [(case.least_seconds, at, False, case) for at, case in enumerate(cases)]
    heapq.heapify(waiting)
    while waiting:
        least, at, tightened, case = heapq.heappop(waiting)
        if least >= best or solved == MOST_SOLVES:
            found.next_bound = least
            record.nodes += _unsolved([case, *(entry[-1] for entry in heapq.nsmallest(_MOST_TOLD, waiting))])
            break
        if not tightened:
            tighter = case.division.tighter(room)
            if tighter is not None:
                heapq.heappush(waiting, (max(least, tighter), at, True, case))
            continue
        solved += 1
        record.search([case])
        best = min((s.seconds for s in record.solutions), default=best)
    found.solves = solved
    ranked = sorted(record.solutions, key=lambda s: s.seconds)
    if ranked:
        found.best, found.runners_up = ranked[0], _runners_up(found, cases, ranked)


_OVER = "needs more memory than a device has, whatever is computed again"


def _unsolved(cases: list[StrategyCase]) -> list[Node[Solved]]:
    return [Node(options=case.options, least=case.least_seconds) for case in cases]


def _runners_up(found: Found, cases: list[StrategyCase], ranked: list[Solved]) -> list[Solved]:
    """The next best divisions of other meshes: solved, the bounds alone would not be comparable."""
    seen = {_mesh(ranked[0].strategy)}
    others: list[Solved] = []
    for solved in ranked[1:]:
        if _mesh(solved.strategy) not in seen:
            seen.add(_mesh(solved.strategy))
            others.append(solved)
    for case in cases:
        if len(others) >= RUNNERS_UP:
            break
        if (mesh := _mesh(case.division.strategy)) in seen:
            continue
        seen.add(mesh)
        try:
            assert found.record is not None
            others.append(found.record.solve(case))
        except InfeasibleError:
            continue
    return sorted(others, key=lambda s: s.seconds)[:RUNNERS_UP]


def _plainness(s: Strategy) -> tuple[int, ...]:
    """Of divisions that take the same, the one with fewer axes in use comes first."""
    return s.cp, s.pp, s.tp, s.vpp, int(s.sp), s.zero, s.micro_batch


def _mesh(strategy: Strategy) -> tuple[int, ...]:
    return strategy.dp, strategy.tp, strategy.pp, strategy.cp
