"""Runs the tests in interpreted/, in processes of their own: whether triton compiles or interprets is fixed
when it is imported, and some register kernels for good.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "interpreted").glob("test_*.py"))


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported what these tests import, and forks for each file."""
    pytest.importorskip("triton")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, HERE / "interpreted" / "forks.py"],
        env=env,
        cwd=HERE.parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("test_"))
def test_in_the_interpreter(forks: subprocess.Popen[str], file: Path) -> None:
    assert forks.stdin and forks.stdout
    print(file, file=forks.stdin, flush=True)
    code, printed = json.loads(forks.stdout.readline())
    assert code == 0, printed[-10000:]
