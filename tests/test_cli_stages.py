"""`effcompile plan` of a file that defines stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from effcompile.cli import app
from effcompile.core.errors import UsageError

FILE = """
import torch
from torch import nn
import effcompile

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids):
        return nn.functional.cross_entropy(self.head(self.table(ids)).flatten(0, 1), ids.flatten())

model = Model()
optimizer = torch.optim.AdamW
stages = [effcompile.Stage(steps=3, sequence=8), effcompile.Stage(steps=2, sequence=16)]

def inputs(stage):
    return {"ids": torch.arange(2 * stage.sequence).view(2, -1) % 32}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(FILE)
    return path


def test_a_run_is_planned_printed_and_written(file: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(
        app, ["plan", str(file), "--target", "h100-sxm", "--memory", "1MiB", "-o", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    assert (
        "run of Model: 2 stages on h100-sxm" in done.output
        and "sequence 16" in done.output
        and "5 steps, 10 examples" in done.output
    )
    written = json.loads((tmp_path / "out" / "run.json").read_text())
    assert [stage["sequence"] for stage in written["stages"]] == [8, 16] and written["steps"] == 5
    assert "<h1>run of Model: 2 stages" in (tmp_path / "out" / "report.html").read_text()
    told = runner.invoke(app, ["plan", str(file), "--target", "h100-sxm", "--memory", "1MiB", "--json"])
    assert json.loads(told.stdout)["tokens"] == 3 * 2 * 8 + 2 * 2 * 16


def test_stages_that_are_none(file: Path) -> None:
    file.write_text(FILE + "\nstages = 3\n")
    done = CliRunner().invoke(app, ["plan", str(file), "--target", "h100-sxm"])
    assert isinstance(done.exception, UsageError) and "stages in" in str(done.exception)
    file.write_text(FILE + "\noptimizer = None\n")
    done = CliRunner().invoke(app, ["plan", str(file), "--target", "h100-sxm"])
    assert isinstance(done.exception, UsageError) and "no optimizer" in str(done.exception)
