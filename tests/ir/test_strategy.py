from itertools import product

import pytest

from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.ir.strategy import AXES, Strategy


def test_ranks_are_numbered_as_megatron_numbers_them():
    """Figure of Narayanan et al. 2021, §3 for 16 GPUs: tp neighbours are adjacent, pipeline neighbours
    furthest.
    """
    strategy = Strategy(dp=2, tp=2, pp=4)
    assert list(strategy.groups("tp"))[:2] == [(0, 1), (2, 3)]
    assert list(strategy.groups("dp"))[:2] == [(0, 2), (1, 3)]
    assert list(strategy.groups("pp")) == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]


@pytest.mark.parametrize(("dp", "tp", "pp", "cp"), product((1, 2, 3), (1, 2), (1, 3), (1, 2)))
def test_groups_of_an_axis_are_the_ranks_that_differ_there_only(dp, tp, pp, cp):
    strategy = Strategy(dp=dp, tp=tp, pp=pp, cp=cp)
    where = [strategy.coordinates(rank) for rank in range(strategy.world)]
    assert len({tuple(w.items()) for w in where}) == dp * tp * pp * cp
    for axis in AXES:
        groups = list(strategy.groups(axis))
        assert sorted(rank for group in groups for rank in group) == list(range(strategy.world))
        for group in groups:
            assert [where[rank][axis] for rank in group] == list(range(strategy.size(axis)))
            assert len({tuple(v for a, v in where[rank].items() if a != axis) for rank in group}) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tp": 0}, "tp = 0 must be a whole number"),
        ({"dp": 1.5}, "dp = 1.5"),
        ({"zero": 4}, "zero = 4 must be 0, 1, 2 or 3"),
        ({"precision": "int4"}, "fp32, bf16, fp16, fp8"),
        ({"vpp": 2, "schedule": "interleaved"}, "needs a pipeline"),
        ({"pp": 2, "schedule": "interleaved"}, "needs vpp ≥ 2"),
        ({"sp": True}, "needs tp ≥ 2"),
        ({"pp": 2, "schedule": "zero-bubble", "recompute": "full"}, "does not combine"),
        ({"pp": 2, "cuts": (1, 2, 3)}, "pp × vpp = 2 stages"),
    ],
)
def test_what_no_strategy_can_be_is_refused(given, said):
    with pytest.raises(UsageError, match=said):
        Strategy.of(**given)


def test_a_wrong_name_gets_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'micro_batch'"):
        Strategy.of(micro_batches=2)


def test_a_global_batch_that_does_not_divide_names_one_that_does():
    assert Strategy(dp=4, micro_batch=2).micro_batches(64) == 8
    with pytest.raises(UsageError, match=r"global_batch = 63 .* nearest that does is 64"):
        Strategy(dp=4, micro_batch=2).micro_batches(63)


def test_stages_are_even_unless_cuts_say_otherwise():
    assert Strategy(pp=4).layers(10) == (3, 3, 2, 2)
    assert Strategy(pp=2, cuts=(7, 3)).layers(10) == (7, 3)
    with pytest.raises(UsageError, match="more than the model's 3 layers"):
        Strategy(pp=4).layers(3)
    with pytest.raises(UsageError, match="the model has 9"):
        Strategy(pp=2, cuts=(7, 3)).layers(9)
