"""Runs the tests in interpreted/, in processes of their own: whether triton compiles or interprets is fixed
when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "interpreted").glob("test_*.py"))
#: Files that register kernels for good have a process of their own; the others share one.
ALONE = ("test_attention_op", "test_generation", "test_lowering")
GROUPS = [[file] for file in FILES if file.stem in ALONE] + [
    [file for file in FILES if file.stem not in ALONE]
]


@pytest.mark.parametrize(
    "files", GROUPS, ids=lambda files: "+".join(f.stem.removeprefix("test_") for f in files)
)
def test_in_the_interpreter(files: list[Path]) -> None:
    pytest.importorskip("triton")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *map(str, files),
    ]
    done = subprocess.run(command, env=env, cwd=HERE.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
