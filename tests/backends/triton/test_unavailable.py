"""Without triton, with an old one, or without a GPU, the kernels are declined with a reason; looking does not
import triton.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from effcompile.backends import triton

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
REASONS = {
    "no triton": (None, "pip install 'effcompile[triton]'"),
    "old": ("3.1.0", "3.1.0 is older than 3.6"),
    "no GPU": ("3.6.0", "no GPU"),
}


@pytest.mark.parametrize("case", REASONS)
def test_declined_with_the_reason(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = REASONS[case]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if found is None else object())
    monkeypatch.setattr(triton, "_version", lambda: found)
    monkeypatch.setattr(triton, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    triton._unavailable.cache_clear()
    reason = triton.register()
    triton._unavailable.cache_clear()
    assert reason is not None and said in str(reason)


def test_other_accelerators_are_declined_in_words() -> None:
    """Nothing of CUDA is asked for a model that lies on Intel's or Apple's GPU."""
    (said,) = triton.use({"cpu", "xpu"})
    assert "none for xpu" in str(said) and "compute capability" in str(said)
    assert triton.use({"meta"}) == ()


def test_asking_does_not_import_triton() -> None:
    """PyTorch may have imported it by itself; what is looked at is what asking adds."""
    code = (
        "import sys, effcompile.backends.triton as t\nfor name in [name for name in sys.modules if "
        "name.split('.')[0] == 'triton']: del sys.modules[name]\nt.unavailable(); print('triton' in "
        "sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_kernels_need_torch_and_triton_alone() -> None:
    """A GPU machine without a registry has no more: the script that measures kernels there starts without the
    rest.
    """
    rest = [
        "msgspec",
        "z3",
        "rich",
        "typer",
        "onnx",
        "onnxruntime",
        "onnxscript",
        "onnx_ir",
        "ml_dtypes",
        "transformers",
        "torchao",
    ]
    without = (
        f"import sys, runpy; sys.modules.update(dict.fromkeys({rest})); sys.argv[1:] = ['--help']; "
        f"sys.path[0] = {str(BENCHMARKS)!r}"
    )
    code = f"{without}; runpy.run_path({str(BENCHMARKS / 'gpu.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "ceilings" in done.stdout, done.stderr
