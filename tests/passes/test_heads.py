"""The forms of a step: which loss heads and gradients in place are proposed, and that each is the
same step.
"""

import pytest
from step_helpers import assert_equal, eager, joint_step, run, tiny
from train_helpers import forms_of, skips

from effcompile.capture import capture_training
from effcompile.core.errors import FormatError
from effcompile.passes.training.base import Case, StepChoice, StepOption
from effcompile.passes.training.heads import LossHeads
from effcompile.passes.training.loss_head import find_loss_heads
from effcompile.report.reasons import words


@pytest.fixture(scope="module")
def gpt2() -> tuple:
    model, batch = tiny("gpt2", batch=2, length=100)
    return model, batch, joint_step(model, batch)


def chunks(forms: list[Case]) -> set[object]:
    return {form.taken[0].option.settings["chunks"] for form in forms if form.taken[0].changes}


def test_the_step_as_captured_comes_first_and_every_form_is_the_same_step(gpt2: tuple) -> None:
    model, batch, step = gpt2
    forms, declined = forms_of(step, LossHeads())
    assert (
        forms[0].step is step
        and forms[0].options == {"loss head": "whole"}
        and forms[0].label == "as captured"
    )
    assert len(forms) > 1 and not declined
    wanted = eager(model, batch)
    (first,) = forms[0].taken
    assert first.choice.site == find_loss_heads(step)[0].site
    for form in forms:
        (chosen,) = form.taken
        assert_equal(run(form.step, model, batch), wanted, 1e-5)
        assert chosen.choice == first.choice
        if form is not forms[0]:
            count = chosen.option.settings["chunks"]
            assert count > 1 and form.label.startswith(f"loss head {count} chunks")
            assert chosen.option.settings["form"] in ("chunked", "rechunked") and not find_loss_heads(
                form.step
            )


@pytest.mark.parametrize("asked", [2, 3, 1000])
def test_chunks_can_be_asked_for_and_the_nearest_number_is_taken(gpt2: tuple, asked: int) -> None:
    counts = find_loss_heads(gpt2[2])[0].chunk_counts
    assert chunks(forms_of(gpt2[2], LossHeads(chunks=asked))[0]) == {
        min(counts, key=lambda count: abs(count - asked))
    }


def test_small_logits_are_not_cut_further_than_asked(gpt2: tuple) -> None:
    counts = find_loss_heads(gpt2[2])[0].chunk_counts
    assert chunks(forms_of(gpt2[2], LossHeads())[0]) == {min(counts)}


def test_tied_gradients_are_summed_in_place_unless_that_is_switched_off(gpt2: tuple) -> None:
    for summed in (True, False):
        forms, _ = forms_of(gpt2[2], LossHeads(in_place=summed))
        assert len(forms) > 1 and all(
            form.taken[0].option.settings["in_place"] is summed for form in forms[1:]
        )
        writes = [
            any("add_" in str(node.target) or "_into" in str(node.target) for node in form.step.graph.nodes)
            for form in forms[1:]
        ]
        assert all(wrote is summed for wrote in writes)


def test_a_step_without_a_head_to_change_says_why_and_still_sums_in_place() -> None:
    model, batch = tiny("gpt2", batch=1, length=8)
    step = joint_step(model, batch)
    forms, declined = forms_of(step, LossHeads())
    assert [form.options for form in forms] == [{"loss head": "whole"}, {"loss head": "gradients in place"}]
    assert declined and all(d.by == "loss_head" and d.reason for d in declined)
    assert_equal(run(forms[1].step, model, batch), eager(model, batch), 1e-5)
    assert len(forms_of(step, LossHeads(in_place=False))[0]) == 1


def test_a_model_that_is_no_language_model_has_one_form() -> None:
    model, batch = skips()
    (form,), _ = forms_of(capture_training(model, (), batch), LossHeads())
    assert form.taken == ()


def test_an_option_that_was_refuted_is_declined_with_the_reason(gpt2: tuple) -> None:
    every, _ = forms_of(gpt2[2], LossHeads())
    refuted = every[-1].taken[0].option.name
    forms, declined = forms_of(gpt2[2], LossHeads(), **{"loss head": refuted})
    assert [form.taken[0].option.name for form in forms] == [form.taken[0].option.name for form in every[:-1]]
    assert [(d.option, words(d.reason)) for d in declined] == [(refuted, "it was run, and did not hold")]


@pytest.mark.parametrize(
    "settings", [{"form": "chunked", "chunks": 3}, {"form": ("whole",), "chunks": 2}, {}]
)
def test_a_head_that_the_step_cannot_have_is_refused(gpt2: tuple, settings: dict) -> None:
    option = StepOption(name="some", settings={**settings, "in_place": True})
    assert 3 not in find_loss_heads(gpt2[2])[0].chunk_counts
    with pytest.raises(FormatError, match="Plan again"):
        LossHeads().apply(
            Case(step=gpt2[2]),
            StepChoice(site="lm_head", kind="loss head", baseline="whole", options=(option,)),
            option,
        )
