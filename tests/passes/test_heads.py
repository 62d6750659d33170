"""The forms of a step: which loss heads and gradients in place are proposed, and that each is the same step."""

import pytest
from step_helpers import assert_equal, eager, joint_step, run, tiny
from train_helpers import skips

from effcompile.capture import capture_training
from effcompile.passes.training.heads import LossHeads
from effcompile.passes.training.loss_head import find_loss_heads


@pytest.fixture(scope="module")
def gpt2() -> tuple:
    model, batch = tiny("gpt2", batch=2, length=100)
    return model, batch, joint_step(model, batch)


def test_the_step_as_captured_comes_first_and_every_form_is_the_same_step(gpt2: tuple) -> None:
    model, batch, step = gpt2
    variants = LossHeads().variants(step)
    assert variants[0].step is step and variants[0].option == "whole" and variants[0].label == "as captured"
    assert len(variants) > 1 and {v.option for v in variants[1:]} <= {"chunked", "rechunked"}
    wanted = eager(model, batch)
    for variant in variants:
        assert variant.head == variants[0].head != "" and variant.logits_bytes == find_loss_heads(step)[0].logits_bytes > 0
        assert_equal(run(variant.step, model, batch), wanted, 1e-5)
        if variant.option != "whole":
            assert (
                variant.chunks > 1
                and variant.label.startswith(f"loss head in {variant.chunks} chunks")
                and not find_loss_heads(variant.step)
            )


@pytest.mark.parametrize("asked", [2, 3, 1000])
def test_chunks_can_be_asked_for_and_the_nearest_number_is_taken(gpt2: tuple, asked: int) -> None:
    counts = find_loss_heads(gpt2[2])[0].chunk_counts
    taken = {variant.chunks for variant in LossHeads(chunks=asked).variants(gpt2[2])[1:]}
    assert taken == {min(counts, key=lambda count: abs(count - asked))}


def test_small_logits_are_not_cut_further_than_asked(gpt2: tuple) -> None:
    counts = find_loss_heads(gpt2[2])[0].chunk_counts
    assert {variant.chunks for variant in LossHeads().variants(gpt2[2])[1:]} == {min(counts)}


def test_tied_gradients_are_summed_in_place_unless_that_is_switched_off(gpt2: tuple) -> None:
    assert all(variant.in_place for variant in LossHeads().variants(gpt2[2])[1:])
    apart = LossHeads(in_place=False).variants(gpt2[2])
    assert not any(variant.in_place for variant in apart) and len(apart) > 1


def test_a_step_without_a_head_to_change_says_why_and_still_sums_in_place() -> None:
    model, batch = tiny("gpt2", batch=1, length=8)
    variants = LossHeads().variants(joint_step(model, batch))
    assert [v.label for v in variants] == ["as captured", "tied gradients in place"]
    assert all(v.declined == variants[0].declined for v in variants) and variants[0].declined
    assert [v.option for v in variants] == ["whole", "whole"]
    wanted = eager(model, batch)
    assert_equal(run(variants[1].step, model, batch), wanted, 1e-5)
    assert len(LossHeads(in_place=False).variants(joint_step(model, batch))) == 1


def test_a_model_that_is_no_language_model_has_one_form() -> None:
    model, batch = skips()
    (variant,) = LossHeads().variants(capture_training(model, (), batch))
    assert variant.option == variant.choice == "whole" and not variant.in_place
