"""Gradients of parts of one value are summed in place: the same step, in fewer bytes, and only where nobody
else reads the sum.
"""

import pytest
import torch
from step_helpers import assert_equal, eager, joint_step, run
from torch import Tensor, nn
from train_helpers import context, forms_of

from effcompile.ir.step import Step
from effcompile.passes.training.parts import IN_PLACE, KIND, Parts

aten = torch.ops.aten
STEPS = 6


class Scan(nn.Module):
    """s_t = a_t s_{t−1} + b_t, read step by step, by `select` or by `slice`; `shown`: the whole is read once
    more.
    """

    def __init__(self, *, slices: bool = False, shown: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.slices, self.shown = nn.Linear(8, 8), nn.Linear(8, 8), slices, shown

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).sigmoid(), self.b(x)
        state, seen = torch.zeros_like(x[:, :1] if self.slices else x[:, 0]), []
        for t in range(STEPS):
            at = slice(t, t + 1) if self.slices else t
            state = a[:, at] * state + b[:, at]
            seen.append(state)
        loss = torch.stack(seen).square().mean()
        return loss + a.square().mean() if self.shown else loss


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch)


def made(model: nn.Module) -> tuple[Step, dict[str, Tensor]]:
    batch = {"x": torch.randn(3, STEPS, 8)}
    return joint_step(model, batch, loss_of), batch


def padded(step: Step) -> int:
    return sum(
        node.target in (aten.select_backward.default, aten.slice_backward.default)
        for node in step.graph.nodes
    )


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("shown", [False, True])
def test_the_step_is_the_same_and_no_part_but_the_first_is_padded(slices: bool, shown: bool) -> None:
    torch.manual_seed(0)
    model = Scan(slices=slices, shown=shown)
    step, batch = made(model)
    (form,), declined = forms_of(step, Parts())
    assert not declined and form.options == {KIND: IN_PLACE}
    # what is read once more is there for the first one, too
    assert padded(step) == 2 * STEPS and padded(form.step) == 2 - shown
    loss, gradients = run(form.step, model, batch)
    wanted = run(step, model, batch)
    assert torch.equal(loss, wanted[0]) and all(
        torch.equal(gradients[name], wanted[1][name]) for name in wanted[1]
    )
    assert_equal((loss, gradients), eager(model, batch, loss=loss_of), 1e-6)


def test_few_parts_stay_padded() -> None:
    step, _ = made(Scan())
    (form,), _ = forms_of(step, Parts(fewest=STEPS + 1))
    assert form.step is step and not form.options


def test_a_saved_plan_has_the_sums_that_it_was_made_with() -> None:
    step, _ = made(Scan())
    (choice,) = Parts(fewest=2).propose(forms_of(step)[0][0], context())
    again = Parts().apply(forms_of(step)[0][0], choice, choice.options[0])
    assert padded(again.step) == 2


class ReadTwice(nn.Module):
    """The sums so far are read by others, too: every second gradient of a part goes on into
    another product.
    """

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        whole = torch.zeros_like(x)
        total = whole.sum()
        for t in range(STEPS):
            whole = whole + torch.ops.aten.select_backward(x[:, t] * w, list(x.shape), 1, t)
            total = total + whole.square().sum()
        return total


def test_a_sum_that_somebody_else_reads_is_not_written() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(8))
    model.inner = ReadTwice()
    model.forward = lambda x: model.inner(x, model.w)  # type: ignore[method-assign]
    step, batch = made(model)
    for form in forms_of(step, Parts(fewest=2))[0]:
        assert_equal(run(form.step, model, batch), eager(model, batch, loss=loss_of), 1e-6)
