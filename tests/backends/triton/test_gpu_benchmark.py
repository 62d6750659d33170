"""benchmarks/gpu.py is right in every line before there is a GPU: its dry run executes all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
FILES = sorted([BENCHMARKS / "gpu.py", *BENCHMARKS.glob("_gpu_*.py")])
#: Run in a process of its own: the interpreter is chosen when triton is imported. All sections, then a share
#: of the compiling, what a lost GPU does, and what comes late.
SCRIPT = """
import json, runpy, sys
from pathlib import Path

folder, out = sys.argv[1:]
seen = {}

def tracer(frame, event, argument):
    name = frame.f_code.co_filename
    if not (name.startswith(folder) and Path(name).name.startswith(("gpu.py", "_gpu_"))):
        return None
    lines = seen.setdefault(Path(name).name, set())

    def line(frame, event, argument):
        lines.add(frame.f_lineno)
        return line

    lines.add(frame.f_lineno)
    return line

sys.path.insert(0, folder)
sys.argv = ["gpu.py", "--dry"]
sys.settrace(tracer)
import threading
threading.settrace(tracer)
import gpu, _gpu_common as common, _gpu_memory, _gpu_products, _gpu_step

def run(*arguments):
    sys.argv = ["gpu.py", "--dry", *arguments]
    try:
        gpu.main()
    except SystemExit as end:
        return end.code
    finally:
        common.SHARE.clear()
        common.OUT.clear()

ends = {"all": run("--out", out, "--seconds", "900", "--processes", "0")}
ends["reserved"] = run("--only", "reserved")
ends["share"] = run("--share", "0", "1", "--only", "correctness", "tiles", "rows", "gemm")
kept = dict(gpu.SECTIONS)

def lost():
    raise RuntimeError("CUDA error: unspecified launch failure")

def within():
    with common.attempt("lost"):
        lost()

gpu.SECTIONS["rows"] = lost
ends["lost"] = run("--only", "rows", "ceilings", "--out", out)
gpu.SECTIONS["rows"] = within
ends["last"] = run("--only", "rows")
gpu.SECTIONS.update(kept)
ends["late"] = run("--seconds", "0", "--processes", "0")
common.compare("late", 1.0, {"ours": lambda: None})
run("--share", "0", "1", "--seconds", "0", "--only", "attention")
gpu.agree("alone", {}, None, ())
with common.attempt("wrong"):
    raise ValueError
common.END[0] = float("inf")
ends["compiled beside"] = run("--only", "tiles", "--processes", "1", "--seconds", "6")
run("--only", "tiles", "--processes", "1", "--seconds", "600")
there = common.missing
gpu.missing = lambda *names: ["ml_dtypes"]
ends["declined"] = run("--only", "ceilings")
gpu.missing = _gpu_step.missing = _gpu_memory.missing = _gpu_products.missing = lambda *names: [*names][:1]
run("--only", "step", "reserved", "gemm")
gpu.missing = there
sys.settrace(None)
print(json.dumps({"seen": {name: sorted(lines) for name, lines in seen.items()}, "ends": ends}))
"""


@pytest.mark.skipif("EFFCOMPILE_EVERY_GPU" not in os.environ, reason="two minutes: make gpu-dry runs it")
def test_the_dry_run_executes_every_line(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "gpu.jsonl"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", SCRIPT, str(BENCHMARKS), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ends"] == {
        "all": 0, "reserved": 0, "share": 0, "lost": 1, "last": 1, "late": 0, "compiled beside": 0,
        "declined": "--dry needs ml_dtypes: pip install ml_dtypes",
    }  # fmt: skip
    left = {file.name: sorted(lines_of(file) - set(found["seen"].get(file.name, ()))) for file in FILES}
    assert {name: lines for name, lines in left.items() if lines} == {}
    said = [json.loads(line) for line in out.read_text().splitlines()]
    assert not [one for one in said if one.get("ok") is False]
    failed = [one for one in said if "error" in one and not isinstance(one["error"], float)]
    # what needs a GPU, and what was made to fail
    known = ("torchao", "out of time", "CUDA error", "cuBLAS fp8")
    assert all(any(words in str(one) for words in known) for one in failed), failed


def lines_of(file: Path) -> set[int]:
    """Where something is executed, but for what only a script's own start does."""
    source = file.read_text(encoding="utf-8")
    start = source.splitlines().index('if __name__ == "__main__":') + 1 if "__main__" in source else 1 << 30
    codes, found = [compile(source, str(file), "exec")], set[int]()
    for code in codes:
        found |= {line for _, _, line in code.co_lines() if line and line < start}
        codes += [one for one in code.co_consts if hasattr(one, "co_lines")]
    return found - {0}
