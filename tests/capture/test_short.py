"""Texts of one token, which plans that allow an error are calibrated and verified with."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from effcompile.capture import capture, short_texts, short_variants
from effcompile.core.goal import Goal
from effcompile.proof.verify import references, verify


class Attending(nn.Module):
    """Each token sees the mean of those that are none of the padding."""

    def __init__(self, *, deviates: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.deviates = nn.Embedding(64, 8), deviates

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        weight = attention_mask.unsqueeze(-1)
        mean = (x * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        return x - mean if self.deviates else x + mean


def given(batch: int = 2, length: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.arange(batch * length).reshape(batch, length)
    return {"input_ids": ids, "attention_mask": torch.ones(batch, length, dtype=torch.long)}


def test_each_row_is_another_token_of_the_example() -> None:
    ((_, kwargs),) = short_texts(capture(Attending(), (), given()), 8)
    # of both rows, from four places
    assert kwargs["input_ids"].tolist() == [[0], [8], [2], [10], [4], [12], [6], [14]]
    assert kwargs["attention_mask"].tolist() == [[1]] * 8


@pytest.mark.parametrize("side", ["left", "right"])
def test_no_row_is_a_pad(side: str) -> None:
    inputs = given()
    pads = slice(0, 4) if side == "left" else slice(4, 8)
    inputs["attention_mask"][0, pads] = 0
    inputs["input_ids"][0, pads] = 63
    ((_, kwargs),) = short_texts(capture(Attending(), (), inputs), 8)
    assert 63 not in kwargs["input_ids"]
    assert bool(kwargs["attention_mask"].all())


def test_a_batch_that_is_fixed_gives_several_calls() -> None:
    length = {1: torch.export.Dim("seq", min=1, max=64)}
    axes = {"input_ids": length, "attention_mask": length}
    found = short_texts(capture(Attending(), (), given(1), dynamic=axes), 4)
    assert [kwargs["input_ids"].tolist() for _, kwargs in found] == [[[0]], [[2]], [[4]], [[6]]]


def test_lengths_that_are_fixed_have_none() -> None:
    program = capture(Attending(), (), given(), dynamic=False)
    assert short_texts(program, 8) == []
    assert short_variants(program, 8) == []


def test_what_takes_no_single_token_is_cut_to_what_it_takes() -> None:
    class Halved(Attending):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            x = super().forward(input_ids, attention_mask).transpose(1, 2)
            return nn.functional.conv1d(x, torch.ones(1, 8, 3))

    found = short_variants(capture(Halved(), (), given()), 4)
    assert [name for name, _, _ in found] == ["short texts 4×4"]


def wrong_when_short(run: nn.Module):  # type: ignore[no-untyped-def]
    def lowered(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = run(input_ids=input_ids, attention_mask=attention_mask)
        return found * 1.2 if input_ids.shape[1] == 1 else found

    return lowered


def names_that_fail(model: nn.Module, goal: Goal) -> Sequence[str]:
    program = capture(model, (), given())
    checks = verify(wrong_when_short(program.module), program, references(program, model, goal), goal)
    return [check.name for check in checks if not check.passed]


def test_a_plan_that_is_wrong_for_short_texts_alone_is_found() -> None:
    assert names_that_fail(Attending(), Goal(max_error=0.1)) == ["short texts 8×1"]


def test_outputs_that_short_texts_have_none_of_prove_nothing() -> None:
    assert names_that_fail(Attending(deviates=True), Goal(max_error=0.1)) == []


def test_a_model_whose_weights_require_gradients_has_them() -> None:
    """Its attention lays the result out otherwise where gradients are recorded, so that views are none."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)
    program = capture(transformers.T5EncoderModel(config).eval(), (), given(1, 16))
    assert [name for name, _, _ in short_variants(program, 8)] == ["short texts 8×1", "short texts 8×2"]
