"""Kernels compile for AMD's data-centre GPUs, which are not here: MI300 (gfx942) and MI350 (gfx950)."""

from __future__ import annotations

import os

import pytest
import torch
from test_triton_aot import KERNELS, LAUNCHES, PLAIN, PRODUCTS, TILE, jobs_of

from effcompile.backends.triton.aot import CompileJob, compile_jobs
from effcompile.backends.triton.configs import candidates

#: All of them for both architectures take some minutes: `make gpu-dry` does it.
EVERY = bool(os.environ.get("EFFCOMPILE_EVERY_GPU"))
#: Codes in float8 are torch's on AMD: `group_quant._has_no`.
FLOAT8 = "fp8x8"
FEW = {
    "quantized_product": PRODUCTS["quantized_product"][:1],
    "rms_norm_kernel": PLAIN["rms_norm_kernel"][:1],
}


def attention(kernel: str, d: int, arch: str) -> CompileJob:
    """With the table's first tile, which both architectures take."""
    first = candidates(kernel, "gfx942", torch.bfloat16, d, d)[0]
    config = {name: getattr(first, name) for name in TILE}
    given = {"dtype": "bf16", "d": d, "kernel": kernel, "config": config}
    return CompileJob(arch=arch, launch=LAUNCHES, kernel=f"attention_{kernel}", arguments=given)


def jobs(arch: str) -> list[CompileJob]:
    every = jobs_of({**PRODUCTS, **PLAIN} if EVERY else FEW, arch)
    taken = [job for job in every if job.arguments.get("weight") != FLOAT8]
    return taken + [attention(kernel, d, arch) for kernel in KERNELS for d in ((64, 128) if EVERY else (64,))]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"] if EVERY else ["gfx942"])
def test_what_is_launched_there_compiles(arch: str) -> None:
    """With its matrix instructions where it multiplies, and within the 64 KiB of MI300's LDS."""
    pytest.importorskip("triton")
    for job, report in compile_jobs(jobs(arch)):
        assert report.fits(arch), (job, report)
        multiplies = job.kernel in PRODUCTS or job.kernel.removeprefix("attention_") in KERNELS
        assert report.tensor_ops > 0 or not multiplies, (job, report)
