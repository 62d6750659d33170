"""The numeric and workspace tests again, in processes that may use fewer instructions: kernels differ in what
they allocate.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FLAGS = {*Path("/proc/cpuinfo").read_text().split()} if Path("/proc/cpuinfo").exists() else set()
#: Environment → what Linux calls the instructions that it takes away. Without one of them it changes nothing.
#: A processor without AVX-512 is one for oneDNN and for PyTorch.
SETTINGS = {
    "ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2": {"avx512f", "avx_vnni"},
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI": {"avx512_bf16"},
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16": {"avx512_fp16", "amx_bf16"},
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX": {"amx_fp16"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_numbers_and_workspaces_hold(setting: str) -> None:
    if not SETTINGS[setting] & FLAGS:
        pytest.skip(
            f"this processor has no {' or '.join(sorted(SETTINGS[setting]))}: the other tests are run as "
            f"with {setting}"
        )
    files = ("test_loss_head_ops.py", "test_products.py", "test_attention.py", "test_attention_memory.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "workspace or precisions or product or (precision and bf16) or (never_more and dtype1)",
        *(str(HERE / file) for file in files),
    ]
    taken = dict(each.split("=") for each in setting.split())
    environment = {**os.environ, **taken, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout or "[100%]" in done.stdout
