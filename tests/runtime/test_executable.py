"""The Executable is called like the model, refuses other inputs clearly, and its plan can be
applied again.
"""

import re
import shutil
import stat
import zipfile
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import nn

from effcompile.backends.onnxruntime import lowering
from effcompile.compiler import optimize, run_artifact
from effcompile.core.errors import EffcompileError, FormatError, GuardError, InputsError, UsageError
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
    return model, optimize(
        model, (x,), {"scale": scale}, goal=Goal(max_error=0.05), target="cpu-generic", backend="onnxruntime"
    )


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
        (
            (torch.randn(3, 9, 8),),
            {"scale": torch.rand(16)},
            r"x is float32 \[3, 9, 8\]; the plan takes float32",
        ),
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
    with pytest.raises(EffcompileError, match="detach"):
        fast(x, scale=scale)["y"].sum().backward()
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
    with pytest.raises(InputsError, match=r"not planned for: inputs\['other'\]; missing: inputs\['scale'\]"):
        run_artifact(tmp_path, ((x,), {"other": scale}))
    plan = Plan.load(tmp_path / "plan.json")
    again = optimize(model, (x,), {"scale": scale}, goal=plan.goal, plan=plan)
    assert again.plan.options() == fast.plan.options()
    assert again.plan.met
    assert torch.equal(again(x, scale=scale)["y"], fast(x, scale=scale)["y"])


def test_an_artifact_beside_another_plan_is_refused(made, tmp_path):
    """As somebody leaves it who copies one of the two."""
    _, fast = made
    fast.save(tmp_path / "one")
    other = optimize(
        Two(),
        (inputs()[0],),
        {"scale": inputs()[1]},
        goal=Goal(),
        target="cpu-generic",
        backend="onnxruntime",
    )
    other.save(tmp_path / "two")
    artifact = tmp_path / "two" / "model.onnx"
    shutil.copy(tmp_path / "one" / "model.onnx", artifact)
    with pytest.raises(
        FormatError, match=r"model\.onnx' is not the artifact that plan\.json .* Write both again"
    ):
        run_artifact(tmp_path / "two")
    artifact.unlink()
    with pytest.raises(UsageError, match="Write it again"):
        run_artifact(tmp_path / "two")
    other.save(tmp_path / "two")  # whatever became of the old files, the folder is effcompile's
    assert run_artifact(tmp_path / "two").outputs[0].startswith("float32")


def test_what_is_saved_is_the_model_as_it_is(made, tmp_path):
    """The artifact has the weights of planning: whoever opened it would be given old answers."""
    model, fast = made
    before = model.b.bias.detach().clone()
    with torch.no_grad():
        model.b.bias.data[5] += 1  # noticed by a look at all bytes
    try:
        with pytest.raises(GuardError, match=r"b\.bias was changed"):
            fast.save(tmp_path / "made")
    finally:
        model.b.bias.data.copy_(before)
    assert not (tmp_path / "made").exists()
    fast.save(tmp_path / "made")


def test_a_plan_without_an_artifact_is_not_run(made, tmp_path):
    """Nobody knows what lies beside it."""
    _, fast = made
    fast.save(tmp_path)
    Plan.load(tmp_path / "plan.json").with_changes(artifact={}).save(tmp_path / "plan.json")
    with pytest.raises(UsageError, match="written without an artifact"):
        run_artifact(tmp_path)


def test_what_others_wrote_is_neither_deleted_nor_replaced(made, tmp_path):
    _, fast = made
    for name in ("model.onnx", "notes.txt", "plan.json", "report.html"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(
            UsageError,
            match=rf"holds what effcompile did not write: {re.escape(name)}.*Give a folder of its own: -o",
        ):
            fast.save(folder)
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, "mine")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "notes", "plan", "report"]


def test_the_current_folder_is_not_replaced(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is the current folder"):
        made[1].save(".")


def test_a_link_to_a_folder_stays_one(made, tmp_path):
    _, fast = made
    (tmp_path / "real").mkdir(mode=0o750)
    (tmp_path / "link").symlink_to("real")
    fast.save(tmp_path / "link")
    fast.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o750
    assert sorted(path.name for path in (tmp_path / "real").iterdir()) == ["model.onnx", "plan.json"]


def test_big_weights_are_read_with_the_model_that_they_belong_to_only(tmp_path, monkeypatch):
    """Beyond 64 MiB the weights are a file of their own, here beyond 64 bytes: its name says what
    is in it.
    """
    monkeypatch.setattr(lowering, "BESIDE", 64)
    x, scale = inputs()
    for seed in (0, 1):
        torch.manual_seed(seed)
        optimize(
            Two(), (x,), {"scale": scale}, goal=Goal(), target="cpu-generic", backend="onnxruntime"
        ).save(tmp_path / f"{seed}")
    (zero,), (one,) = ([path.name for path in (tmp_path / f"{seed}").glob("*.data")] for seed in (0, 1))
    assert zero != one
    assert set(Plan.load(tmp_path / "0" / "plan.json").artifact) == {"model.onnx", zero}
    assert run_artifact(tmp_path / "0").outputs[0].startswith("float32")
    shutil.copy(tmp_path / "0" / "model.onnx", tmp_path / "1" / "model.onnx")
    with pytest.raises(Exception, match=zero):  # by ONNX Runtime itself
        onnxruntime.InferenceSession(str(tmp_path / "1" / "model.onnx"), providers=["CPUExecutionProvider"])


def test_weights_beside_a_model_that_the_plan_does_not_describe_are_not_read(tmp_path, monkeypatch):
    """Nothing compares their digest: other weights would be another model's answer without a word."""
    monkeypatch.setattr(lowering, "BESIDE", 64)
    x, scale = inputs()
    given = {"goal": Goal(), "target": "cpu-generic", "backend": "onnxruntime"}
    optimize(Two(), (x,), {"scale": scale}, **given).save(tmp_path)
    (beside,) = tmp_path.glob("*.data")
    beside.write_bytes(bytes(beside.stat().st_size))
    plan = Plan.load(tmp_path / "plan.json")
    only = {name: digest for name, digest in plan.artifact.items() if name != beside.name}
    plan.with_changes(artifact=only).save(tmp_path / "plan.json")
    with pytest.raises(FormatError, match=f"reads its weights from '{beside.name}', a file that the plan"):
        run_artifact(tmp_path)


@pytest.mark.parametrize("backend", ["onnxruntime", "torch-eager"])
def test_no_paths_of_this_machine_in_an_artifact(tmp_path, backend):
    x, scale = inputs()
    optimize(Two(), (x,), {"scale": scale}, goal=Goal(), target="cpu-generic", backend=backend).save(tmp_path)
    for file in tmp_path.glob("model.*"):
        parts = [file.read_bytes()]
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as packed:
                parts = [packed.read(name) for name in packed.namelist()]
        for part in parts:
            assert Path(__file__).name.encode() not in part
            for folder in (Path(__file__).parent, Path(torch.__file__).parent, Path.home(), tmp_path):
                assert str(folder).encode() not in part


def test_a_plan_of_another_model_is_refused(made):
    x, _ = inputs()
    with pytest.raises(FormatError, match="made for another model"):
        optimize(Two(16), (x,), {}, goal=Goal(max_error=0.05), plan=made[1].plan)
