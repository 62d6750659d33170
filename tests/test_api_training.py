"""Training by the Python doors: function, decorators, Deferred.

The compiler is a fake where only the handling is tested.
"""

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli_training import training_plan
from torch import nn

import effcompile
from effcompile import api, compiler, deferred, dynamo
from effcompile.core.causes import Said
from effcompile.core.errors import InfeasibleError, InputsError, UsageError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Plan


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A loss of x and y."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.width = width

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.mse_loss(x, y), "hidden": x}


def batch(rows: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, 16, generator=generator), "y": torch.randn(rows, 16, generator=generator)}


class FakeExecutable(nn.Module):
    """Runs the model, and counts."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.__dict__.update(model=model, plan=plan, runs=0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["runs"] += 1
        return self.model(*args, **kwargs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Requests that reach `compiler.optimize_training`, which is a fake."""
    found: list[dict[str, Any]] = []

    def optimize_training(model: nn.Module, args: Any, kwargs: Any, **request: Any) -> FakeExecutable:
        found.append({"model": model, "args": args, "kwargs": kwargs, **request})
        return FakeExecutable(model, training_plan(request["goal"]))

    monkeypatch.setattr(compiler, "optimize_training", optimize_training)
    return found


@pytest.fixture(autouse=True)
def _grad() -> Iterator[None]:
    with torch.enable_grad():
        yield


def test_function_form_asks_for_a_training_step(calls: list[dict[str, Any]]) -> None:
    net = Net()

    def loss(outputs: Any, inputs: Any) -> Any:
        return outputs["loss"]

    effcompile.optimize(
        net,
        inputs=batch(),
        memory="900MiB",
        mode="training",
        keep_outputs=True,
        loss=loss,
        passes=["no-loss_head"],
    )
    call = calls[0]
    assert call["model"] is net
    assert set(call["kwargs"]) == {"x", "y"}
    assert call["goal"] == Goal(mode="training", memory=900 * 2**20)
    assert (call["keep_outputs"], call["loss"], call["passes"], call["plan"]) == (
        True,
        loss,
        ["no-loss_head"],
        None,
    )
    assert not {"dynamic", "calibration"} & set(call)


def test_plan_and_frontier_go_to_the_training_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def planner(*_: Any, **request: Any) -> Any:
        seen.append(request)
        return []

    monkeypatch.setattr(compiler, "plan_parts", planner)
    monkeypatch.setattr(compiler, "frontier_training", planner)
    effcompile.plan(Net(), batch(), mode="training", memory="1GiB", target="h100-sxm")
    effcompile.frontier(Net(), batch(), mode="training")
    effcompile.frontier(Net(), batch(), mode="training", points=3)
    assert seen[0]["target"] == "h100-sxm"
    assert ["points" in request for request in seen] == [False, False, True]
    assert all("backend" not in request for request in seen)


def test_a_model_in_eval_mode_is_put_in_training_mode_with_a_warning(calls: list[dict[str, Any]]) -> None:
    net = Net().eval()
    with pytest.warns(UserWarning, match="Net was in eval mode"):
        effcompile.optimize(net, inputs=batch(), mode="training")
    assert net.blocks[0].dropout.training
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        effcompile.optimize(net, inputs=batch(), mode="training")


def test_deferred_plans_at_the_first_call_and_for_each_shape(calls: list[dict[str, Any]]) -> None:
    fast = effcompile.optimize(Net(), memory="900MiB", mode="training")
    assert calls == []
    for _ in range(2):
        fast(**batch(8))["loss"].backward()
    assert len(calls) == 1
    with pytest.warns(
        UserWarning, match=r"again, under the same goal, for the shapes x 4×16 float32, y 4×16 float32"
    ):
        fast(**batch(4))
    fast(**batch(8))
    assert [call["kwargs"]["x"].shape[0] for call in calls] == [8, 4]
    assert calls[0]["goal"] == calls[1]["goal"]
    assert [executable.runs for executable in fast.executables.values()] == [3, 1]
    assert fast.plan.goal.memory == 900 * 2**20


def test_deferred_runs_the_model_for_the_ninth_shape_and_says_so(calls: list[dict[str, Any]]) -> None:
    fast = effcompile.optimize(Net(), mode="training")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in range(1, 9):
            fast(**batch(rows))
    with pytest.warns(UserWarning, match="already planned for 8 shapes"):
        fast(**batch(9))["loss"].backward()
    assert len(calls) == 8


def test_deferred_is_the_model_in_eval_mode_and_without_gradients(calls: list[dict[str, Any]]) -> None:
    net = Net()
    fast = effcompile.optimize(net, mode="training")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            fast(**batch())
        fast.eval()
        assert not net.blocks[0].dropout.training
        assert torch.equal(fast(**batch())["loss"], net(**batch())["loss"])
    assert calls == []
    fast.train()
    fast(**batch())
    assert len(calls) == 1


def test_a_saved_plan_is_applied_at_its_shape_and_planned_anew_at_others(calls: list[dict[str, Any]]) -> None:
    plan = training_plan(Goal(mode="training", memory=900 * 2**20))
    fast = effcompile.optimize(Net(), plan=plan)
    fast(**batch(8))
    with pytest.warns(UserWarning, match="again"):
        fast(**batch(4))
    assert [call["plan"] for call in calls] == [plan, None]
    assert calls[1]["goal"] == plan.goal


def test_new_weights_need_no_new_plan(calls: list[dict[str, Any]]) -> None:
    fast = effcompile.optimize(Net(), mode="training")
    fast(**batch())
    fast.load_state_dict(Net().state_dict())
    fast(**batch())
    assert len(calls) == 1


def test_deferred_looks_like_the_model_to_trainers(calls: list[dict[str, Any]]) -> None:
    import inspect

    net = Net()
    fast = effcompile.optimize(net, mode="training")
    assert list(inspect.signature(fast.forward).parameters) == ["x", "y"]
    assert [name for name, _ in fast.named_modules()] == [name for name, _ in net.named_modules()]
    assert [name for name, _ in fast.named_parameters()] == list(net.state_dict())
    assert list(fast.state_dict()) == list(net.state_dict())
    assert fast.width == 16
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    before = net.blocks[0].up.weight.clone()
    fast(**batch())["loss"].backward()
    optimizer.step()
    fast.zero_grad()
    assert not torch.equal(net.blocks[0].up.weight, before)
    assert net.blocks[0].up.weight.grad is None
    fast.to(torch.float64)
    assert net.blocks[0].up.weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"optimizer": torch.optim.SGD}, "optimizer is for a training step"),
        ({"mode": "training", "dynamic": True}, "one batch shape"),
        ({"mode": "training", "calibration": [torch.ones(1)]}, "calibration measures errors"),
        ({"mode": "training", "loss": 3}, "loss is a int"),
        ({"mode": "training", "reads": "last"}, "every position"),
        ({"mode": "training", "memory": 0}, "at least one byte"),
        ({"mode": "training", "memory": "-1GiB"}, "not a size"),
        ({"keep_outputs": True}, "keep_outputs is for a training step"),
        ({"loss": lambda outputs, inputs: outputs}, "loss is for a training step"),
    ],
)
@pytest.mark.parametrize("door", ["optimize", "plan", "frontier"])
def test_bad_requests(calls: list[dict[str, Any]], request_: dict[str, Any], says: str, door: str) -> None:
    given = {"inputs": batch(), **request_}
    with pytest.raises(UsageError, match=says):
        getattr(effcompile, door)(Net(), **given)
    assert calls == []


# ------------------------------------------------------------------ with the real compiler


def gradients(model: nn.Module, seed: int = 3, rows: int = 8) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one step, dropout drawn from the seed."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    result = model(**batch(rows))
    loss = result["loss"] if isinstance(result, dict) else result
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, reference: nn.Module, rows: int = 8) -> None:
    (loss, found), (wanted_loss, wanted) = gradients(model, rows=rows), gradients(reference, rows=rows)
    assert torch.allclose(loss, wanted_loss, rtol=1e-6)
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-4, atol=1e-7) for name in wanted)


def test_planned_step_is_the_models_own_and_within_its_budget(tmp_path: Path) -> None:
    unlimited = effcompile.plan(Net(), batch(512), mode="training").peak_bytes
    assert unlimited is not None
    fast = effcompile.optimize(Net(), inputs=batch(512), mode="training", memory=int(0.8 * unlimited))
    assert isinstance(fast, nn.Module)
    assert fast.plan.met
    assert fast.plan.peak_bytes is not None
    assert fast.plan.peak_bytes <= 0.8 * unlimited
    assert {d.option for d in fast.plan.decisions if d.kind == "checkpoint"} != {"keep everything"}
    assert_same(fast, Net(), rows=512)
    again = effcompile.optimize(Net(), inputs=batch(512), plan=fast.plan.save(tmp_path / "plan.json"))
    assert again.plan.options() == fast.plan.options()
    with pytest.raises(InputsError, match=r"512.*|8"):
        fast(**batch(8))
    with pytest.raises(InfeasibleError) as caught:
        effcompile.plan(Net(), batch(512), mode="training", memory=1000)
    least = caught.value.nearest["memory"]
    assert effcompile.plan(Net(), batch(512), mode="training", memory=int(least)).peak_bytes <= least  # type: ignore[operator]


def test_deferred_steps_of_two_shapes() -> None:
    net = Net()
    fast = effcompile.optimize(net, mode="training")
    assert_same(fast, Net(), rows=8)
    with pytest.warns(UserWarning, match="again"):
        assert_same(fast, Net(), rows=4)


def test_decorated_function_and_forward_run_the_planned_step() -> None:
    net = Net()

    @effcompile.optimize(mode="training")
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 2 * net(x, y)["loss"]

    step(**batch()).backward()
    assert net.blocks[0].up.weight.grad is not None
    assert step.plan.model == "step"
    assert planned_runs(step)

    class Doubled(Net):
        @effcompile.optimize(mode="training")
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return 2 * nn.functional.mse_loss(x, y)

    doubled = Doubled()
    doubled(**batch()).backward()
    assert doubled.blocks[0].up.weight.grad is not None
    assert planned_runs(doubled.forward)


def planned_runs(made: Any) -> bool:
    """Whether the latest executable's call ends in its planned step, not in the model's own forward."""
    loss = made.latest(**batch())
    return "_Function" in type(loss.grad_fn).__name__


# ------------------------------------------------------------------ torch.compile


def test_torch_compile_gives_graphs_that_need_gradients_to_the_planner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.compiler.reset()
    goals: list[Goal] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any, goal: Goal) -> Any:
        goals.append(goal)
        return gm.forward

    monkeypatch.setattr(dynamo.compiler, "training_backend", backend)
    net = Net()
    compiled = torch.compile(net, backend=api.dynamo_backend, options={"memory": "900MiB"})
    compiled(**batch())["loss"].backward()
    assert goals == [Goal(mode="training", memory=900 * 2**20)]
    assert net.blocks[0].up.weight.grad is not None
    assert effcompile.compilations()[-1].step is not None


def test_torch_compile_trains_within_a_budget() -> None:
    torch.compiler.reset()
    net = Net()
    for block in net.blocks:
        block.dropout.p = 0.0
    reference = copy.deepcopy(net)
    compiled = torch.compile(net, backend="effcompile", options={"memory": "1GiB"}, dynamic=False)
    (loss, found), (wanted_loss, wanted) = gradients(compiled), gradients(reference)
    assert effcompile.compilations()[-1].step is not None, effcompile.compilations()[-1].fallback
    assert torch.allclose(loss, wanted_loss, rtol=1e-6)
    assert all(
        torch.allclose(found[f"_orig_mod.{name}"], wanted[name], rtol=1e-4, atol=1e-7) for name in wanted
    )
    assert len(found) == len(wanted)


def test_torch_compile_says_when_a_step_cannot_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()

    def refuse(*_: Any) -> None:
        raise InfeasibleError(Said("900 MiB are too little"))

    monkeypatch.setattr(dynamo.compiler, "training_backend", refuse)
    net = Net()
    compiled = torch.compile(
        net, backend=api.dynamo_backend, options={"memory": "900MiB", "mode": "training"}
    )
    with pytest.warns(UserWarning, match="unplanned: 900 MiB are too little"):
        compiled(**batch())["loss"].backward()
    assert net.blocks[0].up.weight.grad is not None
    assert "too little" in effcompile.compilations()[-1].fallback
    with torch.no_grad():
        compiled(**batch())


def test_torch_compile_refuses_inference_options_in_training() -> None:
    with pytest.raises(UsageError, match=r"'passes'.*for inference"):
        api.dynamo_backend(
            torch.fx.symbolic_trace(nn.Identity()), [], options={"mode": "training", "passes": ["quantize"]}
        )


def test_shapes_are_told_as_text() -> None:
    assert (
        deferred._shapes((torch.ones(2, 3),), {"mask": torch.ones(4, dtype=torch.long), "flag": True})
        == "2×3 float32, mask 4 int64"
    )


def test_generate_of_a_deferred_model_says_once_that_the_original_runs() -> None:
    class Speaker(Net):
        def generate(self, count: int) -> int:
            return count + 1

    made = effcompile.optimize(Speaker(), mode="training")
    assert hasattr(made, "generate")
    with pytest.warns(UserWarning, match=r"runs the original Speaker: generate\(\) calls it token by token"):
        assert made.generate(1) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made.generate(2) == 3
