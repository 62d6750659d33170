"""A step for several shapes: exact padding, what fits none, the last smaller batch, one plan.json, and how
lengths are chosen.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import effcompile
from effcompile.core.errors import FormatError, InputsError, UsageError
from effcompile.planner.buckets import bucket_lengths

PASSES = ["no-pointwise", "no-loss_head", "states.offload=false"]
SHAPES = [(4, 16), (4, 8)]


class Encoder(nn.Module):
    """Tokens mixed over the sequence, masked; the mean loss of those that have a label."""

    def __init__(self, masks: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)
        self.masks = masks

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.table(input_ids)
        weights = (
            attention_mask.float() if self.masks else torch.ones_like(attention_mask, dtype=torch.float32)
        )
        mean = (hidden * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1)
        return nn.functional.cross_entropy(
            self.head(hidden + self.mix(mean)[:, None]).flatten(0, 1), labels.flatten()
        )


def batch(rows: int, tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32, (rows, tokens), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.roll(1, -1)}


def made(model: nn.Module, **changes: Any) -> Any:
    asked = {"inputs": batch(4, 8), "mode": "training", "shapes": SHAPES, "passes": PASSES}
    return effcompile.optimize(model, **{**asked, **changes})


@pytest.fixture(scope="module")
def planned() -> Any:
    model = Encoder()
    return made(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), memory="1MiB")


@pytest.mark.parametrize("shape", [(4, 16), (4, 8), (3, 8), (4, 11), (1, 3)])
def test_loss_and_gradients_are_those_of_the_batch_itself(planned: Any, shape: tuple[int, int]) -> None:
    given = batch(*shape, seed=3)
    plain = Encoder()
    loss = plain(**given)
    loss.backward()
    planned.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = planned(**given)
        mine.backward()
    torch.testing.assert_close(mine, loss, rtol=1e-5, atol=0)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(planned.get_parameter(name).grad, value.grad, rtol=1e-4, atol=1e-7)
    planned.zero_grad()


def test_a_batch_that_fits_no_shape_runs_eagerly_with_a_word(planned: Any) -> None:
    given = batch(4, 24)
    with pytest.warns(UserWarning, match=r"batch of shape \(4, 24\): none of the planned shapes"):
        loss = planned(**given)
    torch.testing.assert_close(loss, planned.model(**given))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(**given)


def test_one_file_holds_all_plans(planned: Any, tmp_path: Path) -> None:
    planned.save(tmp_path)
    model = Encoder()
    again = made(model, plan=tmp_path / "plan.json", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert again.optimizer is not None
    assert [step.plan.peak_bytes for step in again.steps.values()] and set(again.steps) == set(SHAPES)
    with pytest.raises(FormatError, match="is of the shapes"):
        made(Encoder(), plan=tmp_path / "plan.json", shapes=[(4, 8)])


def test_every_shape_is_within_the_memory_with_the_states_beside(planned: Any) -> None:
    assert all((step.plan.peak_bytes or 0) <= 2**20 for step in planned.steps.values())


def test_a_model_that_looks_at_padding_is_not_padded_so() -> None:
    step = made(Encoder(masks=False), shapes=[(4, 8)])
    assert step.padding.rows and not step.padding.tokens
    with pytest.warns(UserWarning, match="by exact padding"):
        step(**batch(4, 7))


class Normed(Encoder):
    """Normed over the batch, and with dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.norm(self.table(input_ids).flatten(0, 1)).view(*input_ids.shape, -1)
        return nn.functional.cross_entropy(
            self.head(nn.functional.dropout(hidden, 0.2)).flatten(0, 1), labels.flatten()
        )


def test_padding_is_judged_as_the_model_trains() -> None:
    """In evaluation mode a batch norm does not see what was added; in training it does."""
    model = Normed()
    step = made(model, shapes=[(4, 8)])
    assert not step.padding.rows and not step.padding.tokens
    assert model.training and not model.norm.num_batches_tracked and model.norm.weight.grad is None


class Largest(Encoder):
    """The largest of all tokens in each place, which one more seldom changes where there are many."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.table(input_ids)
        return nn.functional.cross_entropy(
            self.head(hidden + hidden.amax(1, keepdim=True)).flatten(0, 1), labels.flatten()
        )


def test_padding_is_judged_where_much_is_added_to_little() -> None:
    given = batch(4, 8)
    given["input_ids"].clamp_(min=1)[:, -1] = 0  # what is added is there already, but not among the first few
    padding = made(Largest(), inputs=given, shapes=[(4, 8)]).padding
    assert padding.rows and not padding.tokens


def test_dropout_as_a_function_is_no_reason_against_padding() -> None:
    class Dropping(Encoder):
        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
        ) -> torch.Tensor:
            hidden = nn.functional.dropout(self.table(input_ids), 0.2)
            return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    padding = made(Dropping(), shapes=[(4, 8)]).padding
    assert padding.rows and padding.tokens


def test_the_best_lengths_of_a_histogram() -> None:
    """Against all selections of that many lengths."""
    draw = random.Random(0)
    for _ in range(20):
        lengths = [8 * draw.randint(1, 9) for _ in range(40)]
        found = bucket_lengths(lengths, worth=0.03)
        count = Counter(lengths)

        def waste(buckets: tuple[int, ...], count: Counter[int] = count) -> int:
            return sum(
                number * (min(b for b in buckets if b >= length) - length) for length, number in count.items()
            )

        known, tokens = sorted(count), sum(lengths)
        best = [
            min(waste((*some, known[-1])) for some in itertools.combinations(known[:-1], k))
            for k in range(min(8, len(known)))
        ]
        taken = 1
        while taken < len(best) and best[taken - 1] - best[taken] >= 0.03 * tokens:
            taken += 1
        assert len(found) == taken and waste(tuple(found)) == best[taken - 1]


def test_shapes_of_a_loader() -> None:
    loader = [batch(4, 8), batch(4, 7), batch(2, 16)]
    step = made(Encoder(), inputs=loader, shapes="auto")
    assert set(step.steps) == {(4, 8), (4, 16)}


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"shapes": []}, UsageError, "give a list of"),
        ({"shapes": [(4, 0)]}, UsageError, "give a list of"),
        ({"shapes": "some"}, UsageError, "give a list of"),
        ({"shapes": "auto"}, UsageError, "looks at a loader"),
        ({"shapes": "auto", "inputs": []}, InputsError, "gave no batch"),
        ({"mode": "inference"}, UsageError, "of a training step"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        made(Encoder(), **changes)
