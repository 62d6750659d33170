"""Products in 8 bits: which of them, what they compute, what their error and memory are, and where they are
not taken.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from train_helpers import context, cut_step

import effcompile
from effcompile.backends.torch.training import StepRunner
from effcompile.capture.source import Source
from effcompile.core.errors import UsageError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Declined
from effcompile.passes.training import int8
from effcompile.passes.training.base import Case, StepChoice, StepContext
from effcompile.passes.training.int8 import INT8, Int8Products, weight_products, with_codes
from effcompile.report.reasons import words
from effcompile.runs.fields.precision import StagePrecision
from effcompile.schedules.blocks import split
from effcompile.schedules.emit import emit

WIDTH = 64


class Net(nn.Module):
    """Two trained linears, one of which is used twice, a frozen one, a small one, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(100, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.frozen, self.small, self.head = (
            nn.Linear(WIDTH, WIDTH).requires_grad_(False),
            nn.Linear(WIDTH, 4),
            nn.Linear(WIDTH, 100),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for _ in range(2):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        x = x + self.frozen(x) + self.small(x).sum(-1, keepdim=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def codes(x: torch.Tensor, *dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(dims, keepdim=True) / 127 if dims else x.abs().max() / 127
    return (x / scale).round(), scale


class SwitchBack(torch.autograd.Function):
    """The algorithm as its paper has it, with sums in float64."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        (a, rows), (w, whole) = codes(x, 1), codes(weight)
        return (a.double() @ w.double().T).float() * (rows * whole)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        (a, rows), (w, whole) = codes(g, 1), codes(weight)
        return (a.double() @ w.double()).float() * (rows * whole), g.T @ x


class Linear8(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = SwitchBack.apply(x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)
        return made if self.bias is None else made + self.bias


def case_of(model: nn.Module, ids: torch.Tensor) -> Case:
    source = Source(model=model, args=(ids,), kwargs={})
    step, front = source.capture_with_front()
    return Case(step=step, source=source, front=front)


def allowing(max_error: float, here: bool = True) -> StepContext:
    return replace(context(here=here), goal=Goal(mode="training", max_error=max_error))


IDS = torch.arange(48).view(2, 24) * 7 % 100


def test_products_with_trained_weights_but_for_the_losss_own() -> None:
    case = case_of(Net(), IDS)
    names = [case.step.parameters[path[0]] for path in weight_products(case.step).values()]
    assert sorted(names) == ["down.weight"] * 4 + ["up.weight"] * 4
    coded = with_codes(case.step)
    made = [[n for n in part if n.target is torch.ops.aten._int_mm.default] for part in split(coded)]
    assert [len(each) for each in made] == [4, 4]
    of_weights = [n for n in coded.graph.nodes if n.target is torch.ops.aten.amax.default and not n.args[1]]
    assert len(of_weights) == 2  # once a step
    assert len(weight_products(case.step)) == 8  # of the step that was given nothing is changed


def test_losses_and_gradients_are_those_of_the_algorithm() -> None:
    model, oracle = Net(), Net()
    for layer in (oracle.up, oracle.down):
        layer.__class__ = Linear8
    cut = cut_step(with_codes(case_of(model, IDS).step))
    runner = StepRunner(model, cut.step, emit(cut, cut.decidable))
    loss, wanted = runner.loss((IDS,), {}), oracle(IDS)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    plain = Net()
    plain(IDS).backward()
    for name, parameter in oracle.named_parameters():
        if parameter.grad is not None:
            ours, given = model.get_parameter(name).grad, plain.get_parameter(name).grad
            apart = (ours - parameter.grad).norm() / parameter.grad.norm()
            # a code that rounds the other way is far below the error of the codes themselves
            assert apart <= 0.2 * (given - parameter.grad).norm() / parameter.grad.norm() + 1e-6, name


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(value: float) -> None:
    model = Net()
    with torch.no_grad():
        model.up.weight[3, 5] = value
    cut = cut_step(with_codes(case_of(model, IDS).step))
    runner = StepRunner(model, cut.step, emit(cut, cut.decidable))
    assert not runner.loss((IDS,), {}).isfinite()


def proposal(product: Int8Products, case: Case, asked: StepContext) -> StepChoice | Declined:
    (found,) = product.propose(case, asked)
    return found


def test_where_it_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(Net(), IDS)
    ratios = {torch.int8: 1.5, torch.float32: 1.0}
    monkeypatch.setattr(int8, "product_ratio", lambda dtype, device: ratios[dtype])
    slower = proposal(Int8Products(), case, allowing(0.5))
    assert isinstance(slower, Declined) and "take 1.5 × as long as in fp32" in words(slower.reason)
    always = proposal(Int8Products(always=True), case, allowing(0.5))
    assert isinstance(always, StepChoice) and [o.name for o in always.options] == [INT8] and always.settled
    ratios[torch.int8] = 0.2
    offered = proposal(Int8Products(), case, allowing(0.5))
    assert isinstance(offered, StepChoice) and [o.name for o in offered.options] == [INT8, "as given"]
    absent = proposal(Int8Products(always=True), case, allowing(0.5, here=False))
    assert isinstance(absent, Declined) and "not here" in words(absent.reason)
    only_its_head = Net()
    only_its_head.up.requires_grad_(False)
    only_its_head.down.requires_grad_(False)
    nothing = proposal(Int8Products(), case_of(only_its_head, IDS), allowing(0.5))
    assert isinstance(nothing, Declined) and "no product has a trained weight" in words(nothing.reason)


def test_a_stage_in_int8_takes_it() -> None:
    stage = effcompile.Stage(steps=1, precision="int8")
    assert StagePrecision(stage=stage, first=True).passes == ("int8.always=true",)
    with pytest.raises(UsageError, match="one of fp32, bf16, fp16, fp8, int8 is wanted"):
        effcompile.Stage(steps=1, precision="int7")
