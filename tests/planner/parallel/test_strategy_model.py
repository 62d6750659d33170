import pytest

from effcompile.core.errors import UsageError
from effcompile.planner.parallel.strategy import Strategy, check_model

MODEL = {"layers": 8, "heads": 8, "key_heads": 4, "sequence": 128, "global_batch": 16}


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (Strategy(tp=7), r"does not divide the model's 8 heads. These do: 1, 2, 4, 8"),
        (Strategy(tp=8), r"4 key heads. These do: 1, 2, 4"),
        (Strategy(tp=3, engine="megatron"), "8 heads"),
        (Strategy(pp=9), "more than the model's 8 layers"),
        (Strategy(dp=3), "global_batch = 16 does not divide"),
        (Strategy(cp=3), "128 tokens does not divide into 6 pieces"),
    ],
)
def test_what_this_model_cannot_be_divided_into_is_refused(strategy, said):
    with pytest.raises(UsageError, match=said):
        check_model(strategy, **MODEL)


def test_megatron_repeats_key_heads_and_the_rest_divides():
    check_model(Strategy(tp=8, engine="megatron"), **MODEL)
    check_model(Strategy(dp=2, tp=4, pp=2, cp=2, sp=True), **MODEL)
