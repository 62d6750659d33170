"""What runs in the place of a planned step is the model's forward as it is then, not as it was planned."""

import pytest
import torch
from torch import nn

import effcompile


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x):
        return self.inner(x).pow(2).mean()


class Doubled(Net):
    def forward(self, x):
        return 2 * super().forward(x)


def on_the_model(model, patch):
    model.forward = lambda x: 2 * Net.forward(model, x)


def on_its_class(model, patch):
    was = Net.forward
    patch.setattr(Net, "forward", lambda self, x: 2 * was(self, x))


def another_class(model, patch):
    model.__class__ = Doubled


@pytest.fixture(scope="module")
def plan():
    return effcompile.plan(Net().train(), (torch.ones(4, 8),), mode="training")


@pytest.mark.filterwarnings("ignore:effcompile runs the original")
@pytest.mark.parametrize("change", [on_the_model, on_its_class, another_class])
@pytest.mark.parametrize("training", [True, False])
def test_a_replaced_forward_is_the_one_that_runs(change, training, plan, monkeypatch):
    x, model = torch.randn(4, 8), Net().train()
    run = effcompile.optimize(model, inputs=(x,), mode="training", plan=plan, on_change="eager")
    before = run(x).item()
    change(model, monkeypatch)
    run.train(training)
    loss = run(x)
    assert loss.item() == pytest.approx(2 * before, rel=1e-5)
    loss.backward()
    found = model.inner.weight.grad.clone()
    model.inner.weight.grad = None
    model(x).backward()
    torch.testing.assert_close(found, model.inner.weight.grad)
