"""A comparison with the model's own step that was kept holds where everything is as it was, to the bit, and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_helpers import gpt2, skips

from effcompile.compiler import optimize_training
from effcompile.core import torch_compat_memory
from effcompile.core.errors import VerificationError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Plan
from effcompile.machine.room import Room
from effcompile.proof.digests import Digests
from effcompile.proof.spool import Spool
from effcompile.proof.training import agreed, original, verify

pytestmark = pytest.mark.usefixtures("crowded")


@pytest.fixture
def crowded(quick_training: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if the original did not fit; and what was compared is kept for this test."""
    monkeypatch.setattr(Room, "refusal", lambda self, more, whole: "needs 19 GiB")
    monkeypatch.setattr(agreed, "cache_folder", lambda: tmp_path)


@pytest.fixture
def leanly(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with every lean run of an original step."""
    runs, lean = list[str](), original.lean
    monkeypatch.setattr(original, "lean", lambda *args: runs.append("run") or lean(*args))  # type: ignore[func-returns-value]
    return runs


def plan(model: nn.Module, batch: dict[str, Any], **goal: Any) -> Plan:
    passes = ["checkpoint"]
    return optimize_training(model, (), batch, goal=Goal(mode="training", **goal), passes=passes).plan


@pytest.mark.parametrize("make", [gpt2, skips])
def test_the_same_bits_are_not_compared_twice(make: Any, leanly: list[str]) -> None:
    first = plan(*make())
    assert leanly == ["run"] and agreed.AGAIN not in first.notes
    again = plan(*make())
    assert leanly == ["run"] and agreed.AGAIN in again.notes
    assert [(c.name, c.error, c.limit) for c in again.checks] == [
        (c.name, c.error, c.limit) for c in first.checks
    ]
    assert "today the same bits" in str(again.checks[0].note) and again.measured is not None
    assert Plan.from_dict(again.to_dict()) == again


def other_weight(model: nn.Module, batch: dict[str, Any]) -> None:
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-3


def other_input(model: nn.Module, batch: dict[str, Any]) -> None:
    batch["x"] = batch["x"] + 1e-3


def hooked(model: nn.Module, batch: dict[str, Any]) -> None:
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)


def hooked_module(model: nn.Module, batch: dict[str, Any]) -> None:
    next(model.children()).register_full_backward_pre_hook(lambda module, gradient: None)


def other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreed, "own_code", lambda: "another release")


def other_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")


@pytest.mark.parametrize("change", [other_weight, other_input, hooked, hooked_module])
def test_of_another_step_the_original_is_run(
    change: Callable[[nn.Module, dict[str, Any]], None], leanly: list[str]
) -> None:
    plan(*skips())
    model, batch = skips()
    change(model, batch)
    assert agreed.AGAIN not in plan(model, batch).notes and len(leanly) == 2


@pytest.mark.parametrize("change", [other_code, other_environment])
def test_by_other_code_or_settings_the_original_is_run(
    change: Callable[[pytest.MonkeyPatch], None], leanly: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(*skips())
    change(monkeypatch)
    assert agreed.AGAIN not in plan(*skips()).notes and len(leanly) == 2


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every gradient of the head's weight: where it went to."""
    gone = list[str]()

    def counted(kind: type[Spool] | type[Digests], put: str) -> None:
        own = getattr(kind, put)

        def noted(self: Any, name: str, value: Tensor | None) -> None:
            gone.extend([kind.__name__] * (name == "head.weight"))
            own(self, name, value)

        monkeypatch.setattr(kind, put, noted)

    counted(Spool, "put")
    counted(Digests, "put_kept")
    return gone


def test_gradients_that_are_only_hashed_go_to_no_file(put: list[str], leanly: list[str]) -> None:
    plan(*skips())
    assert put == ["Spool", "Spool"]  # the planned step's and the original's
    plan(*skips())
    assert put[2:] == ["Digests"] and leanly == ["run"]


def test_a_lean_run_is_spared_the_record_of_every_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, record = list[str](), torch_compat_memory.watched_memory
    monkeypatch.setattr(
        torch_compat_memory, "watched_memory", lambda device: watched.append(device) or record(device)
    )
    steps, run = list[list[str]](), verify.run

    def noted(*args: Any, **how: Any) -> verify.Result:
        watched.clear()
        found = run(*args, **how)
        steps.append(watched[:])
        assert (found.peak_bytes is None) is (not watched)
        return found

    monkeypatch.setattr(verify, "run", noted)
    made = plan(*skips())
    assert steps == [["cpu"], []]  # the planned step, whose peak is told; the original's lean one
    assert made.measured is not None and made.measured.peak_bytes


def test_gradients_that_an_update_needs_go_to_a_file(put: list[str]) -> None:
    for _ in range(2):
        model, batch = skips()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        passes = ["checkpoint", "states"]
        made = optimize_training(
            model, (), batch, goal=Goal(mode="training"), passes=passes, optimizer=optimizer
        )
        assert any("update" in check.name for check in made.plan.checks) or len(made.plan.checks) == 1
    assert "Digests" not in put


def test_a_planned_step_that_errs_since_is_found(monkeypatch: pytest.MonkeyPatch, put: list[str]) -> None:
    plan(*skips())
    seen = list[str]()

    def spoil(kind: type[Spool] | type[Digests], put: str) -> None:
        own = getattr(kind, put)

        def spoilt(self: Any, name: str, value: Tensor | None) -> None:
            first = name == "head.weight" and (kind.__name__ + name) not in seen
            seen.append(kind.__name__ + name)  # of the spools, the planned step's comes first
            own(self, name, value * 1.01 if first and value is not None else value)

        monkeypatch.setattr(kind, put, spoilt)

    spoil(Digests, "put_kept")
    spoil(Spool, "put")
    put.clear()
    with pytest.raises(VerificationError, match="largest at head"):
        plan(*skips())
    assert put == ["Digests", "Spool", "Spool"]


def test_a_planned_step_that_rounds_otherwise_since_is_compared(
    monkeypatch: pytest.MonkeyPatch, put: list[str], leanly: list[str]
) -> None:
    """It is not that day's to the bit, and right."""
    plan(*skips())
    own = Digests.put_kept

    def rounded(self: Digests, name: str, value: Tensor | None) -> None:
        own(self, name, None if value is None else value * (1 + 1e-6))

    monkeypatch.setattr(Digests, "put_kept", rounded)
    put.clear()
    again = plan(*skips())
    assert agreed.AGAIN not in again.notes and again.checks[0].passed and leanly == ["run", "run"]
    assert put == ["Digests", "Spool", "Spool"]


class Branching(nn.Module):
    """What it computes while it is traced is not all that it does."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if not torch.compiler.is_compiling() and type(x) is Tensor:
            h = h * Branching.scale
        return nn.functional.cross_entropy(self.last(h), y)


def test_a_model_that_no_graph_shows_to_be_another_is_found(
    leanly: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(Branching().train(), skips()[1])
    plan(Branching().train(), skips()[1])
    assert leanly == ["run"]
    monkeypatch.setattr(Branching, "scale", 1.5)
    with pytest.raises(VerificationError):
        plan(Branching().train(), skips()[1])


@pytest.mark.parametrize(
    "spoil", [lambda text: text[:40], lambda text: text.replace('"limit":0', '"limit":-1'), lambda text: "[]"]
)
def test_a_file_that_is_none_of_ours_is_as_none(
    spoil: Callable[[str], str], leanly: list[str], tmp_path: Path
) -> None:
    plan(*skips())
    (kept,) = (tmp_path / "agreements").iterdir()
    text = kept.read_text()
    assert spoil(text) != text
    kept.write_text(spoil(text))
    assert agreed.AGAIN not in plan(*skips()).notes and len(leanly) == 2
    assert agreed.AGAIN in plan(*skips()).notes
