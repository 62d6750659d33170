"""Every choice tried, in exact arithmetic; and small random problems."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product

from hypothesis import strategies as st

from effcompile.planner import Alternative, Problem

LIMITS = ("error_squared", "memory")


def feasible_choices(problem: Problem) -> list[dict[str, str]]:
    """All complete choices that break nothing."""
    names = list(problem.sites)
    combos = product(*([a.name for a in problem.sites[s]] for s in names))
    return [c for combo in combos if not problem.violations(c := dict(zip(names, combo, strict=True)))]


def optimum(problem: Problem) -> Fraction | None:
    return min((problem.cost(c) for c in feasible_choices(problem)), default=None)


@st.composite
def problems(draw: st.DrawFn, max_sites: int = 5, ties: bool = True) -> Problem:
    """Awkward floats, negative objectives and resources, ties between sites, limits that may be 0, tight or
    impossible.
    """
    number = st.one_of(st.integers(-4, 12).map(float), st.floats(-3, 10, allow_subnormal=False))
    error = st.one_of(st.just(0.0), st.floats(1e-9, 1e-3))
    names = [f"s{i}" for i in range(draw(st.integers(0, max_sites)))]
    counts = {s: draw(st.integers(1, 4)) for s in names}
    sites = {}
    for site in names:
        alternatives = []
        for i in range(counts[site]):
            requires = {}
            if ties and len(names) > 1 and draw(st.integers(0, 3)) == 0:
                other = draw(st.sampled_from([n for n in names if n != site]))
                options = [f"o{j}" for j in range(counts[other])]
                requires = {
                    other: tuple(
                        draw(st.lists(st.sampled_from(options), min_size=1, max_size=2, unique=True))
                    )
                }
            resources = {"error_squared": draw(error), "memory": draw(number) * 1e9}
            alternatives.append(
                Alternative(name=f"o{i}", objective=draw(number), resources=resources, requires=requires)
            )
        sites[site] = tuple(alternatives)
    limits = {
        r: draw(v)
        for r, v in zip(LIMITS, (st.floats(0, 3e-3), st.floats(-5e9, 4e10)), strict=True)
        if draw(st.booleans())
    }
    return Problem(
        sites=sites, limits=limits, base={"memory": draw(number) * 1e8}, base_objective=draw(number)
    )


def realistic(count: int, seed: int = 0) -> Problem:
    """Linears × 7 precisions under an error and a weight limit, with merges and attentions that require
    others.
    """
    chance = random.Random(seed)
    options = [
        ("fp32", 1.0, 0.0, 4.0),
        ("bf16", 0.7, 0.02, 2.0),
        ("int8_dynamic", 0.36, 1.0, 1.0),
        ("int8_channel", 0.38, 0.7, 1.02),
        ("int8_static", 0.33, 1.6, 1.0),
        ("w8", 0.95, 0.3, 1.0),
        ("w4", 0.85, 4.0, 0.55),
    ]
    sites: dict[str, tuple[Alternative, ...]] = {}
    for i in range(count):
        size, sensitivity = chance.choice([768 * 768, 768 * 3072]), 10 ** chance.uniform(-7.5, -4)
        sites[f"linear{i}"] = tuple(
            Alternative(
                name=name,
                objective=f * size * 1e-9 * chance.uniform(0.85, 1.15),
                resources={
                    "error_squared": e * sensitivity * chance.uniform(0.6, 1.5),
                    "weight_bytes": int(b * size),
                },
            )
            for name, f, e, b in options
        )
    for i in range(0, count - 3, 6):
        inputs = {f"linear{i + j}": ("fp32", "int8_dynamic", "int8_channel") for j in range(3)}
        sites[f"merge{i}"] = (
            Alternative(name="separate", objective=0.0),
            Alternative(name="merged", objective=-2e-4, requires=inputs),
        )
        packed = Alternative(name="packed", objective=2e-4, requires={f"merge{i}": ("merged",)})
        sites[f"attention{i}"] = (
            Alternative(name="sdpa", objective=3e-4),
            packed,
            Alternative(name="math", objective=3.2e-4),
        )
    most = {
        r: sum(max(a.resources.get(r, 0.0) for a in s) for s in sites.values())
        for r in ("error_squared", "weight_bytes")
    }
    return Problem(
        sites=sites,
        limits={"error_squared": 0.12 * most["error_squared"], "weight_bytes": 0.45 * most["weight_bytes"]},
    )
