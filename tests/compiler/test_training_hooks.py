"""Hooks that the outermost module has before its step is planned run once a call, around the planned step, as
they do around the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import effcompile
from effcompile.core.errors import InputsError


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean() * scale


def doubles(model: nn.Module, calls: list[str]) -> None:
    def hook(module: nn.Module, given: Any, loss: Tensor) -> Tensor:
        calls.append("forward")
        return loss * 2

    model.register_forward_hook(hook)


def shifts(model: nn.Module, calls: list[str]) -> None:
    def hook(module: nn.Module, given: tuple[Tensor]) -> Tensor:
        calls.append("pre")
        return given[0] + 1

    model.register_forward_pre_hook(hook)


def names(model: nn.Module, calls: list[str]) -> None:
    """Another keyword than the caller gave, of another shape."""

    def hook(
        module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        calls.append("pre")
        return (), {"x": args[0][:2], "scale": 3.0}

    model.register_forward_pre_hook(hook, with_kwargs=True)


def backward(model: nn.Module, calls: list[str]) -> None:
    def hook(module: nn.Module, into: Any, out: tuple[Tensor]) -> None:
        calls.append(f"backward {float(out[0]):.1f}")

    model.register_full_backward_hook(hook)


def step(run: Any, x: Tensor) -> list[Tensor]:
    run.zero_grad()
    loss = run(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in run.parameters() if p.grad is not None)]


@pytest.mark.parametrize("register", [doubles, shifts, names, backward])
def test_a_hook_of_the_outermost_module_runs_once(register: Callable[[nn.Module, list[str]], None]) -> None:
    model, x = Small().train(), torch.randn(4, 16)
    calls: list[str] = []
    register(model, calls)
    planned = effcompile.optimize(model, inputs=x, mode="training")
    for _ in range(2):
        calls.clear()
        wanted, said = step(model, x), list(calls)
        calls.clear()
        torch.testing.assert_close(step(planned, x), wanted)
        assert calls == said and len(said) == 1


def test_a_hook_beside_a_loss_function_is_refused() -> None:
    """It would be given the loss, where the model gives it the outputs."""
    model, x = nn.Linear(16, 4), torch.randn(4, 16)
    doubles(model, [])
    with pytest.raises(InputsError, match="forward hook"):
        effcompile.optimize(
            model, inputs=(x,), mode="training", loss=lambda outputs, inputs: outputs.square().mean()
        )


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_a_weight_that_a_hook_of_torch_sets_is_trained_on(norm: Callable[[nn.Module], nn.Module]) -> None:
    """Until its first call the weight of spectral_norm is the trained one's own memory, which an optimizer
    writes to.
    """

    def made() -> Small:
        model = Small()
        norm(model.up)
        return model

    x = torch.randn(4, 16)
    model, plain = made(), made()
    planned = effcompile.optimize(model, inputs=(x,), mode="training")
    assert any("model.up.weight" in str(note) for note in planned.plan.notes)
    for each in (planned, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            each(x).backward()
            optimizer.step()
    for ours, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)
