"""What `optimize` returns, by its arguments: asserted by mypy (`make lint` reads this file) and by what it
makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, assert_type, get_overloads

import torch
from torch import nn

import effcompile
from effcompile.api import Decorator, Deferred, Executable, optimize
from effcompile.compiler import TrainingExecutable
from effcompile.core.goal import Goal
from effcompile.ir.plan import Plan

if TYPE_CHECKING:
    from effcompile.runtime.generation.executable import GenerationExecutable  # noqa: F401 - named in a quoted type


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_with_inputs_it_is_an_executable_of_the_mode() -> None:
    x = torch.randn(4, 8)
    made = optimize(Net().eval(), inputs=x, target="cpu-generic", backend="torch-eager")
    assert_type(made, Executable)
    assert isinstance(made, Executable)
    trained = optimize(Net(), inputs={"x": x}, mode="training", passes=["checkpoint"])
    assert_type(trained, TrainingExecutable)
    assert isinstance(trained, TrainingExecutable)


def test_a_goal_or_a_plan_says_the_mode_when_it_is_read() -> None:
    made = optimize(
        Net().eval(), inputs=torch.randn(4, 8), goal=Goal(), target="cpu-generic", backend="torch-eager"
    )
    assert_type(made, "Executable | TrainingExecutable | GenerationExecutable")
    assert isinstance(made, Executable)
    assert_type(made.plan, Plan)


def test_without_inputs_it_is_deferred() -> None:
    assert_type(optimize(Net(), max_error=0.01), Deferred)
    assert_type(optimize(Net(), mode="training", memory="1GiB"), Deferred)
    assert_type(optimize(doubled), Deferred)
    assert isinstance(optimize(Net(), max_error=0.01), Deferred)


def test_a_class_becomes_what_makes_deferred_instances() -> None:
    made = optimize(Net, max_error=0.01)
    assert_type(made, Callable[..., Deferred])
    assert isinstance(made(), Deferred)


def test_without_a_model_it_decorates() -> None:
    decorate = optimize(backend="torch-eager")
    assert_type(decorate, Decorator)
    assert_type(decorate(Net()), Deferred)
    assert_type(decorate(Net), Callable[..., Deferred])
    assert isinstance(decorate(Net()), Deferred)
    assert isinstance(decorate(Net)(), Deferred)


def test_plan_and_frontier_return_plans() -> None:
    assert_type(
        effcompile.plan(Net().eval(), torch.randn(4, 8), target="cpu-generic", backend="onnxruntime"), Plan
    )


def test_every_way_to_call_it_has_its_result() -> None:
    assert len(get_overloads(optimize)) == 9
