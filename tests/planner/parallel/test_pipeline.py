"""The pipeline's simulator against a brute-force one that shares no code: a clock that ticks."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effcompile.ir.strategy import Strategy
from effcompile.planner.parallel.bytes import in_flight
from effcompile.planner.parallel.pipeline import least_seconds, simulate


def ticking(
    orders: list[list[tuple[str, int, int]]], forward: list[int], backward: list[int], hop: int
) -> tuple[int, list[int]]:
    """Whole seconds one by one: each rank starts its next task when what it reads has come. (end, most held
    by each rank).
    """
    stages, now, done = len(forward), 0, {}
    at, busy, held, most = [0] * len(orders), [0] * len(orders), [0] * len(orders), [0] * len(orders)
    while any(a < len(order) for a, order in zip(at, orders, strict=True)) or any(b > now for b in busy):
        for rank, order in enumerate(orders):
            if busy[rank] > now or at[rank] == len(order):
                continue
            what, stage, i = order[at[rank]]
            reads = []
            if what == "F":
                reads = [("F", stage - 1, i, hop)] if stage else []
            else:
                reads = [("F", stage, i, 0)] + ([("B", stage + 1, i, hop)] if stage + 1 < stages else [])
            if all((w, s, j) in done and done[w, s, j] + wait <= now for w, s, j, wait in reads):
                busy[rank] = done[what, stage, i] = now + (forward if what == "F" else backward)[stage]
                held[rank] += 1 if what == "F" else -1
                most[rank] = max(most[rank], held[rank])
                at[rank] += 1
        now += 1
        assert now < 10_000, "the schedule waits for itself"
    return max(busy), most


def by_hand(kind: str, p: int, rank: int, m: int) -> list[tuple[str, int, int]]:
    """1F1B and GPipe, written from their papers."""
    if kind == "gpipe":
        return [("F", rank, i) for i in range(m)] + [("B", rank, i) for i in range(m)]
    tasks, f, b = [], 0, 0
    while b < m:
        if f < m and f - b < p - rank:
            tasks.append(("F", rank, f))
            f += 1
        else:
            tasks.append(("B", rank, b))
            b += 1
    return tasks


SECONDS = st.integers(1, 6)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 5), st.integers(1, 7), st.integers(0, 2), st.data())
def test_a_step_is_the_ticking_clock_s(kind, p, m, hop, data):
    forward = data.draw(st.lists(SECONDS, min_size=p, max_size=p))
    backward = data.draw(st.lists(SECONDS, min_size=p, max_size=p))
    strategy = Strategy(pp=p, schedule=kind)
    line = simulate(strategy, m, forward, backward, hop)
    end, most = ticking([by_hand(kind, p, r, m) for r in range(p)], forward, backward, hop if p > 1 else 0)
    assert line.seconds == end
    assert list(line.held) == most == [in_flight(strategy, r, m) for r in range(p)]
    assert least_seconds(strategy, m, forward, backward, hop if p > 1 else 0) <= line.seconds


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (3, 4, 9)])
def test_interleaving_has_a_bubble_of_a_v_th(p, v, m):
    """Narayanan et al. 2021, §2.2: the bubble is (p − 1) / (v · m) of the work; 1 + (p − 1) / (p · v) times
    1F1B's p are held.
    """
    strategy = Strategy(pp=p, vpp=v, schedule="interleaved")
    line = simulate(strategy, m, [1.0] * (p * v), [2.0] * (p * v), 0.0)
    work = Fraction(3 * v * m)
    assert line.seconds == pytest.approx(float(work * (1 + Fraction(p - 1, v * m))))
    assert line.held[0] == pytest.approx(p * (1 + (p - 1) / (p * v)))
    assert list(line.held) == pytest.approx([in_flight(strategy, r, m) for r in range(p)])
    tasks = [(t.what, t.stage, t.micro_batch) for rank in line.ranks for t in rank]
    assert sorted(tasks) == sorted((w, s, i) for w in "FB" for s in range(p * v) for i in range(m))


def test_zero_bubble_is_shorter_and_holds_no_more_than_pp():
    plain = simulate(Strategy(pp=4), 8, [1.0] * 4, [2.0] * 4, 0.0)
    zero = simulate(Strategy(pp=4, schedule="zero-bubble"), 8, [1.0] * 4, [2.0] * 4, 0.0)
    assert zero.seconds < plain.seconds
    assert max(zero.held) <= 4
    for rank in zero.ranks:
        assert all(a.end <= b.start for a, b in pairwise(rank))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(2, 2), (3, 2), (2, 3)]), st.integers(1, 3), st.data())
def test_no_order_takes_less_than_the_bound(pv, groups, data):
    p, v = pv
    forward = data.draw(st.lists(SECONDS, min_size=p * v, max_size=p * v))
    backward = data.draw(st.lists(SECONDS, min_size=p * v, max_size=p * v))
    strategy = Strategy(pp=p, vpp=v, schedule="interleaved")
    assert (
        least_seconds(strategy, p * groups, forward, backward, 1)
        <= simulate(strategy, p * groups, forward, backward, 1).seconds
    )
