"""The Python doors: function, decorators, torch.compile backend.

One small exact model on stock torch, so that each call is quick.
"""

import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import effcompile
from effcompile import api, dynamo, modes
from effcompile.core.errors import FormatError, InputsError, UnknownNameError, UsageError
from effcompile.core.goal import Mode
from effcompile.ir.plan import Plan

QUICK: dict[str, Any] = {"backend": "torch-eager", "dynamic": False}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.body(x) + self.shift
        return {"y": y if scale is None else y * scale}


@pytest.fixture
def net() -> Net:
    return Net().eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5))


def test_function_form(net: Net, x: torch.Tensor, tmp_path: Path) -> None:
    fast = effcompile.optimize(net, inputs=x, **QUICK)
    assert isinstance(fast, effcompile.Executable)
    assert isinstance(fast, nn.Module)
    assert same(fast(x)["y"], net(x)["y"])
    assert list(fast.state_dict()) == list(net.state_dict())
    assert {id(p) for p in fast.parameters()} == {id(p) for p in net.parameters()}
    path = fast.plan.save(tmp_path / "plan.json")
    again = effcompile.optimize(net, inputs=(x,), plan=path, dynamic=False)
    assert again.plan.options() == fast.plan.options()
    assert same(again(x)["y"], net(x)["y"])


def test_plan_runs_nothing_and_knows_other_machines(net: Net, x: torch.Tensor) -> None:
    made = effcompile.plan(net, {"x": x}, target="h100-sxm", dynamic=False)
    assert isinstance(made, Plan)
    assert made.measured is None
    assert made.target == "h100-sxm"
    assert made.predicted.seconds is not None


def test_frontier_is_a_front(net: Net, x: torch.Tensor) -> None:
    plans = effcompile.frontier(net, x, points=4, max_error=0.2, **QUICK)
    assert 1 <= len(plans) <= 4
    costs = [(p.predicted.peak_bytes or 0, p.predicted.seconds or 0.0) for p in plans]
    assert all(a[0] <= b[0] and a[1] >= b[1] for a, b in pairwise(costs))


def test_deferred_is_built_per_shape_at_the_first_call(
    net: Net, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = counted(monkeypatch)
    fast = effcompile.optimize(net, **QUICK)
    assert built == []
    with pytest.raises(UsageError, match="first call"):
        fast.report()
    for rows in (2, 2, 3, 2):
        batch = x[:1].expand(rows, 16)
        assert same(fast(batch)["y"], net(batch)["y"])
    assert built == ["Net", "Net"]
    assert fast.plan.model == "Net"
    assert fast.body is net.body


def test_deferred_is_built_again_for_new_weights(net: Net, x: torch.Tensor) -> None:
    fast = effcompile.optimize(net, **QUICK)
    fast(x)
    fast.load_state_dict({name: value * 2 for name, value in net.state_dict().items()})
    assert same(fast(x)["y"], net(x)["y"])


def test_deferred_runs_the_original_in_training_and_says_so(net: Net, x: torch.Tensor) -> None:
    fast = effcompile.optimize(net, **QUICK)
    fast.train()
    assert net.training
    with pytest.warns(UserWarning, match="training mode"), torch.enable_grad():
        fast(x)["y"].sum().backward()
    assert net.body[0].weight.grad is not None


def test_decorated_function_owns_the_modules_it_uses(net: Net, x: torch.Tensor) -> None:
    @effcompile.optimize(**QUICK)
    def total(x: torch.Tensor) -> torch.Tensor:
        return net(x)["y"].sum(-1)

    assert same(total(x), net(x)["y"].sum(-1))
    assert total.plan.model == "total"
    assert "net.body.0.weight" in dict(total.named_parameters())


def test_decorated_class_makes_optimized_instances(x: torch.Tensor) -> None:
    Fast = effcompile.optimize(**QUICK)(Net)  # noqa: N806
    fast = Fast()
    assert same(fast(x)["y"], Net().eval()(x)["y"])
    assert fast.plan.model == "Net"


def test_decorated_forward_is_one_per_instance(x: torch.Tensor) -> None:
    class Doubled(Net):
        @effcompile.optimize(**QUICK)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * (self.body(x) + self.shift)

    one, other = Doubled().eval(), Doubled().eval()
    other.shift.zero_()
    assert same(one(x), 2 * Net()(x)["y"])
    assert same(other(x), 2 * (Net()(x)["y"] - 1))


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        ({"optimizer": torch.optim.SGD}, UsageError, "optimizer is for a training step"),
        ({"max_eror": 0.1}, UnknownNameError, "Did you mean 'max_error'"),
        ({"max_error": -1}, UsageError, "max_error = -1"),
        ({"target": "h10"}, UnknownNameError, "h100-sxm"),
        ({"backend": "onnx"}, UnknownNameError, "Did you mean 'onnxruntime'"),
        ({"passes": ["quantise"]}, UnknownNameError, "Did you mean 'quantize'"),
        ({"plan": "nowhere.json"}, UsageError, "Cannot read the plan"),
        ({"inputs": 3}, InputsError, "is not usable"),
        ({"plan": {}}, UsageError, "A dict is no plan"),
        ({"passes": [None]}, UsageError, "passes = \\[None\\]"),
        ({"passes": "quantize"}, UsageError, "a sequence of names"),
        ({"backend": {"torch": 1}}, UsageError, "backend is a dict"),
        ({"devices": 2, "mode": "training"}, UsageError, "devices is of effcompile.plan"),
        ({"strategy": "tp=2", "mode": "training"}, UsageError, "give mesh=init_device_mesh"),
        ({"mesh": 2, "mode": "training"}, UsageError, "mesh = 2 is none. Give the mesh of the processes"),
    ],
)
def test_bad_requests(
    net: Net, x: torch.Tensor, request_: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        effcompile.optimize(net, **{"inputs": x, **request_})


def test_points_that_are_no_number(net: Net, x: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="points = 'many' must be a whole number"):
        effcompile.frontier(net, x, points="many", **QUICK)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_model_without_values_is_planned_alone(x: torch.Tensor, mode: Mode) -> None:
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(UsageError, match=r"is on the meta device.*effcompile\.plan decides for such"):
        effcompile.optimize(empty, inputs=x, mode=mode)


def test_a_model_that_is_none(x: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="model is a int"):
        effcompile.optimize(3, inputs=x)


def test_a_plan_of_another_model_or_goal(net: Net, x: torch.Tensor) -> None:
    plan = effcompile.plan(net, x, **QUICK)
    with pytest.raises(FormatError, match="another model"):
        effcompile.optimize(nn.Linear(16, 16).eval(), inputs=x, plan=plan)
    with pytest.raises(UsageError, match="another goal"):
        effcompile.optimize(net, inputs=x, plan=plan, max_error=0.5)
    with pytest.raises(UsageError, match="for the backend"):
        effcompile.optimize(net, inputs=x, plan=plan, backend="onnxruntime")


def test_torch_compile_backend(net: Net, x: torch.Tensor) -> None:
    torch.compiler.reset()
    before = len(effcompile.compilations())
    compiled = torch.compile(net, backend="effcompile", options={"backend": "torch-eager"}, dynamic=False)
    assert same(compiled(x)["y"], net(x)["y"])
    made = effcompile.compilations()[before:]
    assert [m.fallback for m in made] == [""]
    assert made[0].executable is not None
    assert {"body.0.weight", "body.2.bias"} <= set(made[0].executable.state_dict())
    net.body[0].weight.add_(1.0)  # the optimized graph holds the old value: it must not be used
    with pytest.warns(UserWarning, match="weights"):
        assert same(compiled(x)["y"], net(x)["y"])


def test_torch_compile_backend_specialises_sizes(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    built = counted(monkeypatch)
    compiled = torch.compile(
        net, backend=api.dynamo_backend, options={"backend": "torch-eager"}, dynamic=True
    )
    for rows in (2, 3, 3):
        batch = torch.randn(rows, 16)
        assert same(compiled(batch)["y"], net(batch)["y"])
    assert built == ["DynamoGraph", "DynamoGraph"]


def test_torch_compile_backend_leaves_gradients_alone(net: Net, x: torch.Tensor) -> None:
    torch.compiler.reset()
    compiled = torch.compile(net, backend=api.dynamo_backend, options={"backend": "torch-eager"})
    with pytest.warns(UserWarning, match="needs gradients"), torch.enable_grad():
        compiled(x)["y"].sum().backward()
    assert net.body[0].weight.grad is not None
    assert "gradients" in effcompile.compilations()[-1].fallback


def test_torch_compile_backend_falls_back_where_it_cannot(
    net: Net, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()

    def refuse(*_: object, **__: object) -> None:
        raise UsageError("no backend takes this model")

    monkeypatch.setattr(dynamo.compiler, "optimize", refuse)
    compiled = torch.compile(net, backend=api.dynamo_backend)
    with pytest.warns(UserWarning, match="no backend takes"):
        assert same(compiled(x)["y"], net(x)["y"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once, not at each call
        assert same(compiled(x)["y"], net(x)["y"])


def test_torch_compile_backend_refuses_unknown_options() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'max_error'"):
        api.dynamo_backend(torch.fx.symbolic_trace(nn.Identity()), [], options={"max_eror": 1})


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that are really optimized from here on."""
    built: list[str] = []
    original = modes.compiler.optimize

    def optimize(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        built.append(type(model).__name__)
        return original(model, *args, **kwargs)

    monkeypatch.setattr(modes.compiler, "optimize", optimize)
    return built


def test_a_name_that_is_known_twice_is_said_once() -> None:
    """Two kinds of sites have the name of one block."""
    assert "Known: a, b." in str(UnknownNameError("site", "c", ["a", "b", "a"]))
