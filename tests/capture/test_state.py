"""A model that changed is noticed, by what changed; one that did not is not."""

from __future__ import annotations

import copy
import zlib

import pytest
import torch
from mutations import HARMLESS, LASTING, REVERSIBLE, WEIGHTS, Model
from torch import nn

from effcompile.capture.state import ModelGuards
from effcompile.core.errors import CaptureError, GuardError

IDS = torch.arange(8).reshape(2, 4)
#: What a planned step follows by itself, or runs around itself.
# which unties
FOLLOWED_IN_TRAINING = {*WEIGHTS, "another buffer", "a hook on the outermost module"} - {
    "load_state_dict(assign=True)"
}
#: What has no meaning without gradients.
ONLY_IN_TRAINING = {"a backward hook"}


def guarded(training: bool) -> tuple[Model, ModelGuards]:
    """A model whose forward has run since it was recorded, as it does while a plan is made."""
    model = Model().train(training)
    guards = ModelGuards(model, training=training)
    model(IDS)
    notes = guards.settle()
    assert len(notes) == 1 and "model.calls" in str(notes[0])
    guards.check()
    return model, guards


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", [*REVERSIBLE, *WEIGHTS, *LASTING])
def test_a_change_is_refused_until_it_is_taken_back(name: str, training: bool) -> None:
    model, guards = guarded(training)
    undo = (REVERSIBLE | WEIGHTS | LASTING)[name](model)
    try:
        if name in (FOLLOWED_IN_TRAINING if training else ONLY_IN_TRAINING):
            guards.check()
        else:
            with pytest.raises(GuardError, match=r"since Model was planned.*optimize again") as caught:
                guards.check()
            assert caught.value.of_model and str(caught.value).startswith(caught.value.place)
    finally:
        undo()
    if name in REVERSIBLE:
        guards.check()


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_answer_is_no_change(name: str, training: bool) -> None:
    model, guards = guarded(training)
    undo = HARMLESS[name](model)
    for _ in range(2):
        guards.check()
    undo()
    guards.check()


def test_the_error_names_the_place_the_old_value_and_the_new() -> None:
    model, guards = guarded(False)
    model.inner.scaling["default"] = 2.5
    with pytest.raises(GuardError, match=r"^model\.inner\.scaling\['default'\] was 1\.0 and is 2\.5 now"):
        guards.check()


def test_attributes_with_names_made_at_run_time_are_all_watched() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale_0, self.scale_1 = 1.0, 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in range(2):
                x = x * getattr(self, f"scale_{i}")
            return x

    model = ByName()
    guards = ModelGuards(model, training=False)
    model.scale_1 = 3.0
    with pytest.raises(GuardError, match=r"scale_1 was 2.0 and is 3.0"):
        guards.check()


def test_a_frozen_parameter_that_is_trained_again_and_one_that_is_frozen() -> None:
    model = Model().train()
    model.inner.up.weight.requires_grad_(False)
    guards = ModelGuards(model, training=True)
    model.inner.up.bias.requires_grad_(False)
    guards.check()
    model.inner.up.weight.requires_grad_(True)
    with pytest.raises(GuardError, match=r"model.inner.up.weight.requires_grad was False and is True"):
        guards.check()


def test_a_copy_is_watched_by_itself_and_remembers_what_had_changed() -> None:
    model, guards = guarded(True)
    twin = copy.deepcopy(model)
    own = guards.bound_to(twin)
    assert guards.bound_to(model) is guards
    model.temperature = 2.0
    own.check()
    twin.temperature = 3.0
    for each in (own, guards, guards.bound_to(copy.deepcopy(model))):
        with pytest.raises(GuardError, match="temperature"):
            each.check()


def test_a_whole_model_in_training_mode_is_no_change_for_inference() -> None:
    model, guards = guarded(False)
    model.train()
    guards.check()
    model.eval()
    guards.check()


def test_one_byte_of_a_small_weight_is_seen(request: pytest.FixtureRequest) -> None:
    model, guards = guarded(False)
    model.inner.up.weight.data[3, 5] += 1e-6
    with pytest.raises(GuardError, match=r"model.inner.up.weight was changed"):
        guards.check()


def test_what_is_watched_is_listed() -> None:
    _, guards = guarded(False)
    places = {guard.place: guard for guard in guards.listed()}
    for place in (
        "model.temperature",
        "model.drop.p",
        "model.inner.scaling['default']",
        "model.inner.up.weight",
        "mutations.SCALE",
    ):
        assert place in places
    assert places["model.temperature"].expected == "1.0" and places["model.temperature"].kind == "attribute"
    assert "model.calls" not in places and "model.note" not in places


class Counting(nn.Module):
    """Counts its calls; `read` says what the count is for."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read, self.calls, self.stats, self.last = read, 0, {"calls": 0}, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.stats["calls"] += 1
        if self.read == "last":
            self.last = x.sum()
        return x


class Annealed(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self.calls


class Alternating(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        return x * 2 if self.stats["calls"] % 2 else x


@pytest.mark.parametrize("kind", [Annealed, Alternating])
def test_a_count_that_the_forward_reads_is_refused(kind: type[Counting]) -> None:
    model = kind("count")
    guards = ModelGuards(model, training=True)
    model(torch.ones(2))
    with pytest.raises(
        CaptureError, match=r"changes model\.(calls|stats\['calls'\]) at each call, from 0 to 1, and reads it"
    ):
        guards.settle()


def test_large_weights_are_summed_once_for_all_who_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(300, 300)
    guards, summed = ModelGuards(model, training=False), list[int]()
    crc = zlib.crc32

    def counted(part: bytes) -> int:
        summed.append(len(part))
        return crc(part)

    monkeypatch.setattr("effcompile.capture.tensors.zlib.crc32", counted)
    guards.settle()
    assert sum(summed) == 4 * 300 * 300
    guards.settle()
    assert sum(summed) == 4 * 300 * 300
    model.weight.data[150, 150] += 1
    with pytest.raises(GuardError, match="weight was changed"):
        guards.check_weights()


def test_what_is_only_counted_or_kept_is_said_to_be_left() -> None:
    model = Counting("last")
    guards = ModelGuards(model, training=True)
    model(torch.ones(2))
    (note,) = guards.settle()
    assert all(place in str(note) for place in ("model.calls", "model.stats['calls']", "model.last"))
    for _ in range(2):
        model(torch.ones(2))
        guards.check()


def test_the_loss_beside_a_model_is_watched() -> None:
    weight, smoothed = [1.0], nn.CrossEntropyLoss(label_smoothing=0.1)
    for loss in (
        lambda outputs, inputs: outputs.sum() * weight[0],
        lambda outputs, inputs: smoothed(outputs, inputs),
        smoothed,
    ):
        guards = ModelGuards(nn.Linear(2, 2), training=True, beside={"loss": loss})
        guards.check()
        weight[0], smoothed.label_smoothing = 2.0, 0.2
        with pytest.raises(
            GuardError, match=r"weight in .*\[0\] was 1.0 and is 2.0|label_smoothing was 0.1 and is 0.2"
        ):
            guards.check()
        weight[0], smoothed.label_smoothing = 1.0, 0.1
        guards.check()


class Lists(nn.Module):
    """A model that reads its weights from a list of its own, which is no torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.kept = [self.inner.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kept[0].detach()


def planned_for_training(inner: nn.Module) -> tuple[nn.Sequential, ModelGuards]:
    model = nn.Sequential(nn.Linear(4, 4), inner).train()
    guards = ModelGuards(model, training=True)
    model(torch.ones(2, 3, 4))
    guards.settle()
    return model, guards


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_weights_that_a_list_of_torchs_holds_too_are_read_anew_by_a_step(kind: type[nn.RNNBase]) -> None:
    model, guards = planned_for_training(inner := kind(4, 4))
    with torch.no_grad():  # as an optimizer does
        for parameter in model.parameters():
            parameter.add_(1)
            parameter.data = parameter.data.clone()
    guards.check()
    # the list holds what is no weight of the model any more: a step would read the other one
    inner._flat_weights[0] = nn.Parameter(inner._flat_weights[0].detach().clone())
    with pytest.raises(GuardError, match=r"\[0\] was 'tied to weight_ih_l0' and is float32 \d+×4 now"):
        guards.check()


def test_weights_that_a_list_of_the_users_holds_too_are_constants_of_a_step() -> None:
    model, guards = planned_for_training(Lists())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    with pytest.raises(GuardError, match=r"kept\[0\] was changed"):
        guards.check()


def test_weights_that_a_list_holds_too_are_constants_in_inference() -> None:
    model = nn.Sequential(nn.GRU(4, 4)).eval()
    guards = ModelGuards(model, training=False)
    model(torch.ones(2, 3, 4))
    guards.settle()
    with torch.no_grad():
        model[0].weight_hh_l0.add_(1)
    with pytest.raises(GuardError, match="was changed"):
        guards.check()
