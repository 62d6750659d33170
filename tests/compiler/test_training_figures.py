"""Operator figures kept between plans: taken only when they are ours; and the verification of a step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_helpers import skips

from effcompile.compiler import optimize_training
from effcompile.core.errors import VerificationError
from effcompile.core.goal import Goal
from effcompile.estimate import operators
from effcompile.estimate.operators import Measured
from effcompile.proof.training import verify
from effcompile.search.training.figures import figures_path, keep_figures, known_figures

ONE = {"aten.mm": Measured(seconds=0.5, workspace=64)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    return tmp_path


def test_figures_come_back_as_they_were(cache: Path) -> None:
    assert known_figures() == {}
    assert keep_figures(ONE) is None
    assert known_figures() == ONE and figures_path().parent == cache and len(list(cache.iterdir())) == 1


CHANGES: dict[str, Any] = {
    "not JSON": lambda text: "{" + text,
    "cut off": lambda text: text[: len(text) // 2],
    "bytes": lambda text: "\udcff",
    "empty": lambda text: "",
    "a list": lambda text: "[]",
    "another format": lambda text: text.replace("effcompile-operators", "other"),
    "another torch": lambda text: text.replace(torch.__version__, "1.0"),
    "other threads": lambda text: json.dumps({**json.loads(text), "threads": 999}),
    "negative seconds": lambda text: text.replace("0.5", "-0.5"),
    "negative workspace": lambda text: text.replace("64", "-64"),
    "seconds as text": lambda text: text.replace("0.5", '"fast"'),
    "no operators": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "operators"}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_corrupted_or_foreign_file_is_as_if_it_were_not_there(cache: Path, what: str) -> None:
    keep_figures(ONE)
    figures_path().write_bytes(CHANGES[what](figures_path().read_text()).encode(errors="surrogateescape"))
    assert known_figures() == {}
    assert keep_figures(ONE) is None and known_figures() == ONE


def test_a_folder_in_the_files_place_is_a_note(cache: Path) -> None:
    figures_path().mkdir(parents=True)
    assert known_figures() == {}
    note = keep_figures(ONE)
    assert note and "could not be kept" in str(note)


def test_figures_are_measured_once_and_then_taken_from_the_file(
    quick_training: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = skips()
    request = {"goal": Goal(mode="training"), "passes": ["no-pointwise"]}
    optimize_training(model, (), batch, **request)
    monkeypatch.setattr(operators, "_measure", lambda *_: pytest.fail("measured again"))
    optimize_training(model, (), batch, **request)


def test_a_cache_that_cannot_be_written_is_a_note(
    quick_training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path / "file" / "cache"))
    model, batch = skips()
    plan = optimize_training(model, (), batch, goal=Goal(mode="training"), passes=["no-pointwise"]).plan
    assert (
        plan.checks[0].passed
        and sum("operator times could not be kept" in str(note) for note in plan.notes) == 1
    )


# ------------------------------------------------------------------ verification


def result(loss: float = 1.0, **gradients: Any) -> verify.Result:
    made = {name: None if value is None else torch.tensor(value) for name, value in gradients.items()}
    return verify.Result(loss=torch.tensor(loss), gradients=made, peak_bytes=0)


def test_equal_steps_are_bit_identical() -> None:
    check = verify.compare(result(w=[1.0, 2.0], v=None), result(w=[1.0, 2.0], v=None), None)
    assert check.passed and str(check.note) == "bit-identical" and check.error == 0


@pytest.mark.parametrize(
    ("found", "wanted", "where"),
    [
        (result(1.1, w=[1.0]), result(1.0, w=[1.0]), "loss"),
        (result(w=[1.0, 2.1], v=[1.0]), result(w=[1.0, 2.0], v=[1.0]), "w"),
        (result(w=[1.0], v=None), result(w=[1.0], v=[1.0]), "v"),
        (result(w=[1.0], v=[1.0]), result(w=[1.0], v=None), "v"),
        (result(w=[1.0]), result(w=[1.0], v=[1.0]), "v"),
        (result(w=[float("nan")], v=[1.0]), result(w=[1.0], v=[1.0]), "w"),
        (result(float("nan"), w=[1.0]), result(1.0, w=[1.0]), "loss"),
        (result(w=[float("inf")]), result(w=[1.0]), "w"),
    ],
)
def test_a_difference_does_not_pass_and_is_named(
    found: verify.Result, wanted: verify.Result, where: str
) -> None:
    check = verify.compare(found, wanted, None)
    assert not check.passed and str(check.note) == f"largest at {where}"


def test_rounding_passes_and_so_does_a_gradient_that_is_zero_but_for_it() -> None:
    assert verify.compare(result(w=[1.0 + 1e-6]), result(w=[1.0]), None).passed
    assert verify.compare(result(w=[1e5], b=[1e-7]), result(w=[1e5], b=[-1e-7]), None).passed
    assert not verify.compare(result(w=[1.0], b=[0.5]), result(w=[1.0], b=[-0.5]), None).passed
    assert verify.compare(result(w=[1.005]), result(w=[1.0]), 0.01).passed


def test_autocast_rounds_whatever_the_gradients_own_dtype() -> None:
    assert not verify.compare(result(w=[1.005]), result(w=[1.0]), None).passed
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert verify.compare(result(w=[1.005]), result(w=[1.0]), None).passed
        assert not verify.compare(result(w=[1.05]), result(w=[1.0]), None).passed


def test_what_is_not_a_number_in_the_model_itself_is_told() -> None:
    with pytest.raises(VerificationError, match="own loss is nan"):
        verify.compare(result(w=[1.0]), result(float("nan"), w=[1.0]), None)
    with pytest.raises(VerificationError, match="own gradient of w is not finite"):
        verify.compare(result(w=[1.0]), result(w=[float("inf")]), None)


def test_a_run_puts_gradients_buffers_and_generators_back_even_when_it_fails() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    model[0].weight.grad = kept = torch.ones(3)
    before, mean = torch.get_rng_state(), model[0].running_mean.clone()
    found = verify.run(lambda: model(torch.randn(4, 3)).square().sum(), model)
    assert found.gradients["0.weight"] is not kept and found.peak_bytes and found.peak_bytes > 0

    def failing() -> torch.Tensor:
        model(torch.randn(4, 3))
        raise ValueError("the model's own")

    with pytest.raises(ValueError, match="own"):
        verify.run(failing, model)
    assert model[0].weight.grad is kept and model[0].bias.grad is None
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(model[0].running_mean, mean)
