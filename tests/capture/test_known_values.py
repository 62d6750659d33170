"""Inputs whose values a model's Python reads: fixed at the example's, refused where they are others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_once import programs_once
from torch import nn
from vision_language_models import asked, qwen, qwen3

import effcompile
from effcompile.capture import capture, verify_capture
from effcompile.capture.training import capture_training
from effcompile.core.errors import CaptureError, GuardError

SIZES = torch.tensor([3, 5])


def values_of(program: Any) -> dict[str, tuple[int, ...] | None]:
    return {spec.name: spec.values for spec in program.inputs}


class Pieces(nn.Module):
    """Cuts its input into pieces whose lengths are given as a tensor, as Qwen2-VL does its patches."""

    def __init__(self, join: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.join = nn.Linear(6, 6), join

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        for _ in range(int(sizes[0])):  # torch.export alone does not follow this
            x = self.layer(x)
        return self.join(x, sizes, flags)


def by_list(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return torch.cat([piece.softmax(0) for piece in x.split(sizes.tolist())])


def by_branch(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    return x.tanh() if (sizes > 3).any() else x


def by_repeats(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    starts = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))[:-1]
    place = torch.arange(len(x)) - starts.repeat_interleave(sizes)
    return x * place[:, None]


def by_mask(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    kept = x[flags]
    out = torch.zeros_like(x)
    out[flags] = kept.cumsum(0)
    return out + len(kept)


def by_size(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    grown: torch.Tensor = torch.nn.functional.interpolate(x[None, None], size=(sizes[0], sizes[1]))
    return grown[0, 0]


def by_writes(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    """A table that is written through a view with what follows from the input x is known no longer."""
    table = torch.zeros(8, dtype=torch.int64)
    table[:2] = sizes
    first, rest = table[:2].tolist(), table[2:]
    rest += (x[2:, 0] > 0).long()  # unknown
    return x[: first[0]] * table[: first[0], None]


@pytest.mark.parametrize(
    ("join", "fixed"),
    [
        (by_list, {"sizes"}),
        (by_branch, {"sizes"}),
        (by_repeats, {"sizes"}),
        (by_mask, {"flags", "sizes"}),
        (by_size, {"sizes"}),
        (by_writes, {"sizes"}),
    ],
)
def test_what_was_read_is_fixed_and_nothing_else(join: Any, fixed: set[str]) -> None:
    torch.manual_seed(0)
    model = Pieces(join).eval()
    given = (torch.randn(8, 6), SIZES, torch.tensor([True, False] * 4))
    program = capture(model, given)
    assert {name for name, values in values_of(program).items() if values is not None} == fixed
    assert all(check.passed for check in verify_capture(program, model))
    other = (-given[0], *given[1:])  # what is not known stays an input of the graph
    torch.testing.assert_close(program.module(*other), model(*other))
    assert any(
        "which the model's Python reads" in str(said) and "test_known" in str(said) for said in program.fixed
    )


def by_unknown(x: torch.Tensor, sizes: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    """What is written with something unknown may not be answered from what it was."""
    table = sizes.clone()
    seen = table.view(-1)
    table.mul_((x.sum() > 0).long())
    return x if seen.tolist()[0] else -x


def test_what_is_overwritten_is_not_answered_from_before() -> None:
    model = Pieces(by_unknown).eval()
    with pytest.raises(CaptureError, match="depends on the values in a tensor"):
        capture(model, (torch.randn(8, 6), SIZES, torch.ones(8, dtype=torch.bool)))


class Reader(nn.Module):
    """Reads its own tokens."""

    main_input_name = "ids"

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)[: int(ids.max())]


def test_a_plan_of_one_text_is_refused() -> None:
    with pytest.raises(CaptureError, match="depends on the values in a tensor"):
        capture(Reader().eval(), (torch.tensor([1, 2, 3, 2]),))


@pytest.fixture(scope="module")
def eager_qwen() -> Iterator[nn.Module]:
    """Captured once for the plans of it."""
    with programs_once():
        yield qwen().eval()


def test_images_and_text_are_planned_saved_and_held_to_their_grid(
    eager_qwen: nn.Module, tmp_path: Path
) -> None:
    model = eager_qwen
    planned = effcompile.optimize(model, asked(), backend="torch-eager")
    with torch.no_grad():
        torch.testing.assert_close(planned(**asked()).logits, model(**asked()).logits, rtol=1e-4, atol=1e-5)
        other = {**asked(), "input_ids": torch.where(asked()["input_ids"] < 90, 7, asked()["input_ids"])}
        torch.testing.assert_close(planned(**other).logits, model(**other).logits, rtol=1e-4, atol=1e-5)
    guarded = {guard.place: guard.expected for guard in planned.plan.guards}
    assert guarded["inputs['image_grid_thw'].values"] == "[1, 4, 4, 1, 4, 4]"
    assert guarded["inputs['input_ids'].values"] == "0 to 98"
    planned.save(tmp_path / "saved")
    opened = effcompile.load(tmp_path / "saved")
    torch.testing.assert_close(opened(**asked())["logits"], planned(**asked()).logits)
    for given in (asked((2, 8)), asked(at=5)):
        for forward in (planned, opened):
            with pytest.raises(GuardError, match="other values than when the plan was made"):
                forward(**given)


def test_other_grids_are_planned_anew_or_run_eagerly(eager_qwen: nn.Module) -> None:
    model = eager_qwen
    planned = effcompile.optimize(model, asked(), backend="torch-eager", on_change="eager")
    with torch.no_grad():
        torch.testing.assert_close(planned(**asked((2, 8))).logits, model(**asked((2, 8))).logits)


def test_calibration_of_another_grid_is_refused(eager_qwen: nn.Module) -> None:
    with pytest.raises(GuardError, match="calibration: image_grid_thw has other values"):
        effcompile.plan(eager_qwen, asked(), calibration=[asked((2, 8))], max_error=0.1)


def test_images_may_be_anywhere_in_a_text_whose_positions_are_given(tmp_path: Path) -> None:
    """Qwen3-VL looks for its images in the text: as many tokens as at the example, wherever they are."""
    model = qwen3(layers=1).eval()

    def given(at: int) -> dict[str, torch.Tensor]:
        inputs = asked(at=at)
        kinds, grid = inputs.pop("mm_token_type_ids"), inputs["image_grid_thw"]
        where, _ = model.model.get_rope_index(inputs["input_ids"], kinds, image_grid_thw=grid)
        return {**inputs, "position_ids": where}

    planned = effcompile.optimize(model, given(3), backend="torch-eager")
    guarded = {guard.place: guard.expected for guard in planned.plan.guards}
    assert guarded["inputs['image_grid_thw'].values"] == "[1, 4, 4, 1, 4, 4]"
    planned.save(tmp_path / "saved")
    opened = effcompile.load(tmp_path / "saved")
    fewer = given(3)
    fewer["input_ids"] = fewer["input_ids"].clone()
    fewer["input_ids"][0, 4] = 7
    with torch.no_grad():
        for at in (3, 6):
            wanted = model(**given(at)).logits
            torch.testing.assert_close(planned(**given(at)).logits, wanted, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(opened(**given(at))["logits"], wanted, rtol=1e-4, atol=1e-5)
        for forward in (planned, opened):
            with pytest.raises(GuardError, match="holds 98 7 times, and held it 8 times"):
                forward(**fewer)


#: What Qwen3-VL's step reads of its images, Qwen2-VL's reads too.
MODELS = [partial(qwen3, layers=1), *([qwen] if os.environ.get("EFFCOMPILE_EVERY") else [])]


@pytest.mark.parametrize("make", MODELS, ids=["qwen3", "qwen"][: len(MODELS)])
def test_training_on_images_is_the_models_own(make: Callable[[], nn.Module]) -> None:
    model = make().train()
    given = {**asked(), "labels": asked()["input_ids"]}
    planned = effcompile.optimize(model, given, mode="training", minimize="memory")
    wanted = torch.autograd.grad(model(**given).loss, list(model.parameters()), allow_unused=True)
    planned(**given).loss.backward()  # the model's own call before has left another object behind
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
    with pytest.raises(GuardError, match="other values than when the plan was made"):
        planned(**{**given, **asked((2, 8))})


class Counts(nn.Module):
    """Leaves behind what it saw, and reads it again or does not."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.layer, self.reads, self.last = nn.Linear(4, 4), reads, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).square().mean() + (self.last if self.reads else 0.0)
        self.last = loss.detach()
        return loss


def test_what_a_forward_leaves_behind_is_followed_only_where_it_is_read() -> None:
    model = Counts(reads=False)
    step = capture_training(model, (torch.ones(2, 4),))
    model(torch.ones(2, 4))
    assert step.state is not None
    step.state.check()
    with pytest.raises(CaptureError, match="reads it at the next call"):
        capture_training(Counts(reads=True), (torch.ones(2, 4),))
