"""A rank's choice against every choice, and the closed form's bytes against sums written out."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_models import model, problem

from effcompile.core.errors import InfeasibleError
from effcompile.ir.strategy import Strategy
from effcompile.planner.parallel import bytes as held
from effcompile.planner.parallel.allot import allot
from effcompile.planner.parallel.division import Division
from effcompile.planner.parallel.rank import GAP

OPTION = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)).map(
    lambda o: (o[0], o[0] + o[1], float(o[2]))
)


def brute(options, layers, copies, budget):
    """The fewest seconds over all choices in all places."""
    best = None
    for choice in product(options, repeat=layers):
        total, before, fits = sum(o[0] for o in choice), 0, True
        for kept, peak, _ in choice:
            fits &= (copies - 1) * total + before + peak <= budget
            before += kept
        if fits and (best is None or sum(o[2] for o in choice) < best):
            best = sum(o[2] for o in choice)
    return best


@settings(max_examples=150, deadline=None)
@given(st.lists(OPTION, min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 90))
def test_labels_find_what_every_choice_finds(options, layers, copies, budget):
    found = allot(options, layers, copies, budget)
    best = brute(options, layers, copies, budget)
    assert (found is None) == (best is None)
    if found is not None:
        assert found.complete
        assert sum(options[i][2] for i in found.choice) == best
        assert brute([options[i] for i in found.choice], 0, copies, budget) == 0
        total, before = sum(options[i][0] for i in found.choice), 0
        for i in found.choice:
            assert (copies - 1) * total + before + options[i][1] <= budget
            before += options[i][0]


@pytest.mark.parametrize(
    "strategy",
    [Strategy(dp=8, zero=3), Strategy(dp=2, pp=4, zero=1), Strategy(dp=2, tp=2, pp=2, sp=True, zero=1)],
)
def test_a_rank_s_choice_is_the_best_of_all(strategy):
    """4 or 2 layers a rank: every choice is looked at by hand, at budgets from the leanest to where all is
    kept.
    """
    asked = problem(layers=4 if strategy.pp == 1 else 8, batch=16)
    rank = Division(problem=asked, strategy=strategy).ranks[0]
    loose = rank.choose(None).peak
    for part in (0.0, 0.3, 0.6, 0.9):
        budget = int(rank.leanest + part * (loose - rank.leanest))
        seconds = []
        for choice in product(*(range(len(rank.options[kind])) for kind in rank.kinds)):
            taken = rank.taken(choice, bound=0.0)
            seconds += [taken.seconds] if taken.peak <= budget else []
        try:
            found = rank.choose(budget)
        except InfeasibleError:
            assert not seconds
            continue
        assert found.peak <= budget
        assert found.bound - 1e-12 <= min(seconds) <= found.seconds + 1e-12
        assert found.seconds <= min(seconds) + GAP * rank.seconds + 1e-12
        assert (rank.least_extra(budget) or 0.0) <= min(seconds) + 1e-12


def test_states_of_zero_are_those_of_its_paper():
    """Rajbhandari et al. 2020, §3, with gradients summed in fp32: 18, 6 + 12 / D, 2 + 16 / D, 16 / D bytes a
    parameter.
    """
    of, each = model(), {}
    for zero in range(4):
        strategy = Strategy(dp=8, zero=zero)
        place = held.place(of, strategy, 0)
        found = held.standing(of, strategy, place)
        each[zero] = sum(found[name] for name in (held.WEIGHTS, held.GRADIENTS, held.STATES)) / of.parameters
    assert each == pytest.approx({0: 18, 1: 6 + 12 / 8, 2: 2 + 16 / 8, 3: 16 / 8})


def test_every_layer_is_held_once_and_ends_by_their_stages():
    for strategy in (
        Strategy(pp=4),
        Strategy(pp=4, vpp=2, schedule="interleaved"),
        Strategy(pp=2, cuts=(20, 12)),
    ):
        places = [held.place(model(), strategy, r) for r in range(strategy.pp)]
        assert sorted(i for place in places for i in place.layers) == list(range(32))
        assert [place.first for place in places] == [r == 0 for r in range(strategy.pp)]
        assert sum(sum(held.parameters(model(), strategy, place)) for place in places) == model().parameters


def test_fsdp_under_a_pipeline_keeps_whole_gradients():
    place = held.place(model(), Strategy(dp=4, pp=2, zero=3, engine="fsdp2"), 0)
    alone = held.standing(
        model(), Strategy(dp=4, zero=3, engine="fsdp2"), held.place(model(), Strategy(dp=4, zero=3), 0)
    )
    piped = held.standing(model(), Strategy(dp=4, pp=2, zero=3, engine="fsdp2"), place)
    p = sum(held.parameters(model(), Strategy(dp=4, pp=2, zero=3), place))
    assert piped[held.GRADIENTS] == pytest.approx(4 * p / 4 + 4 * p)
    assert piped[held.BUFFERS] > alone[held.BUFFERS]
