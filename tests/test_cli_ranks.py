"""`optimize --devices` and `verify` on the command line: what they write and say, and that
torchrun runs it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from effcompile.cli import main
from effcompile.loader.reading import load

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x), labels)


torch.manual_seed(0)
model = Small()
inputs = {"x": torch.randn(4, 8), "labels": torch.arange(4) % 3}
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `optimize --devices 2 -o` writes."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "small.py").write_text(MODEL)
    run(
        [
            "optimize",
            str(folder / "small.py"),
            "--mode",
            "training",
            "--devices",
            "2",
            "-o",
            str(folder / "out"),
        ]
    )
    return folder / "out"


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def test_plan_script_and_report_are_written(written: Path) -> None:
    assert sorted(each.name for each in written.iterdir()) == ["plan.json", "report.html", "train.py"]
    plan = json.loads((written / "plan.json").read_text())
    assert [d["settings"]["ranks"] for d in plan["decisions"] if d["kind"] == "data parallel"] == [2]
    compile((written / "train.py").read_text(), "train.py", "exec")


def test_a_script_that_torchrun_did_not_start_says_so(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=r"This is one rank of 2: start it with torchrun"):
        runpy.run_path(str(written / "train.py"), run_name="__main__")


def test_verify_trains_a_copy(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(written), "--ranks", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert [rank["gradient_error"] < found["limit"] for rank in found["ranks"]] == [True, True]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "0"], "give the number of ranks, at least 1"),
        (["--devices", "2", "--mode", "inference"], "--devices divides a training step"),
        (["--devices", "2", "--backend", "onnxruntime"], "a training step runs on the backend 'torch'"),
    ],
)
def test_wrong_devices_are_told(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.py").write_text(MODEL)
    assert run(["optimize", str(tmp_path / "small.py"), *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_wrong_ranks_are_told(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(written), "--ranks", "1"]) == 2
    assert "--ranks 1: give 2 to 16" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_torchrun_trains_and_goes_on_from_a_checkpoint(written: Path, tmp_path: Path) -> None:
    """Two steps, and in another run two more from the checkpoint, are four steps of one process; each stage
    saves its own.
    """
    strategy = ["--strategy", "pp=2", "-o", str(tmp_path / "out")]
    assert (
        run(["optimize", str(written.parent / "small.py"), "--mode", "training", "--devices", "2", *strategy])
        == 0
    )
    found = losses(tmp_path / "out", tmp_path / "kept", 2)
    found += forked_losses(tmp_path / "out", tmp_path / "kept", 4, tmp_path)
    loaded = load(str(written.parent / "small.py"))
    optimizer = torch.optim.AdamW(loaded.model.parameters())
    wanted = []
    for _ in range(4):
        loss = loaded.model(**loaded.kwargs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(loss.detach()))
    assert [float(line.split()[-1]) for line in found] == pytest.approx(wanted, rel=1e-5)
    assert [int(line.split()[1]) for line in found] == [0, 1, 2, 3]


#: Of every Python that has it on its path: writes which of gloo's threads are there when it leaves, to a file
#: of its own.
LEAVING = """
import atexit, os, pathlib

@atexit.register
def left():
    tasks = pathlib.Path("/proc/self/task").glob("*")
    threads = [name for task in tasks if "gloo" in (name := task.joinpath("comm").read_text().strip())]
    pathlib.Path(__file__).with_name(f"left {os.getpid()}").write_text(" ".join(threads))
"""


def losses(written: Path, checkpoints: Path, steps: int) -> list[str]:
    """What torchrun's ranks print.

    A rank leaves without gloo's threads: one that lets go of a tensor meanwhile would abort it.
    """
    watch = checkpoints.with_name(f"watch{steps}")
    watch.mkdir()
    (watch / "sitecustomize.py").write_text(LEAVING)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    command += ["--nproc-per-node", "2", str(written / "train.py")]
    environment = {**os.environ, "STEPS": str(steps), "CHECKPOINTS": str(checkpoints), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(watch), *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    # what the ranks said comes first
    assert done.returncode == 0, f"{done.stderr[:8000]}\n...\n{done.stderr[-2000:]}"
    left = [each.read_text() for each in watch.glob("left *")]
    assert len(left) >= 2
    assert set(left) == {""}
    return [line for line in done.stdout.splitlines() if line.startswith("step")]


def forked_losses(written: Path, checkpoints: Path, steps: int, folder: Path) -> list[str]:
    """What the same ranks print as torchrun starts them, here without importing everything once more."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])

    def rank(number: int) -> None:
        os.environ |= {
            "RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(number),
            "MASTER_ADDR": "localhost", "MASTER_PORT": port, "STEPS": str(steps),
            "CHECKPOINTS": str(checkpoints),
        }  # fmt: skip
        torch.set_num_threads(1)
        with (folder / f"said{number}").open("w") as said, redirect_stdout(said):
            runpy.run_path(str(written / "train.py"), run_name="__main__")

    started = [multiprocessing.get_context("fork").Process(target=rank, args=(each,)) for each in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(240)
    assert [process.exitcode for process in started] == [0, 0]
    return [line for line in (folder / "said0").read_text().splitlines() if line.startswith("step")]


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `optimize --devices 4 --strategy dp=2,tp=2 -o` writes."""
    folder = tmp_path_factory.mktemp("divided")
    (folder / "small.py").write_text(MODEL)
    spec = ["optimize", str(folder / "small.py"), "--mode", "training", "--devices", "4"]
    run([*spec, "--strategy", "dp=2,tp=2,zero=3", "-o", str(folder / "out")])
    return folder / "out"


def test_tensor_and_data_parallelism_are_proven_on_four_ranks(
    divided: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(divided), "--ranks", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert len(found["ranks"]) == 4
    assert "over 2 ranks" in found["form"]
    assert run(["verify", str(divided), "--ranks", "3"]) == 2
    assert "3 do not divide by the plan's 2 tensor-parallel ranks" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize(
    ("devices", "strategy", "said"),
    [
        ("4", "dp=2,tp=4", "is 8 ranks, and --devices 4"),
        ("2", "zero=2", "zero=2 can be planned"),
        ("2", "cp=2", "cp=2 can be planned"),
        ("7", "tp=7", "do not divide by 7"),
    ],
)
def test_strategies_that_cannot_be_carried_out_are_told(
    devices: str, strategy: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.py").write_text(MODEL)
    arguments = [
        "optimize",
        str(tmp_path / "small.py"),
        "--mode",
        "training",
        "--devices",
        devices,
        "--strategy",
        strategy,
    ]
    assert run(arguments) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_pipeline_is_planned_written_and_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # wide enough for 2 % of its bytes to be some
    (tmp_path / "small.py").write_text(MODEL.replace("8", "64").replace("24", "192"))
    spec = ["optimize", str(tmp_path / "small.py"), "--mode", "training", "--devices", "4", "--strategy"]
    assert run([*spec, "pp=2,zero=3", "-o", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert run(["verify", str(tmp_path / "out"), "--ranks", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert len(found["ranks"]) == 4
    assert "sharded, gathered by block" in found["form"]
    assert "layers over 2 ranks, 1f1b" in found["form"]
    assert run(["export", str(tmp_path / "out"), "--engine", "fsdp2"]) == 2
    assert "for our own lowering" in " ".join(capsys.readouterr().err.split())
