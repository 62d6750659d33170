"""The mechanics of benchmarks/sparse_training.py, on a model of seconds: what is matched, trained, judged and
said.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import sparse_training as bench
from _masked_bytes import MASK

SETUP = replace(bench.SHORT, steps=8, updates=3, prune_ratio=0.5, execution="masked")


@pytest.fixture(scope="module")
def flops() -> float:
    return bench.sparse_flops(SETUP)


def test_the_dense_model_is_the_narrowest_that_costs_as_much(flops: float) -> None:
    width = bench.matched_width(SETUP, flops)
    assert width < SETUP.width
    assert bench.step_flops(SETUP, width) >= flops > bench.step_flops(SETUP, width - 2 * SETUP.heads)


@pytest.mark.parametrize(
    "variant",
    [bench.Variant(), bench.Variant(block=4), bench.Variant(block=4, moving=False)],
    ids=lambda v: v.name,
)
def test_a_run_trains_and_is_the_same_again(variant: bench.Variant, flops: float) -> None:
    result = bench.run(SETUP, variant, 0, flops)
    assert 1 < result.loss < 6
    assert 0.8 * flops < result.flops < 1.5 * flops
    if variant.block:
        assert (result.explored > 0.15) == variant.moving
    assert bench.run(SETUP, variant, 0, flops).loss == result.loss
    assert bench.run(SETUP, variant, 1, flops).loss != result.loss


def test_training_lowers_the_loss(flops: float) -> None:
    short, long = (
        bench.run(replace(SETUP, steps=steps), bench.Variant(block=4), 0, flops).loss for steps in (4, 40)
    )
    assert long < short


def test_masked_bytes_are_the_ones_to_find() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    tokens, chosen, wanted = bench.batch_of(text, SETUP, 64, torch.Generator().manual_seed(0))
    true = tokens.clone().scatter(1, chosen, wanted)
    # with the answers put in, it is the text again
    assert torch.equal(true.diff(dim=1), torch.ones_like(true[:, 1:]))
    shown = tokens.gather(1, chosen)
    assert 0.7 < float((shown == MASK).float().mean()) < 0.9
    assert chosen.shape[1] == round(0.15 * SETUP.context)


def result(variant: str, loss: float, seed: int, flops: float = 1e9) -> bench.Result:
    return bench.Result(
        variant=variant,
        seed=seed,
        loss=loss,
        flops=flops,
        width=8,
        explored=0.5,
        execution="masked",
        seconds=1.0,
    )


def test_verdicts_follow_the_figures() -> None:
    losses = {
        "dense": [2.0, 2.1],
        "dense 2×": [1.8, 1.9],
        "dynamic 1": [1.5, 1.52],
        "dynamic 4": [2.0, 2.12],
        "static 1": [1.2, 1.22],
    }
    results = [
        result(name, loss, seed, 2e9 if "2×" in name else 1e9)
        for name, found in losses.items()
        for seed, loss in enumerate(found)
    ]
    said = "\n".join(bench.verdicts(results))
    assert "dynamic 1 beats the matched dense model: agrees (+0.5400" in said
    assert "dynamic 4 beats the matched dense model: open" in said
    assert "moving beats static in blocks of 1: DISAGREES (-0.3000" in said
    # 2^(0.54 / 0.2): as many doublings as the two dense models' line needs
    assert "blocks of 1: 6.50 (published 2.0)" in said
    assert "one seed: open" in "\n".join(bench.verdicts([r for r in results if r.seed == 0]))
    table = bench.table(SETUP, results)
    assert any(
        "dynamic 1" in line and "1.5100 ± 0.0141" in line and "+0.5400" in line and "2.160" in line
        for line in table
    )
