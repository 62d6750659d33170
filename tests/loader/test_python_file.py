import sys
from pathlib import Path

import pytest
import torch

from effcompile.core.errors import InputsError, UsageError
from effcompile.loader.loaded import as_inputs
from effcompile.loader.reading import load

GOOD = """
import torch
from sibling import WIDTH
model = torch.nn.Linear(WIDTH, 4)
def small():
    return torch.nn.Linear(8, 2)
def inputs():
    return {"input": torch.ones(2, 8)}
def calibration():
    for i in range(3):
        yield (torch.full((2, 8), float(i)),)
def loss(outputs, inputs):
    return outputs.sum()
goal = {"max_error": 0.01}
"""


def write(folder: Path, text: str, name: str = "model.py") -> str:
    (folder / "sibling.py").write_text("WIDTH = 8\n")
    (folder / name).write_text(text)
    return str(folder / name)


def test_everything_a_file_may_define(tmp_path: Path) -> None:
    before = list(sys.path)
    loaded = load(write(tmp_path, GOOD))
    assert sys.path == before
    assert loaded.path == (tmp_path / "model.py").resolve()
    assert loaded.name == "model"
    assert isinstance(loaded.model, torch.nn.Linear)
    assert loaded.args == ()
    assert loaded.kwargs["input"].shape == (2, 8)
    assert [args[0][0, 0].item() for args, _ in loaded.calibration] == [0.0, 1.0, 2.0]
    assert loaded.goal == {"max_error": 0.01}
    assert loaded.loss is not None
    assert loaded.optimizer is None


def test_a_name_picks_another_model_and_callables_are_called(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, GOOD) + ":small")
    assert loaded.name == "small"
    assert loaded.model(torch.ones(1, 8)).shape == (1, 2)


@pytest.mark.parametrize(
    ("value", "args", "keywords"),
    [({"x": 1}, 0, ["x"]), ((1, 2), 2, []), ([1], 1, []), (torch.ones(2), 1, [])],
)
def test_kinds_of_inputs(value: object, args: int, keywords: list[str]) -> None:
    found, kwargs = as_inputs(value)
    assert len(found) == args
    assert list(kwargs) == keywords


@pytest.mark.parametrize("value", [3, None, "x", {}, ()])
def test_inputs_of_another_kind_are_refused(value: object) -> None:
    with pytest.raises(InputsError, match="Give a dict of keyword arguments"):
        as_inputs(value)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("model = (", UsageError, r"is not Python, line 1: '\(' was never closed"),
        (
            "x = 1\nraise RuntimeError('boo')\n",
            UsageError,
            r"raises while running it.\n  .*model.py:2: raise RuntimeError\('boo'\)\n  RuntimeError: boo",
        ),
        ("import no_such_package\n", UsageError, "ModuleNotFoundError: No module named 'no_such_package'"),
        ("import sys\nsys.exit(3)\n", UsageError, "SystemExit: 3"),
        (
            "import torch\nmodle = torch.nn.ReLU()\n",
            UsageError,
            r"defines no `model`. Did you mean 'modle'\? It defines: modle.*model.py:modle",
        ),
        ("", UsageError, "It defines: nothing"),
        ("model = 3\ninputs = ()\n", UsageError, "model in .* is an int, not a torch.nn.Module"),
        (
            "def model():\n    return 1 / 0\n",
            UsageError,
            r"raises while calling model\(\)(.|\n)*:2: return 1 / 0\n  ZeroDivisionError",
        ),
        ("import torch\nmodel = torch.nn.ReLU()\n", InputsError, "defines no `inputs`"),
        (
            "import torch\nmodel = torch.nn.ReLU()\ninputs = 3\n",
            InputsError,
            "inputs in .*: an int is not usable",
        ),
        (
            "import torch\nmodel = torch.nn.ReLU()\ninputs = torch.ones(2)\ncalibration = 3\n",
            InputsError,
            "calibration in .* is an int",
        ),
        (
            "import torch\nmodel = torch.nn.ReLU()\ninputs = torch.ones(2)\nloss = 3\n",
            UsageError,
            "loss in .* is an int, not a function",
        ),
    ],
)
def test_bad_files(tmp_path: Path, text: str, kind: type[UsageError], says: str) -> None:
    before = list(sys.path)
    with pytest.raises(kind, match=says) as caught:
        load(write(tmp_path, text))
    assert caught.value.exit_code == 2
    assert sys.path == before


def test_no_such_file_says_what_is_close(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(UsageError, match=r"No such file: .*modl.py.* Did you mean .*model.py"):
        load(str(tmp_path / "modl.py"))
    with pytest.raises(UsageError, match=r"No such file: '[^']*mo.py'\.$"):
        load(str(tmp_path / "mo.py"))
    with pytest.raises(UsageError, match="is a folder"):
        load(str(tmp_path))
    with pytest.raises(UsageError, match="not a name"):
        load(write(tmp_path, GOOD) + ":1x")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not Python"):
        load(str(path))
