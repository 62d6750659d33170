"""The search over strategies against solving and simulating every one of them."""

import pytest
from parallel_models import problem

from effcompile.core.errors import InfeasibleError, UsageError
from effcompile.ir.strategy import Strategy
from effcompile.planner.parallel.division import Division
from effcompile.planner.parallel.fewest import fewest, leanest
from effcompile.planner.parallel.search import divisors, search, strategies
from effcompile.planner.parallel.tell import tell


@pytest.mark.parametrize(("devices", "batch", "layers"), [(8, 16, 12), (64, 64, 24)])
def test_no_strategy_that_is_solved_and_simulated_is_faster(devices, batch, layers):
    """Regret.

    Fewer options than there are, for the time's sake; `benchmarks/parallel.py regret` takes them all.
    """
    asked, given = problem(devices=devices, batch=batch, layers=layers), {"micro_batch": 2, "offload": "none"}
    found = search(asked, given)
    assert found.best is not None
    room, best = int(asked.memory / 1.1), float("inf")
    for strategy in strategies(asked, given):
        try:
            best = min(best, Division(problem=asked, strategy=strategy).solve(room).seconds)
        except InfeasibleError:
            continue
    assert found.best.seconds <= best * 1.01
    assert found.bound <= best + 1e-9
    assert found.best.peak_bytes <= room


def test_what_is_given_is_kept_and_the_rest_is_free():
    found = search(problem(devices=16, batch=32), {"tp": 2, "pp": 2, "zero": 1})
    assert found.best is not None
    assert (found.best.strategy.tp, found.best.strategy.pp, found.best.strategy.zero) == (2, 2, 1)
    assert found.best.strategy.world == 16
    assert all(s.strategy.tp == 2 for s in found.runners_up)


def test_every_strategy_is_of_the_devices_and_divides_the_batch():
    asked = problem(devices=8, batch=12, layers=6)
    every = list(strategies(asked, {}))
    assert len(set(every)) == len(every)
    for strategy in every:
        assert strategy.world == 8
        assert strategy.micro_batches(12) >= 1
        assert sum(strategy.layers(6)) == 6
    assert {s.pp for s in every} <= set(divisors(8))


def test_an_engine_s_rules_are_searched_as_axes():
    found = search(problem(devices=8, batch=16), {"engine": "fsdp2"})
    assert found.best is not None
    assert found.best.strategy.recompute in ("none", "op", "layer", "full")


def test_parts_add_up_to_the_step_and_ledgers_to_the_peak():
    asked = problem(devices=16, batch=32, layers=48)
    found = search(asked, {"pp": 4})
    assert found.best is not None
    assert sum(found.best.parts.values()) == pytest.approx(found.best.seconds)
    told = tell(asked, found.best, found, asked.memory, None, ())
    assert len(told.ranks) == 16
    assert max(rank.peak_bytes for rank in told.ranks) == told.peak_bytes == told.ranks[told.rank].peak_bytes
    for stage in told.stages:
        assert sum(stage.parts.values()) == pytest.approx(stage.peak_bytes, abs=64)
        assert sum(h.layers for h in stage.held) == sum(end - begin for begin, end in stage.layers)
    assert max(told.memory) == pytest.approx(told.peak_bytes, rel=0.05)


def test_too_little_memory_names_the_leanest_and_the_fewest_devices():
    asked = problem(devices=1, batch=8, layers=96)
    found = search(asked, {"offload": "none"})
    assert found.best is None
    assert found.nearest is not None
    lean = found.nearest.lean()
    assert lean.peak_bytes > asked.memory
    enough = fewest(lambda n: problem(devices=n, batch=8, layers=96), 8, {"offload": "none"}, asked.memory)
    assert enough is not None
    assert enough > 1
    there = leanest(problem(devices=enough, batch=8, layers=96), {"offload": "none"})
    assert there is not None
    assert there.leanest <= asked.memory / 1.1


def test_nothing_that_divides_is_an_error_with_what_does():
    with pytest.raises(UsageError, match=r"^No strategy divides 7 devices, .*micro_batch divide the batch"):
        search(problem(devices=7, batch=8, layers=4), {})
    with pytest.raises(UsageError, match="no such strategy divides 8 devices"):
        search(problem(devices=8, batch=16), {"dp": 3})
    with pytest.raises(UsageError, match="no such arithmetic"):
        search(problem(devices=8, batch=16, target="a100-80gb"), {"precision": "fp8"})


def test_keeping_and_gathering_again_compete_with_activations():
    """Where the link is slow and memory there, gathered weights are kept; on less memory they are gathered
    again.
    """
    division = Division(problem=problem(devices=8, batch=8), strategy=Strategy(dp=8, zero=3))
    (rank,) = division.ranks
    kinds = {way.gathered for way in rank.options[0, "planned"]}
    assert kinds == {True, False}
    loose = rank.choose(None)
    tight = rank.choose(int(rank.leanest * 1.05))
    assert (
        sum(way.gathered for way in tight.ways) <= sum(way.gathered for way in loose.ways)
        or not loose.ways[0].gathered
    )
