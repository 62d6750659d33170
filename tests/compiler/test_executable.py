"""The Executable is called like the model, refuses other inputs clearly, and its plan can be applied again."""

import pytest
import torch
from torch import nn

from effcompile.compiler import optimize, run_artifact
from effcompile.core.errors import FormatError, InputsError, UsageError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Plan


class Two(nn.Module):
    """Two inputs, one optional, and a dictionary out."""

    def __init__(self, width=16):
        super().__init__()
        self.a, self.b = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x, scale=None, flag=False):
        y = self.b(torch.relu(self.a(x)))
        return {"y": y if scale is None else y * scale, "x": x}


def inputs():
    torch.manual_seed(0)
    return torch.randn(4, 6, 16), torch.rand(16)


@pytest.fixture(scope="module")
def made():
    torch.manual_seed(0)
    model = Two()
    x, scale = inputs()
    return model, optimize(model, (x,), {"scale": scale}, goal=Goal(max_error=0.05), target="cpu-generic", backend="onnxruntime")


def test_any_way_of_passing_the_same_arguments(made):
    model, fast = made
    x, scale = torch.randn(3, 9, 16), torch.rand(16)
    wanted = model(x, scale)["y"]
    for found in (fast(x, scale=scale), fast(x, scale), fast(scale=scale, x=x)):
        assert list(found) == ["y", "x"]
        assert float((found["y"] - wanted).norm() / wanted.norm()) < 0.05
        assert torch.equal(found["x"], x)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((torch.randn(3, 9, 8),), {"scale": torch.rand(16)}, r"x is float32 \[3, 9, 8\]; the plan takes float32"),
        ((torch.randn(3, 9, 16).double(),), {"scale": torch.rand(16)}, "x is float64"),
        ((torch.randn(3, 9, 16),), {}, "missing: scale"),
        ((torch.randn(3, 9, 16),), {"scale": torch.rand(16), "flag": True}, "not planned for: flag"),
        ((), {"scale": torch.rand(16), "nonsense": 1}, "cannot be called so"),
    ],
)
def test_other_inputs_are_refused(made, args, kwargs, text):
    with pytest.raises(InputsError, match=text):
        made[1](*args, **kwargs)


def test_it_has_the_models_parameters_and_trains_the_original(made):
    model, fast = made
    assert list(fast.state_dict()) == list(model.state_dict())
    assert {id(p) for p in fast.parameters()} == {id(p) for p in model.parameters()}
    x, scale = inputs()
    fast.train()
    fast(x, scale=scale)["y"].sum().backward()
    assert model.a.weight.grad is not None
    fast.eval()
    assert not fast(x, scale=scale)["y"].requires_grad
    with pytest.raises(InputsError, match="fixed when it is planned"):
        fast.load_state_dict(model.state_dict())


def test_saved_run_and_applied_again_without_solving(made, tmp_path):
    model, fast = made
    fast.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "plan.json"]
    x, scale = inputs()
    ran = run_artifact(tmp_path, ((x,), {"scale": scale}))
    assert ran.outputs[0].startswith("float32 [4 × 6 × 16]")
    assert run_artifact(tmp_path).outputs[0].startswith("float32 [4 × 6 × 16]")
    with pytest.raises(InputsError, match="The artifact takes x, scale"):
        run_artifact(tmp_path, ((x,), {"other": scale}))
    plan = Plan.load(tmp_path / "plan.json")
    again = optimize(model, (x,), {"scale": scale}, goal=plan.goal, plan=plan)
    assert again.plan.options() == fast.plan.options()
    assert again.plan.met
    assert torch.equal(again(x, scale=scale)["y"], fast(x, scale=scale)["y"])


def test_an_artifact_beside_another_plan_is_refused(made, tmp_path, monkeypatch):
    """As a kill between the two writes leaves it: the new artifact beside the old plan."""
    _, fast = made
    fast.save(tmp_path)
    plan, artifact = tmp_path / "plan.json", tmp_path / "model.onnx"
    old = Plan.load(plan)
    assert list(old.artifact) == ["model.onnx"]

    def killed(self, path):
        raise KeyboardInterrupt

    other = optimize(Two(), (inputs()[0],), {"scale": inputs()[1]}, goal=Goal(), target="cpu-generic", backend="onnxruntime")
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            other.save(tmp_path)
    assert Plan.load(plan) == old
    with pytest.raises(FormatError, match=r"model\.onnx' is not the artifact that plan\.json .* Write both again"):
        run_artifact(tmp_path)
    artifact.unlink()
    with pytest.raises(UsageError, match="Write it again"):
        run_artifact(tmp_path)


def test_a_plan_that_says_nothing_of_its_artifact_still_runs(made, tmp_path):
    _, fast = made
    fast.save(tmp_path)
    data = Plan.load(tmp_path / "plan.json").to_dict()
    del data["artifact"]  # as plans of before
    Plan.from_dict(data).save(tmp_path / "plan.json")
    assert run_artifact(tmp_path).outputs[0].startswith("float32")


def test_a_plan_of_another_model_is_refused(made):
    x, _ = inputs()
    with pytest.raises(FormatError, match="made for another model"):
        optimize(Two(16), (x,), {}, goal=Goal(max_error=0.05), plan=made[1].plan)
