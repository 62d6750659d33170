"""What happens around a plan on real machines: two at once, no home, signals, forks, twenty in
one process.
"""

import copy
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from full_disk import full_disk
from quick_process import COMMAND
from torch import nn
from torch.utils.data import DataLoader, Dataset

import effcompile
from effcompile import cli
from effcompile.core.files import cache_folder
from effcompile.ir.plan import Plan
from effcompile.machine import calibration
from effcompile.ops import int8_mlp

MODEL = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).eval()
inputs = (torch.randn(2, 32),)
"""


#: Tells every step, however fast the machine is.
TELLING = f"from effcompile.report import progress\nprogress._WORTH_TELLING = 0.0\n{COMMAND}"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def effcompile_in(
    tmp_path: Path, *arguments: object, command: str = COMMAND, **environment: str
) -> "subprocess.Popen[str]":
    """A command in a process of its own, with temporary files in a folder of its own, and kernels that were
    compiled before.
    """
    (tmp_path / "temporary").mkdir(exist_ok=True)
    int8_mlp.fallback_reason()  # which every plan has compiled
    if (native := cache_folder() / "native").exists():
        shutil.copytree(native, tmp_path / "cache" / "native", dirs_exist_ok=True)
    own = {"EFFCOMPILE_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "temporary")}
    own |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"} | environment
    return subprocess.Popen(
        [sys.executable, "-c", command, *map(str, arguments)],
        env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def left_in(folder: Path) -> list[str]:
    return sorted(
        path.name for path in folder.iterdir() if path.name.startswith(("effcompile", ".effcompile"))
    )


def test_two_processes_plan_and_measure_at_once_into_one_folder(tmp_path: Path, model_file: Path) -> None:
    """They share the cache of timings and the folder that they write."""
    arguments = (
        "optimize",
        model_file,
        "--static",
        "--backend",
        "torch-eager",
        "-o",
        tmp_path / "out",
        "--json",
    )
    both = [effcompile_in(tmp_path, *arguments) for _ in range(2)]
    told = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert all(json.loads(out)["met"] for out, _ in told)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.pt2",
        "plan.json",
        "report.html",
    ]
    assert Plan.load(tmp_path / "out" / "plan.json").met
    kept = sorted((tmp_path / "cache").glob("*.json"))
    assert kept
    for path in kept:
        if path.name.startswith("calibration"):
            assert json.loads(path.read_bytes())["format"] == calibration.FORMAT
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]
    assert left_in(tmp_path) == []
    assert left_in(tmp_path / "temporary") == []


def test_a_home_that_cannot_be_written_is_said_and_costs_nothing_else(
    capsys: pytest.CaptureFixture[str], model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EFFCOMPILE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc")  # where root cannot write either
    with pytest.raises(SystemExit) as stopped:
        cli.main(["optimize", str(model_file), "--static", "--backend", "torch-eager", "--json"])
    out, err = capsys.readouterr()
    assert not stopped.value.code, err
    assert "Traceback" not in err
    assert any(
        "not kept" in note.get("text", "") and "/proc/.cache" in str(note["figures"])
        for note in json.loads(out)["notes"]
    )


@pytest.mark.parametrize(
    ("number", "status", "during"), [(signal.SIGTERM, 143, "load the model"), (signal.SIGINT, 130, "lower")]
)
def test_a_signal_in_mid_plan_ends_it_quietly_and_leaves_nothing(
    tmp_path: Path, model_file: Path, number: signal.Signals, status: int, during: str
) -> None:
    arguments = ("optimize", model_file, "--static", "--backend", "onnxruntime", "-o", tmp_path / "out")
    process = effcompile_in(tmp_path, *arguments, command=TELLING)
    assert process.stderr is not None
    said = ""
    while during not in said and (read := process.stderr.readline()):
        said += read
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status, said + err
    assert "Traceback" not in said + err
    assert not (tmp_path / "out").exists()
    assert left_in(tmp_path) == []
    assert left_in(tmp_path / "temporary") == []


class Through(Dataset[torch.Tensor]):
    """What a model gives for each example, computed in the worker."""

    def __init__(self, model: nn.Module, xs: torch.Tensor) -> None:
        self.model, self.xs = model, xs

    def __len__(self) -> int:
        return len(self.xs)

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self.model(self.xs[index : index + 1])
        return found


@pytest.mark.parametrize("backend", ["onnxruntime", "torch-eager"])
def test_an_executable_works_in_the_workers_of_a_loader(backend: str) -> None:
    model, xs = Net().eval(), torch.randn(6, 64)
    fast = effcompile.optimize(model, inputs=(xs[:1],), backend=backend, target="cpu-generic")
    with torch.no_grad():
        wanted = model(xs)
        assert torch.allclose(fast(xs[:1]), wanted[:1], atol=1e-5)
        found = torch.cat(
            [
                part.flatten(0, 1)
                for part in DataLoader(Through(fast, xs), batch_size=2, num_workers=2, timeout=60)
            ]
        )
        assert torch.allclose(found, wanted, atol=1e-5)
        assert torch.allclose(fast(xs[:1]), wanted[:1], atol=1e-5)  # the parent's own still runs


class Examples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(64, generator=generator)
        return x, x.flip(0)


class Regression(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (super().forward(x) - y).square().mean()


@pytest.mark.parametrize("planned_first", [True, False])
def test_training_with_the_workers_of_a_loader(planned_first: bool) -> None:
    """Forked after the step was planned, and before: each loss is the one of the model itself."""
    model = Regression()
    same = copy.deepcopy(model)
    example = (torch.randn(2, 64), torch.randn(2, 64))
    loader = DataLoader(Examples(), batch_size=2, num_workers=2, timeout=60, persistent_workers=True)
    if not planned_first:
        next(iter(loader))
    step = effcompile.optimize(model, inputs=example, mode="training", dynamic=False)
    trained = torch.optim.SGD(step.parameters(), lr=0.1)
    reference = torch.optim.SGD(same.parameters(), lr=0.1)
    for x, y in loader:
        for run, optimizer in ((step, trained), (same, reference)):
            optimizer.zero_grad()
            run(x, y).backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_forked_child_ends_without_taking_the_parents_files(tmp_path: Path) -> None:
    x = torch.randn(2, 64)
    with torch.no_grad():
        fast = effcompile.optimize(Net().eval(), inputs=(x,), backend="onnxruntime", target="cpu-generic")
        wanted = fast(x)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(60)
                status = 0 if torch.allclose(fast(x), wanted) else 1
                del fast
                gc.collect()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        fast.save(tmp_path / "out")
        assert torch.equal(fast(x), wanted)


def test_a_disk_that_is_full_keeps_no_timings_and_costs_nothing_else(
    tmp_path: Path, model_file: Path
) -> None:
    """No file may grow beyond a hundred bytes; the plan is made, and a note says what was not kept. In a
    process of its own: what could not be compiled there is not tried again.
    """
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ["EFFCOMPILE_CACHE"] = str(tmp_path / "cache")
            torch.set_num_threads(1)
            os.dup2(theirs, 1), os.dup2(theirs, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            with full_disk(100):
                cli.main(["plan", str(model_file), "--static", "--backend", "torch-eager", "--json"])
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    os.close(theirs)
    with open(mine) as told:
        out = told.read()
    assert os.waitpid(child, 0)[1] == 0, out
    assert "Traceback" not in out
    assert any("not kept" in note.get("text", "") for note in json.loads(out[out.index("{") :])["notes"])
    assert all(path.stat().st_size == 0 for path in (tmp_path / "cache").rglob("*") if path.is_file())


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_twenty_plannings_in_one_process_do_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, threads and descriptors stay as many; memory settles (the first ones fill caches of torch, ONNX
    and z3).
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def once() -> None:
        made = effcompile.plan(Net().eval(), (torch.randn(2, 64),), target="cpu-generic", max_error=0.05)
        assert made.decisions

    def state() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(list(tmp_path.iterdir()))

    stays_as_it_is(once, state, warming=5, again=15)


def stays_as_it_is(
    once: Callable[[], None], state: Callable[[], object], *, warming: int, again: int
) -> None:
    for _ in range(warming):
        once()
    before, memory = state(), resident()
    for _ in range(again):
        once()
    assert state() == before
    assert resident() - memory < 60 << 20


def test_trainings_planned_in_one_process_do_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do the tensors that live: no model of before is held."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def once() -> None:
        made = effcompile.optimize(
            Regression(), inputs=(torch.randn(2, 64), torch.randn(2, 64)), mode="training", dynamic=False
        )
        made(torch.randn(2, 64), torch.randn(2, 64)).backward()

    def state() -> tuple[int, int, int, int]:
        gc.collect()
        tensors = sum(isinstance(o, nn.Parameter) for o in gc.get_objects())
        return (
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(list(tmp_path.iterdir())),
            tensors,
        )

    stays_as_it_is(once, state, warming=2, again=4)
