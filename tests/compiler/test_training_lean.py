"""A step whose original does not fit: the model's own step run leanly gives the same loss and gradients, and
nothing is held twice.
"""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from train_helpers import gpt2, skips

from effcompile.compiler import optimize_training
from effcompile.core import torch_compat_memory
from effcompile.core.errors import VerificationError
from effcompile.core.findings import Unmeasured
from effcompile.core.goal import Goal
from effcompile.machine import memory
from effcompile.machine.room import NoRoomError, Room, planning
from effcompile.proof.spool import Spool
from effcompile.proof.training import confirm, verify
from effcompile.proof.training import lean as lean_module
from effcompile.proof.training.lean import lean

PLENTY = Room(device="cpu", allowed=float("inf"))


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(4, 1).expand(4, 5),
        torch.randn(6, 8)[:, 2:5],
        torch.tensor(2.5),
        torch.randn(0, 3),
        torch.arange(5),
        torch.randn(7).bfloat16(),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(5, requires_grad=True),
        torch.eye(3).to_sparse(),
    ],
)
def test_what_is_put_aside_comes_back_as_it_was(value: torch.Tensor) -> None:
    spool = Spool()
    spool.put("before", torch.randn(3))
    spool.put("x", value)
    spool.put("after", torch.ones(2))
    again = spool["x"]
    assert again is not None and again.dtype == value.dtype and again.shape == value.shape
    assert torch.equal(
        again.to_dense() if again.is_sparse else again, value.to_dense() if value.is_sparse else value
    )
    assert torch.equal(spool["after"], torch.ones(2))  # type: ignore[arg-type]


def test_a_tensor_put_again_replaces_the_first_and_none_stays_none() -> None:
    spool = Spool()
    for value in (torch.zeros(4), torch.ones(4), torch.ones(9)):
        spool.put("x", value)
        assert torch.equal(spool["x"], value)  # type: ignore[arg-type]
    spool.put("none", None)
    assert spool["none"] is None and list(spool) == ["x", "none"] and len(spool) == 2


def test_what_is_put_aside_is_no_memory_of_torch() -> None:
    spool, value = Spool(), torch.randn(1000)
    with torch_compat_memory.memory_profile() as profile:
        spool.put("x", value)
    assert torch_compat_memory.peak_of_memory_events(profile) == 0


class Checkpointed(nn.Module):
    """Its own code recomputes a part, in the way in which a weight's gradient comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for _ in range(2):
            h = checkpoint(lambda h: self.first(h).tanh(), h, use_reentrant=True)
        return nn.functional.cross_entropy(self.last(h), y)


def checkpointed() -> tuple[nn.Module, dict[str, Any]]:
    return Checkpointed(), skips()[1]


@pytest.mark.parametrize("make", [gpt2, skips, checkpointed])
@pytest.mark.parametrize("short", [True, False], ids=["short of room", "room for all"])
def test_a_lean_step_is_the_models_own(make: Any, short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_LOOK_AFTER", 1), ("_SHORT", 2.0 * short), ("_AMPLE", 2.0 * short)):
        monkeypatch.setattr(lean_module, name, value)
    written = list[str]()
    put = Spool.put

    def counted(spool: Spool, name: str, value: torch.Tensor | None) -> None:
        written.append(name)
        put(spool, name, value)

    monkeypatch.setattr(Spool, "put", counted)
    model, batch = make()
    step = lambda: getattr(model(**batch), "loss", None) if hasattr(model, "config") else model(**batch)  # noqa: E731
    wanted, gradients = verify.run(step, model), Spool()
    with lean(model, {}, gradients, PLENTY):
        found = verify.run(step, model, spool=gradients)
    check = verify.compare(found, wanted, None)
    assert check.passed and check.error < 1e-6
    assert all(parameter.grad is None for parameter in model.parameters())
    assert any(name.isdigit() for name in written) is short  # else gradients alone
    assert found.peak_bytes is not None and wanted.peak_bytes is not None
    assert not short or found.peak_bytes < 0.9 * wanted.peak_bytes


class Overwritten(nn.Module):
    """A value that the backward reads is written to after autograd saved it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).sigmoid()
        (out := h * h).sum()
        h += 1
        return out.sum()


def test_what_autograd_refuses_a_lean_step_refuses() -> None:
    model, x = Overwritten(), torch.randn(2, 4)
    for within in (contextlib.nullcontext(), lean(model, {}, Spool(), PLENTY)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"), within:
            verify.run(lambda: model(x), model)


def test_a_lean_step_stops_where_there_is_no_room() -> None:
    model, batch = skips()
    with (
        pytest.raises(NoRoomError, match="reached"),
        lean(model, {}, Spool(), Room(device="cpu", allowed=1.0)),
    ):
        verify.run(lambda: model(**batch), model)
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_the_room_is_a_quarter_and_a_gibibyte_above_the_larger_of_model_and_budget() -> None:
    assert Room.of("cpu", 100, 4 << 30).allowed == 6 << 30
    assert Room.of("cpu", 8 << 30, 4 << 30).allowed == 11 << 30
    assert Room.of("cpu", 100, None).allowed == float("inf")


def test_what_the_process_held_before_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device="cpu": 64 << 30)
    monkeypatch.setattr(memory, "resident_bytes", lambda: 5 << 30)
    with planning():
        room = Room.of("cpu", 1 << 30, 2 << 30)
        assert room.allowed == (2.5 + 1 + 3.5) * (1 << 30)
        refused = room.refusal(3 << 30, 4 << 30)
        assert refused is not None and refused.startswith(
            "needs 4.00 GiB, about 3.00 GiB of it beside what is resident, where planning within this "
            "budget may take 2.00 GiB"
        )
        assert room.refusal(1 << 30, 1 << 30) is None
    assert Room.of("cpu", 1 << 30, 2 << 30).refusal(1, 1) is not None


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the original did not fit."""
    monkeypatch.setattr(Room, "refusal", lambda self, more, whole: "needs 19 GiB")


@pytest.mark.usefixtures("quick_training", "crowded")
@pytest.mark.parametrize("make", [gpt2, skips])
def test_a_plan_whose_original_does_not_fit_is_verified_all_the_same(make: Any) -> None:
    model, batch = make()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    planned = optimize_training(
        model, (), batch, goal=Goal(mode="training"), passes=["checkpoint", "states"], optimizer=sgd
    )
    names = [check.name for check in planned.plan.checks]
    assert names[0] == "loss and all gradients, as eager" and planned.plan.checks[0].error < 1e-6
    assert (
        planned.plan.measured_baseline is None
        and planned.plan.measured is not None
        and planned.plan.measured.seconds
    )
    assert Unmeasured(because="needs 19 GiB") in planned.plan.notes
    assert planned.plan.measured.peak_bytes == planned.plan.predicted.peak_bytes
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


@pytest.mark.usefixtures("quick_training", "crowded")
def test_a_wrong_gradient_is_found_without_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = skips()
    put, seen = Spool.put, list[str]()

    def spoilt(self: Spool, name: str, value: torch.Tensor | None) -> None:
        first = name == "head.weight" and name not in seen  # the planned step's comes first
        seen.append(name)
        put(self, name, value * 1.01 if first and value is not None else value)

    monkeypatch.setattr(Spool, "put", spoilt)
    with pytest.raises(VerificationError, match="largest at head"):
        optimize_training(model, (), batch, goal=Goal(mode="training"), passes=["checkpoint"])


@pytest.mark.usefixtures("quick_training", "crowded")
def test_where_not_even_a_lean_run_fits_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Room, "left", lambda self: -1.0)
    model, batch = skips()
    planned = optimize_training(model, (), batch, goal=Goal(mode="training"), passes=["checkpoint"])
    assert not planned.plan.checks
    assert any(
        str(note).startswith("not compared with the unplanned step: needs 19 GiB; run leanly it reached")
        for note in planned.plan.notes
    )


@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize("narrow", [True, False])
def test_an_original_that_takes_too_long_is_run_leanly_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, narrow: bool
) -> None:
    monkeypatch.setattr(confirm, "_PATIENT", 0.0)
    monkeypatch.setattr(confirm, "products_in_fp32", lambda model: narrow)
    model, batch = skips()
    plan = optimize_training(model, (), batch, goal=Goal(mode="training"), passes=["checkpoint"]).plan
    told = [note.because for note in plan.notes if isinstance(note, Unmeasured)]
    assert [text.endswith(" by its own 16-bit products") for text in told] == [True] * narrow
    assert (plan.measured_baseline is None) is narrow
    assert plan.checks[0].passed
