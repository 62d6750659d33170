"""The updates that are measured: the first one has the gradients of the step that was verified, and is no
forward and backward more.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from effcompile.ir.figures import Check
from effcompile.ops.optimizers import StatesForm
from effcompile.passes.training.optimizer_ways import StatesOption
from effcompile.proof.training import updates
from effcompile.proof.training.verify import run as run_step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = (
            nn.Linear(5, 7),
            nn.Linear(7, 3),
            nn.Parameter(torch.ones(3), requires_grad=False),
        )
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.second(self.first(x).tanh()) * self.frozen).square().mean()


@pytest.mark.parametrize("known", [True, False])
def test_the_states_are_those_after_two_steps(known: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients: Mapping[str, Tensor | None] = run_step(lambda: model(x), model).gradients
    optimizer, model.calls = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), 0
    found = updates.run(lambda: model(x), model, optimizer, None, {}, gradients if known else None)
    assert model.calls == (1 if known else 2) and found.step_seconds > 0 and found.peak_bytes > 0
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())

    other = Net()
    other.load_state_dict(model.state_dict())
    theirs = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        other(x).backward()
        theirs.step()
        theirs.zero_grad()
    for ours, wanted in zip(optimizer.state.values(), theirs.state.values(), strict=True):
        assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("steps", [2, 5])
def test_more_steps_are_run_and_are_not_in_the_seconds(steps: int) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 5)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    updates.run(lambda: model(x), model, optimizer, None, {}, steps=steps)
    assert model.calls == steps
    assert {int(state["step"]) for state in optimizer.state.values()} == {steps}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = updates.repeated(lambda: model(x), model, {}, steps)
    assert model.calls == 2 * steps and found.update_seconds == 0 and found.peak_bytes > 0
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


@pytest.mark.parametrize("sample", [8, 1 << 16])
@pytest.mark.parametrize("wrong", [0, 1])
def test_the_first_elements_of_a_large_parameter_stand_for_all(
    sample: int, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update by another learning rate is seen on them, too."""
    monkeypatch.setattr(updates, "_SAMPLE", sample)
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 5)
    gradients = run_step(lambda: model(x), model).gradients
    given = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    sizes: list[int] = []
    real = updates._updated

    def watched(tensor: Tensor, group: Mapping[str, object], *rest: Any) -> Tensor:
        sizes.append(tensor.numel())
        planned = len(sizes) % 2 == 1
        return real(tensor, {**group, "lr": 2e-2} if wrong and planned else group, *rest)

    monkeypatch.setattr(updates, "_updated", watched)
    found = updates.check(StatesOption(form=StatesForm()), given, model, gradients)
    assert isinstance(found, Check) and found.passed is not bool(wrong)
    assert (
        (max(sizes) <= 8 and found.note is not None)
        if sample == 8
        else (max(sizes) == 35 and found.note is None)
    )
