"""Kernels compile for a GPU that is not here, and the shipped tiles are what the table's script found."""

from __future__ import annotations

import tomllib

import pytest
import torch

from effcompile.backends.triton.aot import ARCHITECTURES, SHARED_LIMIT, Job, Report, compile_jobs
from effcompile.backends.triton.configs import KERNELS, TABLE, TILE, candidates, dtype_name

#: dtype → head sizes that there are tiles for; fp32 at 256 is left to torch.
HEADS = {"bf16": (64, 128, 256), "fp16": (64, 128, 256), "fp32": (64, 128)}
LAUNCHES = "effcompile.backends.triton.aot_cases:attention_launches"


def job(**changes: object) -> Job:
    config = {"block_m": 64, "block_n": 64, "warps": 4, "stages": 2}
    return Job(arch="sm_90", launch=LAUNCHES, kernel="attention_forward",
               arguments={"dtype": "bf16", "d": 64, "kernel": "forward", "config": config} | changes)  # fmt: skip


def test_compiles_with_every_term_and_reports_what_a_kernel_needs() -> None:
    pytest.importorskip("triton")
    every = {"terms": {"lo": -127, "hi": 0, "softcap": 30.0, "chunk": 512}, "tensors": ["bias", "sink", "mask", "valid", "q_ids", "k_ids"]}
    (_, report), (_, single), (_, wrong) = compile_jobs([job(**every), job(shape=[1, 1, 1, 999]), job(dtype="int3")])
    for one in (report, single):  # a single head: the launcher folds ones into the code
        assert one.fits("sm_90") and one.tensor_ops > 0 and 0 < one.registers <= 255
    assert wrong.error is not None and "int3" in wrong.error


OTHERS = {
    "loss_head_rows": ("loss_head", {"softcap": True}),
    "block_sparse_product": ("block_sparse", {"block": 64}),
    "quantized_product": ("group_quant", {"weight": "int4"}),
}
#: Kernels without products.
PLAIN = {"loss_head_gradients_kernel": "loss_head", "adam8_kernel": "states8", "lion8_kernel": "states8", "compress_kernel": "compress",
         "rms_norm_kernel": "rows", "swiglu_kernel": "rows", "rotary_kernel": "rows"}  # fmt: skip


def test_the_other_kernels_use_tensor_cores_and_do_not_spill() -> None:
    pytest.importorskip("triton")
    where = LAUNCHES.partition(":")[0]
    jobs = [Job(arch="sm_90", launch=f"{where}:{name}_launches", kernel=kernel, arguments=a) for kernel, (name, a) in OTHERS.items()]
    for one, report in compile_jobs(jobs):
        assert report.fits("sm_90") and report.tensor_ops > 0 and report.spills == 0, (one.kernel, report)


def test_kernels_without_products_do_not_spill() -> None:
    pytest.importorskip("triton")
    where = LAUNCHES.partition(":")[0]
    jobs = [Job(arch="sm_90", launch=f"{where}:{name}_launches", kernel=kernel) for kernel, name in PLAIN.items()]
    for one, report in compile_jobs(jobs):
        assert report.fits("sm_90") and report.spills == 0, (one.kernel, report)


def test_float8_is_multiplied_where_there_is_float8() -> None:
    """On sm_80 the compiler refuses, which is why the launcher does not ask it."""
    pytest.importorskip("triton")
    launch = f"{LAUNCHES.partition(':')[0]}:group_quant_launches"
    jobs = [Job(arch=arch, launch=launch, kernel="quantized_product", arguments={"weight": "fp8x8"}) for arch in ("sm_90", "sm_80")]
    (_, hopper), (_, ampere) = compile_jobs(jobs)
    assert hopper.fits("sm_90") and hopper.tensor_ops > 0 and hopper.spills == 0
    assert ampere.error is not None and "fp8e4nv" in ampere.error


def test_a_worker_that_dies_costs_one_job() -> None:
    pytest.importorskip("triton")
    dies = Job(arch="sm_90", launch="os:_exit", kernel="none", arguments={"status": 3})
    unknown = Job(arch="sm_90", launch="os:no_such_function", kernel="none")
    reports = [report for _, report in compile_jobs([dies, unknown])]
    assert reports[0] == Report(error="the compiler ended its process (exit status 3)")
    assert reports[1].error is not None and "no_such_function" in reports[1].error


ROWS = [(arch, dtype, d, kernel) for arch in ARCHITECTURES for dtype, heads in HEADS.items() for d in heads for kernel in KERNELS]


@pytest.mark.parametrize(("arch", "dtype", "d", "kernel"), ROWS)
def test_every_architecture_dtype_and_head_size_has_tiles_that_were_seen_to_fit(arch: str, dtype: str, d: int, kernel: str) -> None:
    """Each row says what the compiler found: a tile of powers of two, room for it, registers that there are, nothing spilled."""
    row = tomllib.loads(TABLE.read_text(encoding="utf-8"))[arch][dtype][str(d)][kernel]
    for m, n, warps, stages, shared in ([*(row[name] for name in TILE), row["shared"]], *row.get("others", [])):
        assert all(size >= 16 and size & (size - 1) == 0 for size in (m, n)) and warps in (4, 8) and 1 <= stages <= 4
        assert 0 < shared <= SHARED_LIMIT[arch]
    assert 0 < row["registers"] <= (512 if arch.startswith("gfx") else 255) and row["spills"] == 0
    assert row.get("precision") == ({"gfx942": "ieee"}.get(arch, "tf32x3") if dtype == "fp32" else None)
    assert row["triton"].split(".")[0].isdigit()


@pytest.mark.parametrize(("arch", "dtype", "d", "kernel"), ROWS)
def test_a_launch_takes_the_row_of_its_own_dtype_and_size(arch: str, dtype: str, d: int, kernel: str) -> None:
    row = tomllib.loads(TABLE.read_text(encoding="utf-8"))[arch][dtype][str(d)][kernel]
    made = next(key for key in (torch.float32, torch.float16, torch.bfloat16) if dtype_name(key) == dtype)
    first, *others = candidates(kernel, arch, made, d, d)
    assert (first.block_m, first.block_n, first.warps, first.stages) == tuple(row[name] for name in TILE)
    assert first.precision == row.get("precision") and len(others) == len(row.get("others", []))
    little = candidates(kernel, arch, made, d - 8, d - 8, shared=row["shared"] - 1)  # a GPU with less room than the architecture's
    assert first not in little


def test_sizes_without_a_row_have_no_tiles() -> None:
    for arch in ARCHITECTURES:
        assert candidates("forward", arch, torch.float32, 256, 256) == () == candidates("forward", arch, torch.bfloat16, 512, 512)
    assert candidates("forward", "sm_70", torch.float16, 64, 64) == ()
