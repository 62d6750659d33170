"""Frozen weights as codes: which weights, what the graph becomes, and that its gradients are those of the
rounded base.
"""

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from train_helpers import context, cut_step, run_schedule

from effcompile.backends.torch.training import StepRunner
from effcompile.capture import capture_training
from effcompile.capture.source import Source
from effcompile.core.errors import UsageError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Declined
from effcompile.ir.resident import storage_bytes
from effcompile.ops.frozen_codes import CodedWeight, encode, expand_codes, packed_bytes
from effcompile.passes.training.base import Case, StepChoice, StepContext
from effcompile.passes.training.forms import applied
from effcompile.passes.training.frozen import BASELINE, Frozen, coded, frozen_weights
from effcompile.schedules.blocks import split
from effcompile.schedules.emit import emit
from effcompile.schedules.simulate import simulate

WIDTH = 64


class Adapted(nn.Module):
    """Two frozen linears with an adapter between them, a frozen table, a frozen gain, and a small frozen
    linear.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.gain = nn.Embedding(100, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.first, self.second, self.small = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, 4),
        )
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 2 * WIDTH, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) * self.gain
        x = F.silu(self.first(x) + self.up(self.down(x)))
        return F.cross_entropy(self.small(self.second(x)), ids % 4)


def case_of(model: nn.Module) -> Case:
    source = Source(model=model, args=(torch.arange(12),), kwargs={})
    step, front = source.capture_with_front()
    return Case(step=step, source=source, front=front)


def allowing(max_error: float) -> StepContext:
    """What is proposed for: a goal that allows an error, on this machine."""
    return replace(context(here=True), goal=Goal(mode="training", max_error=max_error))


def test_weights_that_products_alone_read_are_found_and_no_others() -> None:
    assert set(frozen_weights(case_of(Adapted()).step).values()) == {"first.weight", "second.weight"}
    trained = Adapted().requires_grad_(True)
    assert not frozen_weights(case_of(trained).step) and not list(
        Frozen().propose(case_of(trained), allowing(0.5))
    )


@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_each_product_writes_the_weight_out_for_itself_and_gradients_are_those_of_the_rounded_base(
    form: str,
) -> None:
    model = Adapted()
    before = case_of(model).step
    step = coded(before, dict(model.named_parameters()), form)
    forward, backward = split(step)
    made = [
        [node for node in part if node.target is torch.ops.effcompile.expand_codes.default]
        for part in (forward, backward)
    ]
    # the gradient of the first one's input is wanted by nobody: the table is frozen
    assert (
        len(step.codes) == 2
        and sum(map(len, made)) == 3
        and before.parameters.keys()
        and len(before.codes) == 0
    )
    given = storage_bytes([model.first.weight, model.second.weight])
    held = sum(packed_bytes(w.numel(), form) for w in (model.first.weight, model.second.weight))
    assert step.resident_bytes == before.resident_bytes - given + held  # type: ignore[operator]
    rounded, parameters = copy.deepcopy(model), dict(model.named_parameters())
    for layer in (rounded.first, rounded.second):
        layer.weight.data = expand_codes(
            encode(layer.weight, form), tuple(layer.weight.shape), form, torch.float32
        )
    wanted = rounded(torch.arange(12))
    wanted.backward()
    values = [
        encode(parameters[step.codes[n]], form)
        if n in step.codes
        else parameters[step.parameters[n]].detach()
        if n in step.parameters
        else torch.ones(())
        if n is step.tangent
        else torch.arange(12)
        for n in step.graph.nodes
        if n.op == "placeholder"
    ]
    with torch.no_grad():
        results = step.module(*values)
    torch.testing.assert_close(results[0], wanted.detach())
    gradients = dict(zip(step.differentiated, results[-len(step.differentiated) :], strict=True))
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, rounded.get_parameter(name).grad)


def test_the_weights_as_given_are_freed_the_step_goes_on_and_its_peak_is_the_simulated_one() -> None:
    model, batch = Adapted().train(), {"ids": torch.arange(12)}
    step = coded(capture_training(model, (), batch), dict(model.named_parameters()), "int8")
    cut = cut_step(step)
    emitted = emit(cut, cut.decidable)
    _, peak = run_schedule(model, cut, batch, cut.decidable)
    assert peak == pytest.approx(simulate(cut, emitted).footprint.peak_bytes, rel=0.02)
    runner = StepRunner(model, step, emitted)
    before, gone = runner.loss((), batch).detach(), weakref.ref(model.first.weight)
    runner.hold_codes()
    gc.collect()
    assert gone() is None and isinstance(model.first.weight, CodedWeight) and not runner.codes
    for _ in range(2):
        assert torch.equal(runner.loss((), batch), before)


def test_forms_that_round_more_than_the_goal_allows_are_declined_with_their_rounding() -> None:
    case = case_of(Adapted())
    (declined, choice) = sorted(
        Frozen().propose(case, allowing(0.02)), key=lambda item: isinstance(item, StepChoice)
    )
    assert (
        isinstance(declined, Declined) and declined.option == "nf4" and "0.02" in str(declined.reason)
    ) or "2.0e-2" in str(declined.reason)
    assert isinstance(choice, StepChoice) and [option.name for option in choice.options] == [BASELINE, "int8"]
    both = next(iter(Frozen().propose(case, allowing(0.2))))
    assert isinstance(both, StepChoice) and [option.name for option in both.options] == [
        BASELINE,
        "int8",
        "nf4",
    ]
    made = applied(Frozen(), case, both, both.option("nf4"))
    assert set(made.step.coded.items()) == {("first.weight", "nf4"), ("second.weight", "nf4")}


def test_a_form_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(UsageError, match="int8"):
        Frozen(forms=("int3",))
    with pytest.raises(UsageError, match="no-frozen"):
        Frozen(forms=())
