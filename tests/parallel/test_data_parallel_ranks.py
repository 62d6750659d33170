"""Each form of data parallelism on gloo ranks is training in one process, and the simulated peak is the
allocator's.
"""

from __future__ import annotations

import functools
import os

import pytest
from rank_helpers import (
    MODELS,
    STEPS,
    Inputs,
    OnRank,
    Trained,
    batch_of,
    run_rank,
    schedules,
    source_of,
    trained,
)
from torch import nn

from effcompile.ir.step import Step
from effcompile.passes.training.shard import BY_BLOCK, BY_WEIGHT, REPLICATED, spread_over
from effcompile.proof.parallel.processes import on_ranks

RELATIVE = 1e-5


#: In the form that has all collectives a tied table, an encoder beside a decoder, and experts. The rest,
#: whose weights lie as these do, where EFFCOMPILE_EVERY is set. One with a tied table in the other forms too.
MODELS_HERE = MODELS if os.environ.get("EFFCOMPILE_EVERY") else ("tied", "gpt2", "t5", "mixtral")
CASES = [(name, BY_BLOCK) for name in MODELS_HERE] + [("gpt2", form) for form in (REPLICATED, BY_WEIGHT)]


@functools.cache
def subject(name: str) -> tuple[nn.Module, Inputs, Step, Trained]:
    """A model captured once for all forms, and its training in one process."""
    (source, step), inputs = source_of(name), batch_of(name, 4)
    return source.model, inputs, step, trained(source.model, inputs)


def check(found: list[OnRank], wanted: Trained) -> None:
    for rank in found:
        assert rank.losses == pytest.approx(wanted.losses, rel=RELATIVE)
        assert max(rank.gradients)[0] < RELATIVE, rank.gradients
        assert max(rank.parameters)[0] < RELATIVE, rank.parameters
        assert rank.replicas_equal
        assert len(rank.peaks) == STEPS


@pytest.mark.parametrize(("name", "form"), CASES)
def test_ranks_train_as_one_process(name: str, form: str) -> None:
    """Losses, every gradient and every parameter over three steps: the first alone hides weights that are not
    tied or not averaged.
    """
    model, inputs, step, wanted = subject(name)
    made = list(schedules(spread_over(step, model, 2, form)))
    for _, cut, emitted in made if name == "gpt2" else made[1:]:
        found = on_ranks(run_rank, 2, model, inputs, cut, emitted, wanted, 2)
        check(found, wanted)
        for rank in found:
            assert max(rank.peaks) <= 1.02 * rank.predicted, (rank.peaks, rank.predicted)
            assert min(rank.peaks) >= 0.98 * rank.predicted, (rank.peaks, rank.predicted)
