"""The smallest budget of a chain, and why nothing fits below it.

Exact: for a given budget, keeping least at every stage is feasible if anything is (`Links.lean`; with scarce
host memory walk.feasible), and feasibility only grows with the budget, so bisection over whole bytes finds
the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from effcompile.core.causes import HostMemory, Instant
from effcompile.core.errors import InfeasibleError, UnknownNameError, UsageError
from effcompile.planner.remat.links import ChainLinks, variants
from effcompile.planner.remat.problem import ChainProblem
from effcompile.planner.remat.walk import feasible

UNLIMITED = 1 << 60  # bytes; more than any chain takes


def smallest_budget(problem: ChainProblem) -> int:
    """The least budget within which some choice of options, or of groups, fits: exact.

    The problem's own budget is left aside.

    Raises:
        UsageError: the problem contradicts itself.
    """
    check_chain(problem)
    return leanest(variants(problem))[0]


def leanest(chains: Sequence[ChainLinks]) -> tuple[int, ChainLinks, tuple[int, ...]]:
    """The smallest budget of any of the chains, that chain, and its choice."""
    best: tuple[int, ChainLinks, tuple[int, ...]] | None = None
    for links in chains:
        choice = feasible(links, UNLIMITED if best is None else best[0] - 1)
        if choice is None:
            continue
        low, high = 0, links.peak(choice)
        while low < high:
            middle = (low + high) // 2
            leaner = feasible(links, middle)
            if leaner is None:
                low = middle + 1
            else:
                choice, high = leaner, links.peak(leaner)
        best = high, links, choice
    assert best is not None, "the chain without groups fits without a limit"
    return best


def infeasible(problem: ChainProblem, chains: Sequence[ChainLinks]) -> InfeasibleError:
    """The error for a budget below the smallest one: which instant binds, what is there, what would do."""
    assert problem.budget is not None
    if problem.host is not None and chains[0].host is not None:
        roomy = [replace(links, host=None) for links in chains]
        free, links, choice = leanest(roomy)
        if free <= problem.budget:
            return _host_too_small(problem, problem.host, chains, roomy)
    least, links, choice = leanest(chains)
    assert least > problem.budget
    name, i, phase = highest(problem, links, choice)
    stage, way = problem.stages[i], links.links[i].ways[choice[i]]
    kept = sum(link.ways[c].kept for link, c in zip(links.links[:i], choice, strict=False))
    own = way.backward if phase else way.forward
    others = (links.links[i].backward if phase else links.links[i].forward) - problem.base
    parts = (
        ("parameters, buffers, inputs", problem.base),
        ("kept values", kept),
        ("gradients and other storages", others),
    )
    alive = (*(part for part in parts if part[1]), (f"{stage.name} itself", own))
    instant = Instant(
        budget=problem.budget, phase="backward" if phase else "forward", site=stage.name, parts=alive
    )
    return InfeasibleError(instant, binding=("memory", name), nearest={"memory": float(least)})


def _host_too_small(
    problem: ChainProblem, host: int, chains: Sequence[ChainLinks], roomy: Sequence[ChainLinks]
) -> InfeasibleError:
    """Nothing fits, but would with more host memory."""
    assert problem.budget is not None
    counted = [replace(links, host=UNLIMITED) for links in roomy]
    needed = min(
        links.hosted(choice) for links in counted if (choice := feasible(links, problem.budget)) is not None
    )
    least = leanest(chains)[0]
    return InfeasibleError(
        HostMemory(budget=problem.budget, host=host, needed=needed, instead=least),
        binding=("host memory",),
        nearest={"memory": float(least), "host": float(needed)},
    )


def highest(problem: ChainProblem, links: ChainLinks, choice: Sequence[int]) -> tuple[str, int, int]:
    """The name of the highest instant, its stage, and 0 for forward or 1 for backward."""
    loads = [
        (load, -i, phase) for i, pair in enumerate(links.instants(choice)) for phase, load in enumerate(pair)
    ]
    _, i, phase = max(loads)
    return f"{'backward' if phase else 'forward'} {problem.stages[-i].name}", -i, phase


def check_chain(problem: ChainProblem) -> None:
    """Refuse a chain that contradicts itself.

    Raises:
        UnknownNameError: a run of a stage that is none.
        UsageError: no stages, names used twice, a kind without options, negative bytes or seconds, runs that
            overlap or leave the chain.
    """
    names = [s.name for s in problem.stages]
    if not names:
        raise UsageError("A chain has at least one stage.")
    if problem.host is not None and problem.host < 0:
        raise UsageError(f"host = {problem.host!r} bytes; give 0 or more, or None for no limit.")
    if len(set(names)) < len(names):
        raise UsageError(
            f"Two stages are named {next(n for n in names if names.count(n) > 1)!r}. Give each its own name."
        )
    for stage in problem.stages:
        if not problem.options.get(stage.kind):
            raise UsageError(
                f"Stage {stage.name!r} is of kind {stage.kind!r}, which has no options. Known: "
                f"{', '.join(problem.options)}."
            )
        if not 0 <= stage.rerun_seconds < float("inf") or min(stage.entering_bytes, stage.rerun_peak) < 0:
            raise UsageError(
                f"Stage {stage.name!r}: rerun_seconds, entering_bytes and rerun_peak must be 0 or more, "
                "and finite."
            )
    for kind, options in problem.options.items():
        if problem.host is not None and options and all(o.host_bytes for o in options):
            raise UsageError(
                f"Every option of {kind!r} takes host memory, which is limited. Give one that takes none."
            )
        for i, o in enumerate(options):
            if not 0 <= o.seconds < float("inf") or not 0 <= o.entering_kept <= o.kept_bytes:
                raise UsageError(
                    f"Option {i} of {kind!r}: seconds {o.seconds!r}, kept_bytes {o.kept_bytes}, "
                    f"entering_kept {o.entering_kept}; seconds must be 0 or more, and 0 ≤ entering_kept ≤ "
                    "kept_bytes."
                )
            if o.host_bytes < 0:
                raise UsageError(f"Option {i} of {kind!r} has {o.host_bytes} host bytes; give 0 or more.")
    for before, (first, last) in zip(
        [(-1, -1), *sorted(problem.groupable)], sorted(problem.groupable), strict=False
    ):
        if not before[1] < first <= last < len(names):
            raise UsageError(
                f"groupable ({first}, {last}) overlaps another run or leaves the {len(names)} stages."
            )
    for title, slack in (
        ("forward_slack", problem.forward_slack),
        ("backward_slack", problem.backward_slack),
    ):
        if strange := [n for n in slack if n not in names]:
            raise UnknownNameError(f"stage ({title})", strange[0], names)
