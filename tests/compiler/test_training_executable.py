"""The planned model in its user's hands: it is the model, and trains as eager does."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_helpers import Batch, Skips, gpt2, skips, twin

from effcompile.compiler import TrainingExecutable, optimize_training
from effcompile.core.errors import InputsError, UsageError
from effcompile.core.goal import Goal
from effcompile.runtime.training import planned

pytestmark = pytest.mark.usefixtures("quick_training")
PASSES = ["no-pointwise"]  # its kernels round as they please; here everything must be eager's, bit by bit


def optimize(model: nn.Module, batch: Batch, **request: Any) -> TrainingExecutable:
    return optimize_training(model, (), batch, goal=Goal(mode="training"), passes=PASSES, **request)


@pytest.fixture
def pair() -> tuple[nn.Module, Batch, TrainingExecutable]:
    model, batch = skips()
    return model, batch, optimize(model, batch)


def test_it_is_the_model_with_the_models_own_parts(pair: Any) -> None:
    model, _, executable = pair
    assert (
        isinstance(executable, Skips)
        and isinstance(executable, TrainingExecutable)
        and executable is not model
    )
    assert type(model) is Skips and "runner" not in vars(model) and type(executable).__name__ == "Skips"
    for ours, theirs in (
        (executable.named_parameters(), model.named_parameters()),
        (executable.named_modules(), model.named_modules()),
    ):
        left = dict(theirs)
        found = dict(ours)
        assert found.keys() == left.keys() and all(found[name] is left[name] for name in found if name)
    state = model.state_dict(keep_vars=True)
    assert all(value is state[name] for name, value in executable.state_dict(keep_vars=True).items())
    assert executable.load_state_dict(model.state_dict()).missing_keys == []


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_loop_trains_as_eager_does(pair: Any, optimizer: Any) -> None:
    model, batch, executable = pair
    eager = twin(model)
    losses: dict[str, list[float]] = {"ours": [], "eager": []}
    for name, trained in (("ours", executable), ("eager", eager)):
        torch.manual_seed(7)
        stepper = optimizer(trained.parameters(), lr=0.05)
        for _ in range(6):
            stepper.zero_grad()
            loss = trained(**batch)
            loss.backward()
            nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
            stepper.step()
            losses[name].append(float(loss))
    assert losses["ours"] == losses["eager"] and losses["ours"][-1] < losses["ours"][0]
    assert all(torch.equal(p, eager.get_parameter(name)) for name, p in executable.named_parameters())
    assert model.head.weight is executable.head.weight


def test_evaluation_and_no_grad_run_the_model_itself(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, executable = pair
    monkeypatch.setattr(type(executable.runner), "__call__", lambda *_: pytest.fail("the planned step ran"))
    other = {"x": torch.randn(3, 24), "y": torch.zeros(3, dtype=torch.long)}
    with torch.no_grad():
        torch.manual_seed(1)
        found = executable(**other)
        torch.manual_seed(1)
        assert torch.equal(found, model(**other))
    executable.eval()
    assert torch.equal(executable(**other), executable(**other)) and executable(**other).requires_grad
    with torch.inference_mode():
        executable.train()(**batch)


def test_after_evaluation_it_trains_again(pair: Any) -> None:
    model, batch, executable = pair
    executable.eval()
    executable(**batch)
    executable.train()
    torch.manual_seed(2)
    found = executable(**batch)
    torch.manual_seed(2)
    assert (
        torch.equal(found, model(**batch))
        and type(found.grad_fn).__name__ != type(model(**batch).grad_fn).__name__
    )


def test_another_batch_size_is_refused_with_both_shapes(pair: Any) -> None:
    _, batch, executable = pair
    with pytest.raises(InputsError, match=r"6"):
        executable(x=batch["x"][:3], y=batch["y"][:3])


def test_a_deep_copy_is_planned_and_trains_apart(pair: Any) -> None:
    model, batch, executable = pair
    other = copy.deepcopy(executable)
    assert (
        isinstance(other, TrainingExecutable) and isinstance(other, Skips) and other.plan == executable.plan
    )
    assert other.head.weight is not model.head.weight and torch.equal(other.head.weight, model.head.weight)
    torch.manual_seed(4)
    other(**batch).backward()
    assert model.head.weight.grad is None and other.head.weight.grad is not None
    torch.manual_seed(4)
    executable(**batch).backward()
    assert torch.equal(other.head.weight.grad, model.head.weight.grad)
    assert copy.deepcopy(executable.eval()).training is False


def test_a_shallow_copy_shares_the_parameters(pair: Any) -> None:
    model, batch, executable = pair
    other = copy.copy(executable)
    assert other is not executable and other.head.weight is model.head.weight
    other(**batch).backward()
    assert model.head.weight.grad is not None


def test_pickling_says_what_to_save_instead(pair: Any, tmp_path: Path) -> None:
    for save in (pickle.dumps, lambda e: torch.save(e, tmp_path / "model.pt")):
        with pytest.raises(UsageError, match=r"cannot be pickled.*state_dict\(\).*plan"):
            save(pair[2])
    torch.save(pair[2].state_dict(), tmp_path / "state.pt")
    assert pair[2].load_state_dict(torch.load(tmp_path / "state.pt")).missing_keys == []


def test_planning_a_planned_model_is_refused(pair: Any) -> None:
    with pytest.raises(UsageError, match="planned already"):
        planned(pair[2], pair[2].runner, pair[2].plan)


def test_an_optimized_language_model_returns_what_it_returned(tmp_path: Path) -> None:
    model, batch = gpt2(layers=1, dropout=0.0)
    slim = optimize(model, batch)
    wanted = model(**batch)
    found = slim(**batch)
    assert (
        type(found) is type(wanted)
        and torch.equal(found.loss, wanted.loss)
        and found["loss"] is found.loss
        and found.logits is None
    )
    whole = optimize(model, batch, keep_outputs=True)(**batch)
    assert torch.equal(whole.logits, wanted.logits)
    slim.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again.transformer.wte.weight, model.transformer.wte.weight)
    with torch.no_grad():
        assert slim.generate(
            batch["input_ids"][:1, :4], max_new_tokens=2, do_sample=False, pad_token_id=0
        ).shape == (1, 6)
