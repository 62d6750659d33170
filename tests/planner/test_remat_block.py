from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import z3
from hypothesis import given, settings
from remat_brute import blocks, front, replay, transformer_block, ways

from effcompile.core.errors import UsageError
from effcompile.planner.ask import ask as ask_z3
from effcompile.planner.remat import BackwardStep, BlockProblem, Op, block, block_front, simulate_block
from effcompile.planner.remat import prove as prove_module
from effcompile.planner.remat.block import thinned
from effcompile.planner.remat.grid import Grid
from effcompile.planner.remat.layout import Layout, layout
from effcompile.planner.remat.prove import prove
from effcompile.planner.remat.search import Front, replayed, search
from effcompile.planner.remat.simulate import closure

KEPT, PEAK, SECONDS = 0, 2, 3


def measures(figures: tuple[int, int, int, float]) -> tuple[int, int, float]:
    return figures[KEPT], figures[PEAK], figures[SECONDS]


def chain_of_three() -> BlockProblem:
    """x → a → b → c; the backward reads b, then a, then x."""
    made = (("x", "a", 1.0), ("a", "b", 2.0), ("b", "c", 4.0))
    ops = tuple(Op(name=f"make_{v}", reads=(r,), makes=(v,), seconds=s, workspace=5) for r, v, s in made)
    steps = tuple(
        BackwardStep(name=f"grad_{v}", reads=(v,), live=live) for v, live in (("b", 10), ("a", 30), ("x", 20))
    )
    return BlockProblem(
        nbytes={"x": 100, "a": 200, "b": 300, "c": 400},
        entering=("x",),
        leaving=("c",),
        forced=frozenset(),
        forward=ops,
        backward=steps,
    )


def test_a_block_played_by_hand() -> None:
    problem = chain_of_three()
    # forward: x+a+5, (x kept) x+a+b+5, x+b+c+5; backward: x+a+5 | x+a+b+5 | x+a+b+10 | x+a+30 | x+20
    assert simulate_block(problem, {"x"}, ("make_a", "make_b")) == (100, 805, 610, 3.0)
    assert simulate_block(problem, {"x", "a", "b"}, ()) == (600, 1005, 610, 0.0)
    # b again from the kept a: x+a+b+5 | +10 | x+a+30
    assert simulate_block(problem, {"x", "a"}, ("make_b",)) == (300, 1005, 610, 2.0)


def test_a_recomputed_operator_makes_what_is_kept_once_more() -> None:
    ops = (Op(name="pair", reads=("x",), makes=("a", "b"), seconds=1.0, workspace=7),)
    steps = (BackwardStep(name="s", reads=("a",), live=1), BackwardStep(name="t", reads=("b",), live=2))
    problem = BlockProblem(
        nbytes={"x": 10, "a": 20, "b": 40},
        entering=("x",),
        leaving=(),
        forced=frozenset(),
        forward=ops,
        backward=steps,
    )
    kept_a = simulate_block(problem, {"x", "a"}, ("pair",))
    # at t the kept a is dead; the pair makes it again, beside min(1, 2)
    assert kept_a[PEAK] == 10 + 20 + 40 + 7 + 1
    assert simulate_block(problem, {"x"}, ("pair",))[PEAK] == 10 + 60 + 7


def test_a_draw_that_is_made_again_holds_the_generators_state() -> None:
    ops = (
        Op(name="draw", reads=(), makes=("a",), seconds=0.0, state=50),
        Op(name="use", reads=("a",), makes=("b",), seconds=1.0),
    )
    steps = (BackwardStep(name="s", reads=("b",), live=1), BackwardStep(name="t", reads=("a",), live=2))
    problem = BlockProblem(
        nbytes={"a": 4, "b": 4}, entering=(), leaving=(), forced=frozenset(), forward=ops, backward=steps
    )
    # a free operator, and not a free draw
    assert simulate_block(problem, {"b"}, ("draw",)) == (4 + 50, 4 + 4 + 50, 4 + 50 + 50 + 1, 0.0)
    assert [o.kept for o in block_front(problem).options] == [{"a", "b"}, {"a"}]


@settings(max_examples=80, deadline=None)
@given(problem=blocks(7))
def test_the_simulator_equals_a_replay(problem: BlockProblem) -> None:
    for kept, figures in ways(problem):
        again = closure(problem, kept)
        assert again is not None
        assert simulate_block(problem, kept, again) == figures


@settings(max_examples=60, deadline=None)
@given(problem=blocks(10))
def test_the_front_equals_brute_force(problem: BlockProblem) -> None:
    result = block_front(problem, timeout=600, points=10_000)
    assert result.complete
    assert result.proven
    assert {(o.kept_bytes, o.backward_peak, o.seconds) for o in result.options} == front(
        [measures(f) for _, f in ways(problem)]
    )
    for o in result.options:
        assert replay(problem, o.kept) == (o.kept_bytes, o.forward_peak, o.backward_peak, o.seconds)
        assert set(o.recomputed) == closure(problem, o.kept)
        assert o.entering_kept == sum(problem.nbytes[v] for v in o.kept & set(problem.entering))


@settings(max_examples=25, deadline=None)
@given(problem=blocks(8))
def test_z3_alone_finds_the_front_too(problem: BlockProblem) -> None:
    small, by_z3, by_search = layout(problem), Front(), Front()
    assert prove(small, by_z3, deadline=time.monotonic() + 600)
    assert search(small, by_search, room=10**6, deadline=time.monotonic() + 600)
    assert set(by_z3.points) == set(by_search.points)


def lying(monkeypatch: pytest.MonkeyPatch, when: Callable[[z3.Solver], bool]) -> list[z3.Solver]:
    """z3 answers with a model in which everything is kept, whatever was asked; returns the solvers that were
    asked.
    """
    asked = []

    def ask(solver: z3.Solver) -> tuple[z3.CheckSatResult, z3.ModelRef | None]:
        asked.append(solver)
        answer, model = ask_z3(solver)
        if answer != z3.sat or not when(solver):
            return answer, model
        names = [d for d in model if d.name()[0] in "kd" and d.name()[1:2].isdigit()]
        wrong = z3.Solver()
        wrong.add(*(d() if d.name()[0] == "k" else z3.Not(d()) for d in names))
        wrong.check()
        return answer, wrong.model()

    monkeypatch.setattr(prove_module, "ask", ask)
    return asked


def keeping_all(problem: BlockProblem) -> tuple[Layout, Front]:
    small, found = layout(problem), Front()
    found.add(*replayed(small, Grid(small), frozenset(range(len(small.names))))[:2])
    return small, found


def test_a_model_that_is_none_is_asked_for_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As z3 5.4 gave one for a block of T5: the front is still complete, and proven."""
    asked: list[z3.Solver] = []
    asked = lying(monkeypatch, lambda solver: solver is asked[0])
    small, by_z3 = keeping_all(chain_of_three())
    by_search = Front()
    assert prove(small, by_z3, deadline=time.monotonic() + 600)
    assert search(small, by_search, room=10**6, deadline=time.monotonic() + 600)
    assert set(by_z3.points) == set(by_search.points)
    assert len({id(solver) for solver in asked}) > 1


def test_where_no_model_is_one_nothing_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    lying(monkeypatch, lambda solver: True)
    assert not prove(*keeping_all(chain_of_three()), deadline=time.monotonic() + 600)


@pytest.mark.parametrize("odd", [0, 1], ids=["of a common unit", "of none"])
@settings(max_examples=10, deadline=None)
@given(problem=blocks(6))
def test_values_of_gigabytes_are_no_other_problem_to_z3(odd: int, problem: BlockProblem) -> None:
    """z3's pseudo-Boolean constraints take C ints, which the bytes of a block of GPT-3 are not."""
    large, by_z3, by_search = (
        replace(problem, nbytes={v: (b << 31) + odd for v, b in problem.nbytes.items()}),
        Front(),
        Front(),
    )
    assert prove(layout(large), by_z3, deadline=time.monotonic() + 600)
    assert search(layout(large), by_search, room=10**6, deadline=time.monotonic() + 600)
    assert set(by_z3.points) == set(by_search.points)


def test_a_transformer_block_is_complete_proven_and_thinned() -> None:
    problem = transformer_block()
    whole = block_front(problem, timeout=300, points=10_000)
    assert whole.complete
    assert whole.proven
    assert len(whole.options) == whole.found > 40
    thin = thinned(list(whole.options), 12)
    assert len(thin) == 12
    assert set(thin) <= set(whole.options)
    for measure in ("seconds", "kept_bytes", "backward_peak"):
        assert min(getattr(o, measure) for o in thin) == min(getattr(o, measure) for o in whole.options)
    assert thin[0] == whole.options[0]
    assert thin[0].label == "keep all"


def test_a_large_block_gets_valid_options_within_its_time() -> None:
    one = transformer_block()

    def named(o: str, i: int) -> str:
        return f"y{i - 1}" if o == "x" and i else "x" if o == "x" else f"{o}{i}"

    ops, steps, nbytes = [], [], {"x": one.nbytes["x"]}
    for i in range(4):
        nbytes.update({named(v, i): b for v, b in one.nbytes.items() if v != "x"})
        for op in one.forward:
            names = {
                "reads": tuple(named(v, i) for v in op.reads),
                "makes": tuple(named(v, i) for v in op.makes),
            }
            ops.append(replace(op, name=f"{op.name}{i}", **names))
        part = [
            replace(s, name=f"{s.name}_{i}", reads=tuple(named(v, i) for v in s.reads)) for s in one.backward
        ]
        steps = part + steps
    problem = BlockProblem(
        nbytes=nbytes,
        entering=("x",),
        leaving=("y3",),
        forced=frozenset(),
        forward=tuple(ops),
        backward=tuple(steps),
    )
    assert len(nbytes) > 100
    options = block_front(problem, timeout=1.0).options
    assert 3 <= len(options) <= 40  # the default
    assert options[0].seconds == 0
    for o in options:
        assert simulate_block(problem, o.kept, o.recomputed) == (
            o.kept_bytes,
            o.forward_peak,
            o.backward_peak,
            o.seconds,
        )
    assert min(o.kept_bytes for o in options) < options[0].kept_bytes / 5


def test_a_front_is_looked_for_once_but_an_incomplete_one_again_with_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []

    def found(problem: BlockProblem, timeout: float, *rest: Any) -> block.BlockFront:
        given.append(timeout)
        return replace(whole, proven=timeout > 5)

    problem = chain_of_three()
    whole = block_front(problem, timeout=60)
    assert block_front(chain_of_three(), timeout=600) is whole
    monkeypatch.setattr(block, "_found", found)
    monkeypatch.setattr(block, "_known", {})
    for timeout in (2.0, 1.0, 2.0, 4.0, 8.0, 16.0):
        block_front(problem, timeout=timeout)
    assert given == [2.0, 4.0, 8.0]
    block_front(problem, timeout=1.0, points=3)
    block_front(replace(problem, forced=frozenset({"b"})), timeout=1.0)
    assert given == [2.0, 4.0, 8.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nbytes": {"x": 1, "a": 1, "b": 1}}, "'c'"),
        ({"nbytes": {"x": 1, "a": 1, "b": 1, "c": 1, "d": 1}}, "neither entering nor made"),
        ({"nbytes": {"x": -1, "a": 1, "b": 1, "c": 1}}, "-1 bytes"),
        ({"entering": ("x", "a")}, "named 'a'"),
        ({"forced": frozenset({"z"})}, "'z'"),
        ({"backward": (BackwardStep(name="s", reads=("z",), live=0),)}, "backward step 's' reads 'z'"),
        ({"backward": (BackwardStep(name="s", reads=(), live=0),) * 2}, "Two backward steps"),
        ({"forward": tuple(reversed(chain_of_three().forward))}, "before it is made"),
        ({"forward": (Op(name="o", reads=("x",), makes=("a", "b", "c"), seconds=float("nan")),)}, "nan"),
    ],
)
def test_a_block_that_contradicts_itself_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        block_front(replace(chain_of_three(), **change))


@pytest.mark.parametrize(
    ("kept", "again", "words"),
    [
        ({"x"}, (), "neither kept nor recomputed"),
        ({"x", "a"}, ("make_b", "nothing"), "No operator of the block is named 'nothing'"),
        ({"x", "a", "b"}, ("make_c",), "nothing reads"),
        ({"x", "q"}, (), "'q'"),
    ],
)
def test_an_impossible_way_is_refused(kept: set[str], again: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        simulate_block(chain_of_three(), kept, again)


@pytest.mark.parametrize("arguments", [{"timeout": 0.0}, {"timeout": float("nan")}, {"points": 2}])
def test_bad_arguments_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="timeout"):
        block_front(chain_of_three(), **arguments)


@pytest.mark.parametrize("again", ["at other prices", "with more time"])
def test_what_was_leanest_stays_an_option_when_the_time_is_up(
    again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that was named as feasible rests on it."""
    for known in ("_known", "_leanest"):  # what is spoiled below is not for the tests that follow
        monkeypatch.setattr(block, known, {})
    problem = transformer_block()
    before = block_front(problem, timeout=5.0)
    monkeypatch.setattr(block, "search", lambda *args, **kwargs: False)
    monkeypatch.setattr(block, "prove", lambda *args, **kwargs: False)
    if again == "at other prices":
        problem = replace(
            problem, forward=tuple(replace(op, seconds=1.25 * op.seconds) for op in problem.forward)
        )
        after = block_front(problem, timeout=5.0)
    else:
        for key, (given_seconds, front_found) in block._known.items():
            block._known[key] = given_seconds, replace(front_found, proven=False, complete=False)
        after = block_front(problem, timeout=6.0)
    for wanted in before.options:
        assert any(
            o.kept_bytes <= wanted.kept_bytes and o.backward_peak <= wanted.backward_peak
            for o in after.options
        )
    assert min(o.forward_peak for o in after.options) <= min(o.forward_peak for o in before.options)
