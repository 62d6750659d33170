"""ONNX Runtime tells nobody of a user's models, and leaves nothing in the home folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVES = """
import torch, effcompile
model = torch.nn.Sequential(torch.nn.Linear(8, 8)).eval()
planned = effcompile.optimize(model, (torch.randn(2, 8),), backend="onnxruntime")
planned(torch.randn(2, 8))
"""


@pytest.mark.parametrize("said", [None, "0"])
def test_nothing_is_told_unless_the_user_says_so(said: str | None, tmp_path: Path) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    asked = {} if said is None else {"ORT_DISABLE_TELEMETRY": said}
    left = {"ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"}
    environment = {key: value for key, value in os.environ.items() if key not in left} | asked
    subprocess.run(
        [sys.executable, "-c", SERVES],
        env=environment | {"HOME": str(home), "TMPDIR": str(scratch)},
        check=True,
        capture_output=True,
    )
    told = [*home.rglob("*onnxruntime*"), *scratch.glob(".ses")]
    if said is None:
        assert told == []
    elif not told:
        pytest.skip("this build of ONNX Runtime has no telemetry")
