"""An emitted step behind autograd: gradients as eager makes them, and refusals where it would be another
step.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from train_helpers import Batch, cut_model, cut_step, differing, eager, everything, measured, skips, twin

from effcompile.backends.torch.training import StepRunner
from effcompile.capture import capture_training
from effcompile.core.errors import InputsError
from effcompile.schedules.blocks import Blocks
from effcompile.schedules.emit import emit
from effcompile.schedules.simulate import overwritten, simulate


@pytest.fixture
def planned() -> tuple[nn.Module, Batch, StepRunner]:
    """A fresh model with a step that recomputes every third value."""
    model, batch, cut = skips_cut()
    fresh = twin(model)
    return fresh, batch, StepRunner(fresh, cut.step, emit(cut, frozenset(sorted(everything(cut))[::3])))


def skips_cut() -> tuple[nn.Module, Batch, Blocks]:
    return cut_model("skips")


def other_batch(batch: Batch, seed: int) -> Batch:
    torch.manual_seed(seed)
    return {"x": torch.randn_like(batch["x"]), "y": torch.randint(0, 8, batch["y"].shape)}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and len(a) > 0 and all(torch.equal(a[name], b[name]) for name in a)


def test_other_inputs_of_the_same_shapes_run(planned: Any) -> None:
    model, batch, runner = planned
    for seed in range(3):
        given = other_batch(batch, seed)
        assert differing(measured(lambda: runner.loss((), given), model, 0)[0], eager(model, given)) == []  # noqa: B023


def test_positional_and_keyword_inputs_are_the_same(planned: Any) -> None:
    model, batch, runner = planned
    wanted = eager(model, batch)
    for args, kwargs in (((), batch), ((batch["x"],), {"y": batch["y"]}), ((batch["x"], batch["y"]), {})):
        with contextlib.suppress(InputsError) if args else contextlib.nullcontext():
            # another form may be refused, not be wrong
            assert differing(measured(lambda: runner.loss(args, kwargs), model, 0)[0], wanted) == []  # noqa: B023


def test_a_second_backward_is_refused(planned: Any) -> None:
    _, batch, runner = planned
    loss = runner.loss((), batch)
    loss.backward(retain_graph=True)
    with pytest.raises(InputsError, match=r"has run already.*Call the model again"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: {**b, "x": b["x"][:3]}, "x"),
        (lambda b: {**b, "x": b["x"].double()}, "x"),
        (lambda b: {"x": b["x"]}, "y"),
        (lambda b: {**b, "z": b["x"]}, "z"),
        (lambda b: {**b, "y": None}, "y"),
        (lambda b: {}, "x"),
    ],
    ids=["shape", "dtype", "missing", "unknown", "None", "nothing"],
)
def test_inputs_that_it_was_not_planned_for_are_refused(
    planned: Any, change: Callable[[Batch], Any], said: str
) -> None:
    _, batch, runner = planned
    with pytest.raises(InputsError, match=said):
        runner.loss((), change(batch))


def test_gradients_are_added_to_those_that_are_there(planned: Any) -> None:
    model, batch, runner = planned
    torch.manual_seed(1)
    runner.loss((), batch).backward()
    first = {name: p.grad for name, p in model.named_parameters()}
    single = gradients(model)
    torch.manual_seed(1)
    runner.loss((), batch).backward()
    assert all(p.grad is first[name] for name, p in model.named_parameters())
    assert all(torch.equal(p.grad, 2 * single[name]) for name, p in model.named_parameters())


def test_two_forwards_before_two_backwards(planned: Any) -> None:
    model, batch, runner = planned
    given = [batch, other_batch(batch, 9)]

    def both(loss: Callable[[Batch], torch.Tensor], order: tuple[int, int]) -> list[dict[str, torch.Tensor]]:
        torch.manual_seed(2)
        losses = [loss(b) for b in given]
        found = []
        for i in order:
            model.zero_grad()
            losses[i].backward()
            found.append(gradients(model))
        return found

    for order in ((0, 1), (1, 0)):
        pairs = zip(both(lambda b: runner.loss((), b), order), both(lambda b: model(**b), order), strict=True)
        assert all(same(ours, theirs) for ours, theirs in pairs)


def test_a_scaled_loss_and_autograd_grad(planned: Any) -> None:
    model, batch, runner = planned
    torch.manual_seed(3)
    (runner.loss((), batch) / 4).backward()
    scaled = gradients(model)
    torch.manual_seed(3)
    model.zero_grad()
    (model(**batch) / 4).backward()
    assert same(scaled, gradients(model))
    torch.manual_seed(3)
    found = torch.autograd.grad(runner.loss((), batch), [model.head.weight])
    assert torch.equal(found[0] / 4, scaled["head.weight"])


def test_what_was_kept_is_freed_with_the_loss_and_by_the_backward(planned: Any) -> None:
    _, batch, runner = planned
    loss = runner.loss((), batch)
    node = loss.grad_fn
    assert node.saved and all(isinstance(value, torch.Tensor) for value in node.saved)
    loss.backward()
    assert node.saved is None and node.values is None
    before = gc.collect() and sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
    for _ in range(3):
        runner.loss((), batch)
    gc.collect()
    assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) <= before


def test_weights_that_were_changed_or_replaced_between_steps_are_the_ones_used(planned: Any) -> None:
    model, batch, runner = planned
    with torch.no_grad():
        model.head.weight.mul_(3)
    model.layers[0].up.weight = nn.Parameter(torch.randn_like(model.layers[0].up.weight))
    model.load_state_dict({name: value + 0.1 for name, value in model.state_dict().items()}, assign=True)
    assert differing(measured(lambda: runner.loss((), batch), model, 0)[0], eager(model, batch)) == []


# ------------------------------------------------------- refusals: another step than the one that was planned


@contextlib.contextmanager
def refused(said: str) -> Iterator[None]:
    with pytest.raises(InputsError, match=said):
        yield


def test_weights_or_inputs_changed_between_forward_and_backward(planned: Any) -> None:
    model, batch, runner = planned
    loss = runner.loss((), batch)
    with torch.no_grad():
        model.head.weight.add_(1)
    with refused(r"head\.weight was changed in place between the forward and the backward"):
        loss.backward()
    given = {**batch, "x": batch["x"].clone()}
    loss = runner.loss((), given)
    given["x"].zero_()
    with refused(r"^x was changed in place between"):
        loss.backward()


def test_autocast_that_was_off_when_planned(planned: Any) -> None:
    model, batch, runner = planned
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        refused(r"autocast is .*bfloat16.* at this call and was off"),
    ):
        runner.loss((), batch)
    loss = runner.loss((), batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(0)
        loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_autocast_that_was_on_when_planned() -> None:
    model, batch = skips()
    for layer in model.layers:
        layer.dropout.p = 0.0  # eager rounds dropout's scale to bf16 on a CPU, native_dropout does not
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cut = cut_step(capture_training(model, (), batch))
        runner = StepRunner(model, cut.step, emit(cut, frozenset()))
    with refused("autocast is off at this call and was .*bfloat16"):
        runner.loss((), batch)

    def autocast(call: Callable[[], torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call()

    found = measured(lambda: autocast(lambda: runner.loss((), batch)), model, 0)[0]
    assert differing(found, measured(lambda: autocast(lambda: model(**batch)), model, 0)[0]) == []


def test_a_submodule_in_another_mode(planned: Any) -> None:
    model, batch, runner = planned
    model.layers[1].dropout.eval()
    with refused(r"model.layers.1.dropout.training was True and is False now"):
        runner.loss((), batch)
    model.train()
    runner.loss((), batch)


def test_a_parameter_that_was_frozen() -> None:
    model, batch = skips()
    model.layers[0].requires_grad_(False)
    cut = cut_step(capture_training(model, (), batch))
    runner = StepRunner(model, cut.step, emit(cut, frozenset(sorted(everything(cut))[::2])))
    found = measured(lambda: runner.loss((), batch), model, 0)[0]
    assert differing(found, eager(model, batch)) == []
    assert not any(name.startswith("layers.0") for name in found[1]) and found[1]
    model.layers[0].up.weight.requires_grad_(True)
    with refused(r"model.layers.0.up.weight.requires_grad was False and is True now"):
        runner.loss((), batch)


def test_a_parameter_frozen_later_gets_no_gradient(planned: Any) -> None:
    model, batch, runner = planned
    model.head.weight.requires_grad_(False)
    assert differing(measured(lambda: runner.loss((), batch), model, 0)[0], eager(model, batch)) == []
    model.requires_grad_(False)
    assert not runner.loss((), batch).requires_grad


def test_weights_of_another_dtype_or_shape(planned: Any) -> None:
    model, batch, runner = planned
    model.head.bias = nn.Parameter(torch.zeros(1))
    with refused(r"head.bias is torch.float32 \(1,\)"):
        runner.loss((), batch)
    model.double()
    with refused(r"torch.float64.*was planned for torch.float32"):
        runner.loss((), batch)


# ------------------------------------------------------------------ buffers


class Normed(nn.Module):
    """Batch norms, and a buffer that is read before it is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(5) for _ in range(2))
        self.lins = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, lin in zip(self.norms, self.lins, strict=True):
            x = torch.tanh(lin(norm(x)) * self.scale.clone())  # as it was before the update below
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.2 * x.mean(0))
        return x.square().sum()


@pytest.mark.parametrize("share", [None, 1, 2])
def test_buffers_are_updated_as_eager_does_and_the_backward_reads_the_old_ones(share: int | None) -> None:
    torch.manual_seed(0)
    model, x = Normed().train(), torch.randn(7, 5)
    cut = cut_step(capture_training(model, (x,), {}))
    kept = frozenset(sorted(everything(cut))[::share]) if share else frozenset()
    emitted = emit(cut, kept)
    copied = {cut.step.buffers[node] for node in overwritten(cut.step, emitted).values()}
    assert "scale" in cut.step.updated and ("scale" in copied or share)
    other, ours = twin(model), StepRunner(model, cut.step, emitted)
    for _ in range(3):
        losses = [(ours.loss((x,), {}), ours.loss((x + 1,), {})), (other(x), other(x + 1))]
        for first, second in losses:
            second.backward()
            first.backward()
        assert [float(v) for v in losses[0]] == [float(v) for v in losses[1]]
        assert same(gradients(model), gradients(other))
        assert all(torch.equal(b, other.get_buffer(name)) for name, b in model.named_buffers())
    _, peak = measured(lambda: ours.loss((x,), {}), model, cut.given_bytes)
    assert abs(simulate(cut, emitted).peak_bytes - peak) <= 64


def test_a_loss_that_is_read_from_the_outputs_and_shown_ones() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            y = self.lin(x)
            return {"loss": y.exp().mean(), "y": y, "n": 3}

    model, x = Named(), torch.randn(5, 4)
    cut = cut_step(capture_training(model, (x,), {}, keep_outputs=True))
    found = StepRunner(model, cut.step, emit(cut, frozenset()))((x,), {})
    wanted = model(x)
    assert found.keys() == wanted.keys() and found["n"] == 3
    assert torch.equal(found["y"], wanted["y"]) and found["loss"].requires_grad
