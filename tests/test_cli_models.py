"""The command line on real (tiny) models: the way through, and every bad input that needs a model to show."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import full_disk
from quick_process import COMMAND, QUICKLY
from test_cli import Outcome

from effcompile import cli
from effcompile.backends.torch import TorchInductor
from effcompile.compiler import run_artifact
from effcompile.core import folders
from effcompile.ir.plan import Plan

QUICK = ("--backend", "torch-eager", "--static")

GOOD = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)).eval()
inputs = (torch.randn(2, 16),)
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a model file."""

    def to_file(text: str) -> Path:
        path = tmp_path / "model.py"
        path.write_text(textwrap.dedent(text))
        return path

    return to_file


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of GOOD, made once; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "model.py").write_text(GOOD)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["optimize", str(folder / "model.py"), *QUICK, "-o", str(folder / "out")])
    assert not stopped.value.code
    return folder / "out"


def test_optimize_writes_what_it_says_and_nothing_else(
    capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path
) -> None:
    out = tmp_path / "made" / "out"
    outcome = Outcome(capsys, "optimize", write(GOOD), *QUICK, "-o", out)
    assert outcome.status == 0, outcome.err
    assert "✔ met" in outcome.out
    assert sorted(path.name for path in out.iterdir()) == ["model.pt2", "plan.json", "report.html"]
    plan = Plan.load(out / "plan.json")
    assert plan.met
    assert plan.measured is not None
    assert plan.measured.seconds is not None
    assert "https://" not in (out / "report.html").read_text()
    again = Outcome(capsys, "optimize", write(GOOD), "--static", "--plan", out / "plan.json", "--json")
    assert again.status == 0, again.err
    data = json.loads(again.out)
    assert (data["met"], data["written"]) == (True, [])
    assert Plan.from_dict(data).options() == plan.options()


def test_optimize_without_output_writes_nothing(
    capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path
) -> None:
    path = write(GOOD)
    outcome = Outcome(capsys, "optimize", path, *QUICK)
    assert outcome.status == 0
    assert "Add -o DIR" in outcome.out
    assert [p.name for p in tmp_path.iterdir() if p.name != "__pycache__"] == [path.name]


def test_plan_for_a_machine_that_is_not_here(
    capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path
) -> None:
    outcome = Outcome(
        capsys, "plan", write(GOOD), "--target", "h100-sxm", "--static", "-o", tmp_path / "out", "--json"
    )
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out)["measured"] is None
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["plan.json", "report.html"]


def test_frontier(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    outcome = Outcome(capsys, "frontier", write(GOOD), *QUICK, "--points", "2", "--json")
    assert outcome.status == 0, outcome.err
    assert 1 <= len(json.loads(outcome.out)) <= 2


def test_infeasible_names_the_memory_that_would_do(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    outcome = Outcome(capsys, "optimize", write(GOOD), *QUICK, "--memory", "1KiB")
    assert outcome.status == 1
    assert "--memory" in outcome.words
    error = json.loads(Outcome(capsys, "optimize", write(GOOD), *QUICK, "--memory", "1KiB", "--json").out)[
        "error"
    ]
    assert error["type"] == "InfeasibleError"
    assert error["nearest"]["memory"] > 1024


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        ("x = = 1", "", "line 1"),
        ("import torch", "", "defines no `model`"),
        ("import torch\nmodel = 3\ninputs = (torch.ones(1),)", "", "not a torch.nn.Module"),
        ("import torch\nmodel = torch.nn.Bilinear(4, 4, 4)", "", "defines no `inputs`"),
        ("raise RuntimeError('not today')", "", "not today"),
        (GOOD + "inputs = (torch.ones(2, 17),)", "", "17"),
        (GOOD + "inputs = {'nonsense': torch.ones(2, 16)}", "", "nonsense"),
        (GOOD + "inputs = 'text'", "", "inputs"),
        (GOOD + "goal = {'max_error': -1}", "", "max_error = -1"),
        (GOOD, "--mode training", "runs on the backend 'torch'"),
        (GOOD, "--pass quantise", "Did you mean 'quantize'"),
        (GOOD, "--pass remta", "Did you mean 'checkpoint'"),
        (GOOD, "--pass bogus", "No pass is named 'bogus'. Known: "),
        (GOOD, "--pass quantise.group_size=64", "Did you mean 'quantize'"),
        (GOOD, "--pass .group_size=64", "No pass is named ''"),
        (GOOD, "--pass checkpoint", "The pass 'checkpoint' is for the mode 'training'"),
        (GOOD, "--mode training --pass no-quantize", "The pass 'quantize' is for the mode 'inference'"),
        (GOOD + "goal = 'fast'", "", "'fast' is not a goal"),
        (GOOD, "--pass quantize.nonsense=1", "no option 'nonsense'"),
        (GOOD, "--backend onnx", "Did you mean 'onnxruntime'"),
        (
            """
            import torch
            class Broken(torch.nn.Module):
                def forward(self, x):
                    raise RuntimeError("this model is broken")
            model, inputs = Broken().eval(), (torch.ones(2, 2),)
            """,
            "",
            "this model is broken",
        ),
        (
            """
            import torch
            class Nan(torch.nn.Module):
                def forward(self, x):
                    return x / torch.zeros_like(x) * 0
            model, inputs = Nan().eval(), (torch.ones(2, 2),)
            """,
            "",
            "NaN",
        ),
    ],
)
def test_bad_models(
    capsys: pytest.CaptureFixture[str], write: Write, text: str, arguments: str, says: str
) -> None:
    backend = () if "--backend" in arguments else QUICK
    outcome = Outcome(capsys, "optimize", write(text), *arguments.split(), *backend)
    assert outcome.status in (1, 2)
    assert outcome.status == 2 or says == "NaN"
    assert says in outcome.words


def test_a_backend_that_cannot_run_here(
    capsys: pytest.CaptureFixture[str], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchInductor, "unavailable", lambda self: "the machine has no such thing")
    outcome = Outcome(capsys, "plan", write(GOOD), "--static", "--backend", "torch-inductor")
    assert outcome.status == 2
    assert "The backend torch-inductor cannot run here: the machine has no such thing." in outcome.words
    assert "install" not in outcome.words


def test_no_such_file(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    path = write(GOOD)
    outcome = Outcome(capsys, "optimize", path.with_name("modle.py"))
    assert outcome.status == 2
    assert "Did you mean" in outcome.words


def test_a_plan_of_another_model(capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path) -> None:
    made = Outcome(capsys, "plan", write(GOOD), *QUICK, "-o", tmp_path / "out")
    assert made.status == 0, made.err
    outcome = Outcome(
        capsys,
        "optimize",
        write(GOOD.replace("32", "48")),
        "--static",
        "--plan",
        tmp_path / "out" / "plan.json",
    )
    assert outcome.status == 2
    assert "another model" in outcome.words
    outcome = Outcome(
        capsys, "optimize", write(GOOD), "--plan", tmp_path / "out" / "plan.json", "--max-error", "0.1"
    )
    assert outcome.status == 2
    assert "another goal" in outcome.words


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"format": "effcompile-calibration", "version": 1, "machi', b"\x80\x04pickle"]
)
def test_corrupted_calibration_cache(
    capsys: pytest.CaptureFixture[str],
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
) -> None:
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path / "cache"))
    from effcompile.machine import calibration

    path = calibration.calibration_path()
    # (kernels that an earlier test's plan builds ahead, in a thread, may have made the folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    outcome = Outcome(capsys, "plan", write(GOOD), *QUICK, "--json", "--profile")
    ends = [line.split() for line in outcome.err.splitlines() if line.split()[-1:] in (["share"], ["100%"])]
    assert [words[0] for words in ends] == ["planning", "in"], (
        "where the time went is asked for, also beside a document"
    )
    assert outcome.status == 0, outcome.err
    assert any(
        "calibration" in str(note["figures"])
        for note in json.loads(outcome.out)["notes"]
        if "figures" in note
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_full_disk_leaves_the_old_artifact(
    capfd: pytest.CaptureFixture[str], write: Write, tmp_path: Path, written: Path
) -> None:
    out = shutil.copytree(written, tmp_path / "out")
    before = contents(out)
    with full_disk(1000):
        outcome = Outcome(capfd, "optimize", write(GOOD), *QUICK, "-o", out)
    assert outcome.status in (1, 2)
    assert "Cannot write" in outcome.words
    assert contents(out) == before


@pytest.mark.parametrize("when", ["before", "after"])
def test_kill_in_mid_write_leaves_the_old_artifact_or_the_new_one(
    write: Write, tmp_path: Path, written: Path, when: str
) -> None:
    """The process is killed just before and just after it switches the folders; tests/fuzz kills a save at
    every system call.
    """
    out, path = shutil.copytree(written, tmp_path / "out"), write(GOOD)
    before = contents(out)
    put = folders._put

    def killed(*given: Any) -> None:
        if when == "after":
            put(*given)
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            signal.alarm(120)
            torch.set_num_threads(1)
            folders._put = killed
            cli.main(["optimize", str(path), *QUICK, "-o", str(out)])
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    assert (contents(out) == before) == (when == "before")
    assert sorted(contents(out)) == sorted(before)
    assert len(run_artifact(out).outputs) == 1


WITHOUT_ONNXRUNTIME = """
import sys
from importlib.machinery import PathFinder

class Filtered(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == "onnxruntime" else super().find_spec(name, path, target)

sys.meta_path[:] = [Filtered if finder is PathFinder else finder for finder in sys.meta_path]
"""


NAMED_FIRST = f"""{QUICKLY}
import sys
from effcompile.cli import main
try:
    main([*sys.argv[1:3], "--static", "--backend", "onnxruntime"])
except SystemExit as stopped:
    print("named:", stopped.code, file=sys.stderr)
"""


def test_onnxruntime_missing(write: Write) -> None:
    """One process: the backend that is named is refused, and without a name another one is found."""
    path = write(GOOD)
    command = [
        sys.executable,
        "-c",
        WITHOUT_ONNXRUNTIME + NAMED_FIRST + COMMAND,
        "optimize",
        str(path),
        "--static",
        "--json",
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "named: 2" in done.stderr
    assert "pip install onnxruntime" in done.stderr
    assert "Traceback" not in done.stderr
    told = {c["backend"]: str(c["note"]) for c in json.loads(done.stdout)["candidates"]}
    assert "pip install {name}" in told["onnxruntime"] and "'onnxruntime'" in told["onnxruntime"]
