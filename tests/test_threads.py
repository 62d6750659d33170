"""Several threads before a plan is there: one makes it, the others wait for it, and all get the
right answer.
"""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import effcompile
from effcompile import compiler, modes

COUNT = 6


def in_threads(call: Callable[[int], Any]) -> list[Any]:
    """What each of six threads got, or what it raised; all start at the same instant."""
    results: list[Any] = [None] * COUNT
    start = threading.Barrier(COUNT)

    def run(i: int) -> None:
        start.wait()
        try:
            results[i] = call(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def plannings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of the compiler's entry, once for each time that it is called."""
    seen: list[str] = []

    def counted(name: str, entry: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return entry(*args, **kwargs)

        return call

    for name in ("optimize", "optimize_training"):
        monkeypatch.setattr(compiler, name, counted(name, getattr(compiler, name)))
    return seen


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()


def test_one_thread_plans_and_the_others_wait(model: nn.Module, plannings: list[str]) -> None:
    fast = effcompile.optimize(model, target="cpu-generic", backend="onnxruntime")
    xs = torch.randn(COUNT, 4, 16)
    with torch.no_grad():
        found, wanted = in_threads(lambda i: fast(xs[i]).detach()), [model(x) for x in xs]
    assert plannings == ["optimize"]
    for one, other in zip(found, wanted, strict=True):
        assert isinstance(one, torch.Tensor), one
        assert torch.allclose(one, other, atol=1e-5)


def test_a_decorated_function_and_a_decorated_forward_are_planned_once(plannings: list[str]) -> None:
    @effcompile.optimize(target="cpu-generic", backend="torch-eager")
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x * 2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 8)

        @effcompile.optimize(target="cpu-generic", backend="torch-eager")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu()

    xs, net = torch.randn(COUNT, 4, 16), Net().eval()
    for call, wanted in (
        (scaled, lambda x: torch.nn.functional.gelu(x * 2)),
        (net, lambda x: net.linear(x).relu()),
    ):
        plannings.clear()
        found = in_threads(lambda i, call=call: call(xs[i]).detach())
        assert plannings == ["optimize"]
        for one, x in zip(found, xs, strict=True):
            assert isinstance(one, torch.Tensor), one
            assert torch.allclose(one, wanted(x), atol=1e-6)


def test_different_models_are_planned_one_after_the_other() -> None:
    models = [nn.Sequential(nn.Linear(8, 8 + i), nn.ReLU()).eval() for i in range(COUNT)]
    x = torch.randn(2, 8)
    found = in_threads(
        lambda i: effcompile.optimize(models[i], inputs=x, target="cpu-generic", backend="torch-eager")
    )
    for executable, model in zip(found, models, strict=True):
        assert isinstance(executable, nn.Module), executable
        assert torch.allclose(executable(x), model(x), atol=1e-6)


def test_a_training_step_is_planned_once(plannings: list[str]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).square().mean()

    torch.manual_seed(0)
    model, xs = Net(), torch.randn(COUNT, 4, 16)
    fast = effcompile.optimize(model, mode="training", passes=["no-pointwise"])
    found = in_threads(lambda i: fast(xs[i]))
    assert plannings == ["optimize_training"]
    for loss, x in zip(found, xs, strict=True):
        assert isinstance(loss, torch.Tensor), loss
        model.zero_grad()
        loss.backward()
        ours = model.linear.weight.grad
        assert ours is not None
        model.zero_grad()
        model(x).backward()
        assert model.linear.weight.grad is not None and torch.allclose(
            ours, model.linear.weight.grad, atol=1e-6
        )


def test_a_process_forked_while_another_thread_plans_can_plan() -> None:
    with modes.PLANNING:
        forked = threading.Thread(
            target=lambda: results.append(os.waitstatus_to_exitcode(os.waitpid(_fork(), 0)[1]))
        )
        results: list[int] = []
        forked.start()
        forked.join(0.2)
        assert not results  # it waits for the planning to end
    forked.join(20)
    assert results == [0]


def _fork() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0 if modes.PLANNING.acquire(timeout=5) else 1)
    return child
