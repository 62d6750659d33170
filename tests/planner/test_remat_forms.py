"""Values held in other forms (offloaded, compressed): figures and fronts against brute force, each lever
against all.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from remat_brute import chains, every_choice, front, groupings, instants
from remat_forms_brute import blocks_with_forms, held_ways

from effcompile.core.errors import InfeasibleError, UsageError
from effcompile.planner import OPTIMAL
from effcompile.planner.remat import (
    BackwardStep,
    BlockOption,
    BlockProblem,
    BlockStage,
    ChainProblem,
    Op,
    Residency,
    block_front,
    joint_front,
    simulate_block,
    smallest_budget,
    solve_chain,
)
from effcompile.planner.remat.layout import layout
from effcompile.planner.remat.prove import prove
from effcompile.planner.remat.search import Front, search
from effcompile.planner.remat.simulate import closure


def measures(problem: BlockProblem, figures: tuple[int, int, int, float, int]) -> tuple[int, int, float, int]:
    kept, _, peak, seconds, host = figures
    return kept, peak, seconds, host if problem.scarce else 0


def chain_of_two(**changes: object) -> BlockProblem:
    """x → a → b; the backward reads b, then a. a (200 bytes) may be offloaded in 2 s out and 3 s back, or
    compressed to 50.
    """
    ops = tuple(
        Op(name=f"make_{v}", reads=(r,), makes=(v,), seconds=s, workspace=5)
        for r, v, s in (("x", "a", 4.0), ("a", "b", 1.0))
    )
    steps = (
        BackwardStep(name="grad_b", reads=("b",), live=10),
        BackwardStep(name="grad_a", reads=("a",), live=30),
    )
    forms = {
        "a": (
            Residency(name="offload", host=200, out=2.0, back=3.0),
            Residency(name="compress", held=50, staged=50, packed=50, workspace=7, seconds=0.5),
        )
    }
    whole = {"x": 100, "a": 200, "b": 300}
    problem = BlockProblem(
        nbytes=whole,
        entering=("x",),
        leaving=(),
        forced=frozenset(),
        forward=ops,
        backward=steps,
        forms=forms,
    )
    return replace(problem, **changes)


def test_forms_played_by_hand() -> None:
    problem = chain_of_two()
    # forward: x+a+5 | a (copied) | a+b+5; backward: b+10 | a restored + 10 | a+30
    assert simulate_block(problem, {"b"}, (), {"a": "offload"}) == (300, 505, 310, 5.0)
    # compressed: x+a+5 | a+50+7 | a+b+5+50; backward: b+50+10 | a+50+10+7 | a+30
    assert simulate_block(problem, {"b"}, (), {"a": "compress"}) == (350, 555, 360, 0.5)
    # b made again from the restored a: (nothing kept) a restored | a+b+5 | a+b+10 | a+30
    assert simulate_block(problem, set(), ("make_b",), {"a": "offload"}) == (0, 505, 510, 6.0)


def test_copies_beside_the_compute_cost_what_they_lag_behind() -> None:
    away = Residency(name="offload", staged=200, host=200, out=2.0, back=3.0)
    problem = chain_of_two(hidden=(2.5, 1.0), forms={"a": (away,)})
    # out: made after 4 s of the forward's 5, copied at 6: 1 s late; back: asked for at 0, needed at 2.5,
    # there at 3: 0.5 s late
    assert simulate_block(problem, {"b"}, (), {"a": "offload"}) == (300, 505, 510, 1.5)


@settings(max_examples=60, deadline=None)
@given(problem=blocks_with_forms(6))
def test_the_simulator_equals_a_replay(problem: BlockProblem) -> None:
    for kept, names, figures in held_ways(problem):
        again = closure(problem, kept | names.keys())
        assert again is not None
        found = simulate_block(problem, kept, again, names)
        assert found[:3] == figures[:3]
        assert found[3] == pytest.approx(figures[3], abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(problem=blocks_with_forms(7))
def test_the_front_equals_brute_force(problem: BlockProblem) -> None:
    result = block_front(problem, timeout=600, points=10_000)
    assert result.complete
    assert result.proven
    found = {
        (o.kept_bytes, o.backward_peak, o.seconds, o.host_bytes if problem.scarce else 0)
        for o in result.options
    }
    assert found == front([measures(problem, f) for *_, f in held_ways(problem)])
    for o in result.options:
        assert o.host_bytes == sum(
            f.host for v, name in o.forms.items() for f in problem.forms[v] if f.name == name
        )


@settings(max_examples=30, deadline=None)
@given(problem=blocks_with_forms(6))
def test_z3_alone_finds_the_front_too(problem: BlockProblem) -> None:
    small, by_z3, by_search = layout(problem), Front(), Front()
    assert prove(small, by_z3, deadline=time.monotonic() + 600)
    assert search(small, by_search, room=10**6, deadline=time.monotonic() + 600)
    assert set(by_z3.points) == set(by_search.points)


@settings(max_examples=30, deadline=None)
@given(problem=blocks_with_forms(6))
def test_all_levers_are_never_worse_than_some(problem: BlockProblem) -> None:
    """Every point of a front with fewer levers is covered by the joint front."""
    joint = block_front(replace(problem, scarce=True), timeout=600, points=10_000).options
    fewer = replace(problem, forms={v: fs[:1] for v, fs in problem.forms.items()}, scarce=True)
    still = replace(problem, forward=_still(problem), scarce=True)
    for less in (fewer, still, replace(problem, forms={})):
        for o in block_front(less, timeout=600, points=10_000).options:
            assert any(
                j.kept_bytes <= o.kept_bytes
                and j.backward_peak <= o.backward_peak
                and j.seconds <= o.seconds + 1e-9
                and j.host_bytes <= o.host_bytes
                for j in joint
            )


@settings(max_examples=20, deadline=None)
@given(problem=blocks_with_forms(7))
def test_a_joint_front_covers_its_parts_even_when_thinned(problem: BlockProblem) -> None:
    assume(problem.forms)  # without any, there are no parts to unite
    few = joint_front(problem, timeout=60, points=3).options
    for part in (
        replace(problem, forms={}, hidden=None, scarce=False),
        replace(problem, forward=_still(problem)),
    ):
        for o in block_front(part, timeout=60, points=3).options:
            assert any(
                j.kept_bytes <= o.kept_bytes
                and j.backward_peak <= o.backward_peak
                and j.seconds <= o.seconds + 1e-9
                for j in few
            )


def _still(problem: BlockProblem) -> tuple[Op, ...]:
    return tuple(replace(op, repeatable=False) for op in problem.forward)


# ------------------------------------------------------------------ chains with scarce host memory


@st.composite
def hosted_chains(draw: st.DrawFn) -> ChainProblem:
    """Chains some of whose options take host bytes, under a limit on them."""
    problem = draw(chains())

    def hosted(i: int, o: BlockOption) -> BlockOption:
        host = draw(st.integers(0, 6)) if i else 0
        return replace(o, host_bytes=host, forms={"a": "offload"} if host else {})

    table = {
        kind: tuple(hosted(i, o) for i, o in enumerate(options)) for kind, options in problem.options.items()
    }
    return replace(problem, options=table, host=draw(st.one_of(st.none(), st.integers(0, 12))))


def best_of_all(problem: ChainProblem) -> tuple[float, float, float]:
    """(least seconds within the limits, least peak within the host's, least host bytes within the budget);
    infinity: none.
    """
    best = smallest = hosted = float("inf")
    for groups in groupings(problem):
        inside = {i for g in groups for i in range(g.first, g.last + 1)}
        rerun = sum(problem.stages[j].rerun_seconds for g in groups for j in range(g.first, g.last))
        for choice in every_choice(problem):
            taken = [problem.options[s.kind][c] for s, c in zip(problem.stages, choice, strict=True)]
            loads = instants(problem, choice, groups)
            if loads is None or any(taken[i].forms for i in inside):
                continue
            peak, host = max(loads.values()), sum(o.host_bytes for o in taken)
            fits = problem.budget is None or peak <= problem.budget
            hosted = min(hosted, host if fits else hosted)
            if problem.host is None or host <= problem.host:
                smallest = min(smallest, peak)
                best = min(best, rerun + sum(o.seconds for o in taken) if fits else best)
    return best, smallest, hosted


@settings(max_examples=150, deadline=None)
@given(problem=hosted_chains())
def test_a_chain_within_its_host_memory_equals_brute_force(problem: ChainProblem) -> None:
    best, smallest, hosted = best_of_all(problem)
    assert smallest_budget(problem) == smallest
    if best == float("inf"):
        with pytest.raises(InfeasibleError) as refused:
            solve_chain(problem, reference_seconds=1.0, gap=0.0, timeout=60)
        assert refused.value.nearest["memory"] == smallest
        if hosted < float("inf"):
            assert "host memory" in str(refused.value)
            assert refused.value.nearest["host"] == hosted
        return
    found = solve_chain(problem, reference_seconds=1.0, gap=0.0, timeout=60)
    assert found.seconds == found.bound == best
    assert problem.host is None or found.host <= problem.host
    assert found.host == sum(
        problem.options[s.kind][c].host_bytes for s, c in zip(problem.stages, found.choice, strict=True)
    )


def test_many_equal_stages_share_the_host() -> None:
    """48 layers, room on the host for a third of what all would offload: within the gap of the proof."""

    def way(kept: int, seconds: float, host: int = 0) -> BlockOption:
        forms = {"a": "offload"} if host else {}
        sizes = {"kept_bytes": kept, "forward_peak": kept + 5, "backward_peak": kept + 9, "host_bytes": host}
        return BlockOption(kept=frozenset(), recomputed=(), seconds=seconds, forms=forms, **sizes)

    table = {
        "k": (way(100, 0.0), way(60, 0.05, 40), way(40, 0.3), way(20, 0.25, 70), way(5, 0.9), way(5, 0.4, 95))
    }
    stages = tuple(
        BlockStage(name=f"h{i}", kind="k", forward_base=0, backward_base=3 * (48 - i)) for i in range(48)
    )
    problem = ChainProblem(base=1000, budget=3400, options=table, stages=stages, host=48 * 95 // 3)
    found = solve_chain(problem, reference_seconds=48.0, timeout=30)
    assert found.status == OPTIMAL
    assert found.gap <= 0.01
    assert found.host <= 48 * 95 // 3
    assert found.peak <= 3400
    free = solve_chain(replace(problem, host=None), reference_seconds=48.0, timeout=30)
    none = solve_chain(replace(problem, host=0), reference_seconds=48.0, timeout=30)
    assert free.seconds < found.seconds < none.seconds


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"forms": {"z": ()}}, "'z'"),
        ({"leaving": ("a",)}, "has forms"),
        ({"forms": {"a": (Residency(name="offload"), Residency(name="offload"))}}, "named 'offload'"),
        ({"forms": {"a": (Residency(name="offload", out=float("nan")),)}}, "finite"),
        ({"forms": {"a": (Residency(name="offload", staged=7),)}}, "staged"),
        ({"hidden": (1.0,)}, "2 backward steps"),
    ],
)
def test_forms_that_contradict_the_block_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        block_front(chain_of_two(**change))


@pytest.mark.parametrize(
    ("kept", "forms", "words"),
    [
        ({"b"}, {"a": "zip"}, "no form 'zip'"),
        ({"a", "b"}, {"a": "offload"}, "one of both"),
        ({"b"}, {"x": "offload"}, "no form"),
    ],
)
def test_an_impossible_way_is_refused(kept: set[str], forms: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        simulate_block(chain_of_two(), kept, (), forms)
