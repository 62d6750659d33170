"""Every way to run a small block or chain, tried; random ones; and blocks of a real model's shape."""

from __future__ import annotations

import random
from itertools import chain, combinations, product

from hypothesis import strategies as st

from effcompile.planner.remat import (
    BackwardStep,
    BlockOption,
    BlockProblem,
    BlockStage,
    ChainProblem,
    Group,
    Op,
)

Point = tuple[int, int, float]


def replay(problem: BlockProblem, kept: frozenset[str]) -> tuple[int, int, int, float] | None:
    """The four figures by running the block on a set of live values, recomputing by demand; None when it
    cannot be run.

    Written apart from the package's simulator: the schedule is a list that grows by insertion, and each
    value's death is found by looking ahead in it.
    """
    if not problem.forced <= kept:
        return None
    schedule: list[tuple[int, object]] = [(t, step) for t, step in enumerate(problem.backward)]
    for op in reversed(problem.forward):
        mine = set(op.makes) - kept
        at = next((i for i, (_, what) in enumerate(schedule) if mine & set(what.reads)), None)
        if at is None:
            continue
        if not op.repeatable:
            return None
        t = schedule[at][0]
        # within a step, forward order: before those placed already
        at = next(i for i, (s, _) in enumerate(schedule) if s == t)
        schedule.insert(at, (t, op))
    again = [what for _, what in schedule if isinstance(what, Op)]
    remade = {v for op in again for v in op.makes}
    for _, what in schedule:
        if any(v not in kept and v not in remade for v in what.reads):
            return None
    waiting = states = sum(op.state for op in again)  # of the generator before each draw that is made again
    backward, alive = [], {v: problem.nbytes[v] for v in kept}
    for i, (t, what) in enumerate(schedule):
        if isinstance(what, Op):
            between = min(problem.backward[t - 1].live if t else 0, problem.backward[t].live)
            double = sum(problem.nbytes[v] for v in what.makes if v in kept)
            alive.update({v: problem.nbytes[v] for v in what.makes if v not in kept})
            backward.append(sum(alive.values()) + between + what.workspace + double + waiting + what.state)
            waiting -= what.state
        else:
            backward.append(sum(alive.values()) + what.live + waiting)
        later = {v for _, other in schedule[i + 1 :] for v in other.reads}
        ever = later | {v for _, other in schedule[: i + 1] for v in other.reads}
        alive = {v: b for v, b in alive.items() if v in later or (v in kept and v not in ever)}
    forward, alive, drawn = [], {v: problem.nbytes[v] for v in problem.entering}, 0
    for u, op in enumerate(problem.forward):
        if op.state and op in again:
            # taken before the operator runs: an instant of its own, after which what nothing reads is gone
            drawn += op.state
            forward.append(sum(alive.values()) + drawn)
            soon = {v for other in problem.forward[u:] for v in other.reads} | kept | set(problem.leaving)
            alive = {v: b for v, b in alive.items() if v in soon}
        alive.update({v: problem.nbytes[v] for v in op.makes})
        forward.append(sum(alive.values()) + op.workspace + drawn)
        later = {v for other in problem.forward[u + 1 :] for v in other.reads} | kept | set(problem.leaving)
        alive = {v: b for v, b in alive.items() if v in later}
    size = sum(problem.nbytes[v] for v in kept) + states
    total = sum(problem.nbytes[v] for v in problem.entering)
    return size, max(forward, default=total), max(backward, default=size), sum(op.seconds for op in again)


def ways(problem: BlockProblem) -> list[tuple[frozenset[str], tuple[int, int, int, float]]]:
    """Every set of kept values that lets the block run, with its figures."""
    values = list(problem.nbytes)
    subsets = chain.from_iterable(combinations(values, r) for r in range(len(values) + 1))
    return [(k, figures) for s in subsets if (figures := replay(problem, k := frozenset(s))) is not None]


def front(points: list[Point]) -> set[Point]:
    """Those that no other equals or beats in everything."""
    distinct = set(points)
    return {
        p
        for p in distinct
        if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in distinct)
    }


@st.composite
def blocks(draw: st.DrawFn, values: int = 10) -> BlockProblem:
    """Operators with several results, free ones, workspaces, forced and entering values, steps that free more
    than they make.
    """
    entering = [f"e{i}" for i in range(draw(st.integers(0, 2)))]
    names, ops = list(entering), []
    while len(names) < values and (not ops or draw(st.integers(0, 9)) > 0):
        made = [f"v{len(names) + i}" for i in range(draw(st.sampled_from([1, 1, 1, 2])))]
        reads = draw(st.lists(st.sampled_from(names), max_size=2, unique=True)) if names else []
        if names and draw(st.booleans()):
            reads = list(dict.fromkeys([*reads, names[-1]]))
        ops.append(
            Op(
                name=f"op{len(ops)}",
                reads=tuple(reads),
                makes=tuple(made),
                seconds=draw(st.sampled_from([0.0, 1.0, 2.0, 3.0, 0.25])),
                workspace=draw(st.sampled_from([0, 0, 3, 9])),
                repeatable=draw(st.integers(0, 7)) > 0,
                state=draw(st.sampled_from([0, 0, 0, 5])),
            )
        )
        names += made
    steps = [
        BackwardStep(
            name=f"b{t}",
            reads=tuple(draw(st.lists(st.sampled_from(names), max_size=3, unique=True))),
            live=draw(st.integers(0 if t == 0 else -4, 12)),
        )
        for t in range(draw(st.integers(0, 9)))
    ]
    return BlockProblem(
        nbytes={v: draw(st.sampled_from([0, 1, 2, 4, 4, 8, 12])) for v in names},
        entering=tuple(entering),
        leaving=tuple(names[-1:]) if draw(st.booleans()) else (),
        forced=frozenset(draw(st.lists(st.sampled_from(names), max_size=1))),
        forward=tuple(ops),
        backward=tuple(steps),
    )


MB = 1_000_000


def transformer_block(width: int = 768, tokens: int = 1024, heads: int = 12, seed: int = 0) -> BlockProblem:
    """A GPT-2 block as it stands in the joint graph: two layer norms with their statistics, attention, a
    five-step gelu.
    """
    chance = random.Random(seed)
    x = tokens * width * 4
    nbytes: dict[str, int] = {"x": x}
    ops: list[Op] = []
    steps: list[BackwardStep] = []

    def op(name: str, reads: str, makes: dict[str, int], gflop: float = 0.0, repeatable: bool = True) -> None:
        nbytes.update(makes)
        moved = sum(nbytes[v] for v in (*reads.split(), *makes))
        seconds = gflop / 60 + moved / 8e9
        workspace = x // 4 if gflop and chance.random() < 0.3 else 0
        ops.append(
            Op(
                name=name,
                reads=tuple(reads.split()),
                makes=tuple(makes),
                seconds=seconds,
                workspace=workspace,
                repeatable=repeatable,
            )
        )

    g = 2 * tokens * width * width / 1e9
    small = tokens * 4
    op("ln1", "x", {"n1": x, "m1": small, "r1": small})
    op("qkv", "n1", {"qkv": 3 * x}, 3 * g)
    op("split", "qkv", {"q": x, "k": x, "v": x})
    op("sdpa", "q k v", {"a": x, "lse": heads * tokens * 4}, 4 * tokens * tokens / 2 * width / 1e9)
    op("merge", "a", {"am": x})
    op("proj", "am", {"p": x}, g)
    op("drop1", "p", {"d1": x, "mask1": x // 4}, repeatable=False)
    op("add1", "x d1", {"x2": x})
    op("ln2", "x2", {"n2": x, "m2": small, "r2": small})
    op("fc", "n2", {"f": 4 * x}, 4 * g)
    op("pow", "f", {"f3": 4 * x})
    op("inner", "f f3", {"fi": 4 * x})
    op("tanh", "fi", {"t": 4 * x})
    op("half", "f", {"h": 4 * x})
    op("gelu", "h t", {"ge": 4 * x})
    op("fcproj", "ge", {"fp": x}, 4 * g)
    op("drop2", "fp", {"d2": x, "mask2": x // 4}, repeatable=False)
    op("add2", "x2 d2", {"y": x})
    live = 0
    plan = (  # what each backward step reads; "-", or a name that is no value of the block, for nothing
        "mask2 ge - fw - h t t - - f - - - n2 fwg - x2 m2,r2 - - mask1 am pw - q,k,v,a,lse - - n1 qw - - "
        "x,m1,r1 - -"
    )
    for i, reads in enumerate(plan.split()):
        known = tuple(v for v in reads.split(",") if v in nbytes)
        live = max(0, live + chance.choice([x, x, 4 * x, -x, -4 * x, -x]))
        steps.append(BackwardStep(name=f"b{i}", reads=known, live=live + x))
    return BlockProblem(
        nbytes=nbytes,
        entering=("x",),
        leaving=("y",),
        forced=frozenset(),
        forward=tuple(ops),
        backward=tuple(steps),
    )


@st.composite
def chains(draw: st.DrawFn, stages: int = 4, options: int = 4) -> ChainProblem:
    """Stages of at most two kinds, awkward bases and slacks, perhaps a run that may be grouped."""
    kinds = ["a", "b"][: draw(st.integers(1, 2))]
    enter = {k: draw(st.integers(0, 3)) for k in kinds}
    table = {
        kind: tuple(
            BlockOption(
                kept=frozenset(),
                recomputed=(),
                kept_bytes=kept,
                forward_peak=kept + draw(st.integers(0, 8)),
                backward_peak=kept + draw(st.integers(0, 12)),
                seconds=draw(st.integers(0, 12)) / 4,
                entering_kept=min(kept, enter[kind]) if draw(st.booleans()) else 0,
            )
            for kept in draw(st.lists(st.integers(0, 10), min_size=1, max_size=options))
        )
        for kind in kinds
    }
    names = [f"s{i}" for i in range(draw(st.integers(1, stages)))]
    small = st.integers(0, 5)
    members = [draw(st.sampled_from(kinds)) for _ in names]
    runs = ((0, len(names) - 1),) if len(names) > 1 and draw(st.booleans()) else ()
    return ChainProblem(
        base=draw(st.integers(0, 5)),
        budget=draw(st.one_of(st.none(), st.integers(0, 60))),
        options=table,
        stages=tuple(
            BlockStage(
                name=n,
                kind=k,
                forward_base=draw(small),
                backward_base=draw(small),
                rerun_seconds=draw(st.integers(0, 8)) / 4,
                entering_bytes=enter[k],
                rerun_peak=draw(st.integers(0, 12)),
            )
            for n, k in zip(names, members, strict=True)
        ),
        forward_slack={n: draw(st.integers(-2, 2)) for n in names if draw(st.booleans())},
        backward_slack={n: draw(st.integers(-2, 2)) for n in names if draw(st.booleans())},
        groupable=runs,
    )


def every_choice(problem: ChainProblem) -> list[tuple[int, ...]]:
    return list(product(*(range(len(problem.options[s.kind])) for s in problem.stages)))


def groupings(problem: ChainProblem) -> list[tuple[Group, ...]]:
    """No groups, or every groupable run cut into groups of one size."""
    longest = max((last - first + 1 for first, last in problem.groupable), default=1)
    cuts = [()]
    for size in range(2, longest + 1):
        groups = []
        for first, last in problem.groupable:
            members = list(range(first, last + 1))
            parts = [members[i : i + size] for i in range(0, len(members), size)]
            groups += [Group(first=p[0], last=p[-1]) for p in parts if len(p) > 1]
        cuts.append(tuple(groups))
    return list(dict.fromkeys(cuts))


def instants(
    problem: ChainProblem, choice: tuple[int, ...], groups: tuple[Group, ...]
) -> dict[str, int] | None:
    """Bytes at every instant of a step, played stage by stage; None when the groups do not allow
    the choice.
    """
    taken = [problem.options[s.kind][c] for s, c in zip(problem.stages, choice, strict=True)]
    inside = {j: g for g in groups for j in range(g.first, g.last + 1)}
    held = []
    for j, (stage, option) in enumerate(zip(problem.stages, taken, strict=True)):
        group = inside.get(j)
        if group and j == group.first and option.entering_kept != stage.entering_bytes:
            return None
        if group and j > group.first and option.entering_kept == 0:
            return None
        held.append(option.kept_bytes - (option.entering_kept if group and j > group.first else 0))
    loads = {}
    for i, (stage, option) in enumerate(zip(problem.stages, taken, strict=True)):
        before = problem.base + sum(held[:i])
        loads[f"forward {stage.name}"] = (
            before + stage.forward_base + option.forward_peak + problem.forward_slack.get(stage.name, 0)
        )
        there = before + stage.backward_base + problem.backward_slack.get(stage.name, 0)
        group = inside.get(i)
        remade = sum(problem.stages[j].entering_bytes for j in range(group.first + 1, i)) if group else 0
        loads[f"backward {stage.name}"] = there + remade + option.backward_peak
        if group and i == group.last:
            for j in range(group.first, i):
                so_far = sum(problem.stages[m].entering_bytes for m in range(group.first + 1, j + 1))
                loads[f"re-run {problem.stages[j].name}"] = (
                    there + held[i] + so_far + problem.stages[j].rerun_peak
                )
    return loads


def chain_optimum(problem: ChainProblem) -> tuple[float, float]:
    """(least seconds within the budget, or infinity; least peak of all)."""
    best, smallest = float("inf"), float("inf")
    for groups in groupings(problem):
        rerun = sum(problem.stages[j].rerun_seconds for g in groups for j in range(g.first, g.last))
        for choice in every_choice(problem):
            loads = instants(problem, choice, groups)
            if loads is None:
                continue
            peak = max(loads.values())
            smallest = min(smallest, peak)
            if problem.budget is None or peak <= problem.budget:
                best = min(
                    best,
                    rerun
                    + sum(
                        problem.options[s.kind][c].seconds
                        for s, c in zip(problem.stages, choice, strict=True)
                    ),
                )
    return best, smallest


def realistic_chain(
    count: int, kinds: int, *, options: int, groupable: bool = True, seed: int = 0
) -> ChainProblem:
    """Layers with a convex trade of bytes for seconds, gradients that pile up towards the first, and a loss
    head at the end.
    """
    chance = random.Random(seed)

    def way(kept: float, peak: float, seconds: float, entering: int = 0) -> BlockOption:
        sizes = {
            "kept_bytes": int(kept),
            "forward_peak": int(kept + 9 * MB),
            "backward_peak": int(peak),
            "entering_kept": entering,
        }
        return BlockOption(kept=frozenset(), recomputed=(), seconds=seconds, **sizes)

    table = {"head": (way(206 * MB, 618 * MB, 0.0), way(4 * MB, 206 * MB, 0.3))}
    for k in range(kinds):
        size, speed = chance.uniform(0.5, 2), chance.uniform(0.5, 2)
        ways = []
        for i in range(options):
            t = i / (options - 1)
            peak = 82 - 30 * t * (1 - 0.6 * t) + chance.uniform(0, 5)
            ways.append(way((2 + 70 * (1 - t)) * size * MB, peak * size * MB, 0.2 * t**2 * speed, MB))
        table[f"k{k}"] = tuple(ways)
    stages = [
        BlockStage(
            name=f"h{i}",
            kind=f"k{i % kinds}",
            forward_base=0,
            backward_base=5 * MB * (count - i),
            rerun_seconds=0.2,
            entering_bytes=MB,
            rerun_peak=12 * MB,
        )
        for i in range(count)
    ]
    stages.append(BlockStage(name="head", kind="head", forward_base=0, backward_base=0))
    runs = ((0, count - 1),) if groupable else ()
    return ChainProblem(base=500 * MB, budget=None, options=table, stages=tuple(stages), groupable=runs)
