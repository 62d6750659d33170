"""Resident memory of a runtime that keeps no statistics of its own: its process's high-water mark, in a fresh
process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from effcompile.core.arrays import Array

#: A script calls `before()` when the runtime is loaded and the model is not, `loaded()` when the model is,
#: then runs it.
_PRELUDE = """
import sys, numpy
def _status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
def before():
    global _start
    _start = _status("VmRSS")
def loaded():
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
path, inputs, *options = sys.argv[1:]
with numpy.load(inputs) as arrays:
    inputs = [arrays[str(i)] for i in range(len(arrays.files))]
"""
_END = """
print("peak", _status("VmHWM") - _start)
"""


def peak_bytes(script: str, path: Path, inputs: Sequence[Array], *options: object) -> int | None:
    """Peak resident bytes of weights and activations over one call; None off Linux, or when the process
    fails.

    The mark is reset when the model is loaded, and what the process held before loading it is taken off.

    Args:
        script: Python that loads the model `path`, calling `before()` and `loaded()`, and runs it on the
            arrays `inputs`.
        path: the saved model.
        inputs: arrays in the order of the model's inputs.
        *options: whatever else the script needs; the strings in its list `options`.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "inputs.npz"
        np.savez(file, **{str(i): array for i, array in enumerate(inputs)})  # type: ignore[arg-type]
        command = [
            sys.executable,
            "-c",
            f"{_PRELUDE}{script}{_END}",
            str(path),
            str(file),
            *map(str, options),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        except subprocess.TimeoutExpired:
            return None
    words = done.stdout.split()[-2:]
    return int(words[1]) if done.returncode == 0 and words[:1] == ["peak"] else None
