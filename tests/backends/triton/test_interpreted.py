"""Runs the tests in interpreted/, each file in a process of its own: whether triton compiles or interprets is fixed when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "interpreted").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_in_the_interpreter(file: Path) -> None:
    pytest.importorskip("triton")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)]
    done = subprocess.run(command, env=env, cwd=HERE.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
