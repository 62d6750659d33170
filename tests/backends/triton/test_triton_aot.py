"""Kernels compile for a GPU that is not here, and the shipped tiles are what the table's script found."""

from __future__ import annotations

import os
import re
import tomllib
from typing import Any

import pytest
import torch

from effcompile.backends.triton.aot import ARCHITECTURES, SHARED_LIMIT, CompileJob, Report, compile_jobs
from effcompile.backends.triton.configs import KERNELS, TABLE, TILE, candidates, dtype_name

#: dtype → head sizes that there are tiles for; fp32 at 256 is left to torch.
HEADS = {"bf16": (64, 128, 256), "fp16": (64, 128, 256), "fp32": (64, 128)}
LAUNCHES = "effcompile.backends.triton.aot_cases:attention_launches"


def job(**changes: object) -> CompileJob:
    config = {"block_m": 64, "block_n": 64, "warps": 4, "stages": 2}
    return CompileJob(
        arch="sm_90",
        launch=LAUNCHES,
        kernel="attention_forward",
        arguments={"dtype": "bf16", "d": 64, "kernel": "forward", "config": config} | changes,
    )


#: Kernel → the cases that launch it, and their arguments: every kernel that a launcher reaches.
PRODUCTS: dict[str, list[tuple[str, dict[str, object]]]] = {
    "loss_head_rows": [("loss_head", {"softcap": True})],
    "loss_head_slopes": [("loss_head", {"softcap": True})],
    "block_sparse_product": [("block_sparse", {"block": 64}), ("block_sparse", {"block": 32})],
    "block_sparse_sampled": [("block_sparse", {"block": 64})],
    "quantized_product": [
        ("group_quant", {"weight": "int4"}),
        ("group_quant", {"weight": "int8x8", "rows": 1024}),
        ("group_quant", {"weight": "int4", "rows": 16}),
        ("group_quant", {"weight": "fp8x8", "rows": 16}),
        ("group_quant", {"weight": "fp8x8", "rows": 1024}),
    ],
}
ATTENTION = {
    "dtype": "bf16",
    "d": 64,
    "kernel": "dq",
    "config": {"block_m": 64, "block_n": 64, "warps": 4, "stages": 2},
}
#: Of few rows: nothing is as wide as on Hopper's wide products, all waits for memory.
FEW: dict[str, list[tuple[str, dict[str, object]]]] = {
    "cached_attention_part": [
        ("cached_attention", {}),
        ("cached_attention", {"d": 64, "batch": 8}),
        ("cached_attention", {"held": "int8"}),
        ("cached_attention", {"dtype": "fp32", "held": "fp32"}),
        ("cached_attention", {"dtype": "fp32", "held": "int8"}),
    ],
    "grouped_product": [
        ("group_linear", {"bits": 4}),
        ("group_linear", {"bits": 8, "n": 1 << 15}),
        ("group_linear", {"bits": 4, "rows": 512}),
    ],
}
PLAIN: dict[str, list[tuple[str, dict[str, object]]]] = {
    "cached_attention_whole": [("cached_attention", {})],
    "grouped_codes": [("group_linear", {"bits": 4})],
    "append_rows": [("cached_attention", {}), ("cached_attention", {"held": "int8"})],
    "loss_head_gradients_kernel": [("loss_head", {})],
    "adam8_kernel": [("states8", {})],
    "lion8_kernel": [("states8", {})],
    "compress_kernel": [("compress", {})],
    "decompress_kernel": [("compress", {})],
    "quantize_kernel": [("group_quant", {"weight": "int8"})],
    "dequantize_kernel": [("group_quant", {"weight": "int8"})],
    "rms_norm_kernel": [("rows", {}), ("rows", {"width": 1 << 15})],
    "rms_norm_backward_kernel": [("rows", {}), ("rows", {"width": 8192})],
    "swiglu_kernel": [("rows", {})],
    "swiglu_backward_kernel": [("rows", {})],
    "rotary_kernel": [("rows", {})],
    "attention_delta": [("attention", ATTENTION)],
}


def jobs_of(cases: dict[str, list[tuple[str, dict[str, object]]]], arch: str = "sm_90") -> list[CompileJob]:
    where = LAUNCHES.partition(":")[0]
    pairs = [(kernel, case, given) for kernel, launches in cases.items() for case, given in launches]
    return [
        CompileJob(arch=arch, launch=f"{where}:{case}_launches", kernel=kernel, arguments=given)
        for kernel, case, given in pairs
    ]


EVERY = {
    "terms": {"lo": -127, "hi": 0, "softcap": 30.0, "chunk": 512},
    "tensors": ["bias", "sink", "mask", "valid", "q_ids", "k_ids"],
}
#: Head size and kernel → the tiles of the table on an H100, and what they may take.
TILES = {
    (d, kernel): {name: getattr(candidates(kernel, "sm_90", torch.bfloat16, d, d)[0], name) for name in TILE}
    for d in ((64, 128) if os.environ.get("EFFCOMPILE_EVERY_GPU") else (128,))
    for kernel in KERNELS
}
#: Where two groups of four warps share 64 rows of scores: what a table must not have.
TWICE = {"block_m": 32, "block_n": 64, "warps": 8, "stages": 2}


IN_TILES = {
    kernel: next(
        {name: getattr(one, name) for name in TILE}
        for one in candidates(kernel, "sm_90", torch.bfloat16, 128, 128) if one.tma
    )
    for kernel in KERNELS
}  # fmt: skip


def tiled(d: int, kernel: str, config: dict[str, Any], arch: str = "sm_90") -> CompileJob:
    given = {"dtype": "bf16", "d": d, "kernel": kernel, "config": config}
    return CompileJob(arch=arch, launch=LAUNCHES, kernel=f"attention_{kernel}", arguments=given)


#: A single head: the launcher folds ones into the code.
FORWARD = {"every term": job(**EVERY), "a single head": job(shape=[1, 1, 1, 999])}
WRONG = {
    "no such dtype": job(dtype="int3"),
    "float8 on sm_80": jobs_of({"quantized_product": [("group_quant", {"weight": "fp8x8"})]}, "sm_80")[0],
    "dies": CompileJob(arch="sm_90", launch="os:_exit", kernel="none", arguments={"status": 3}),
    "after it": CompileJob(arch="sm_90", launch="os:no_such_function", kernel="none"),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Report]]:
    """Of all jobs here, from one worker; and from one more after the job that kills it."""
    pytest.importorskip("triton")
    named = [(one.kernel, one) for one in [*jobs_of(PRODUCTS), *jobs_of(PLAIN), *jobs_of(FEW)]]
    named += [(f"{one.kernel} on sm_80", one) for one in jobs_of(FEW, "sm_80")]
    named += [(f"{kernel} {d}", tiled(d, kernel, config)) for (d, kernel), config in TILES.items()]
    for kernel, config in IN_TILES.items():
        whole = config | {"tma": True}
        named += [(f"{kernel} in tiles", tiled(128, kernel, whole))]
        named += [(f"{kernel} on Blackwell", tiled(128, kernel, whole, "sm_100"))]
    named += [("twice", tiled(128, "dkdv", TWICE)), *FORWARD.items(), *WRONG.items()]
    found: dict[str, list[Report]] = {}
    for (name, _), (_, report) in zip(named, compile_jobs([one for _, one in named]), strict=True):
        found.setdefault(name, []).append(report)
    return found


@pytest.mark.parametrize("kernel", [*PRODUCTS, *FORWARD])
def test_products_use_tensor_cores_and_do_not_spill(kernel: str, reports: dict[str, list[Report]]) -> None:
    for report in reports[kernel]:
        assert report.fits("sm_90") and report.tensor_ops > 0 and 0 < report.registers <= 255, report
        assert report.spills <= 16 or kernel in FORWARD, report


#: Kernel → products of a step's scores with heads, instructions of a warp's thread for each score that it
#: holds (7 to 14 where nothing is masked, by both versions of triton), and waits.
STEPS = {"forward": (2, 10, 5), "dq": (3, 12, 5), "dkdv": (4, 16, 7)}


@pytest.mark.parametrize(("d", "kernel"), TILES)
def test_a_step_of_attention_keeps_to_its_budget(
    d: int, kernel: str, reports: dict[str, list[Report]]
) -> None:
    """Each product is made once, of 64 columns or more; K and V (or Q and the gradient) come by asynchronous
    copies; what is masked costs no more than twice as much, and is rare.
    """
    (report,), tile = reports[f"{kernel} {d}"], TILES[d, kernel]
    whole, masked = report.loops
    products, instructions, waits = STEPS[kernel]
    scores, threads = tile["block_m"] * tile["block_n"], 32 * tile["warps"]
    for loop in (whole, masked):
        assert loop.flops(tile["warps"]) == 2 * products * scores * d, "no product is made twice"
        assert loop.narrowest >= 64 and loop.waits <= waits, loop
    assert whole.instructions * threads <= instructions * scores, whole
    assert masked.instructions <= 2 * whole.instructions, masked
    assert whole.exponentials * threads <= 1.1 * scores, whole
    rows = tile["block_m"] if kernel == "dkdv" else tile["block_n"]
    assert 16 * whole.copies * threads >= 2 * 2 * rows * d, "all that a step reads"
    # the fastest of ten on an H100, though it spills
    assert whole.spilled <= (60 if (d, kernel) == (128, "dkdv") else 0), whole


@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_are_copied_whole_without_a_threads_help(kernel: str, reports: dict[str, list[Report]]) -> None:
    """Two a step, of K and V or of Q and the gradient; no thread copies but for two numbers of each row."""
    (report,), tile = reports[f"{kernel} in tiles"], dict(IN_TILES[kernel], tma=True)
    whole, _ = report.loops
    assert report.fits("sm_90") and whole.tiles == 2 and whole.spilled <= 16, whole
    assert whole.copies <= (16 if kernel == "dkdv" else 1), whole
    assert whole.flops(tile["warps"]) == 2 * STEPS[kernel][0] * tile["block_m"] * tile["block_n"] * 128


@pytest.mark.parametrize("kernel", KERNELS)
def test_blackwell_copies_whole_tiles_too(kernel: str, reports: dict[str, list[Report]]) -> None:
    (report,) = reports[f"{kernel} on Blackwell"]
    assert report.fits("sm_100") and report.loops[0].tiles == 2 and "tcgen05" in report.loops[0].products, (
        report
    )


def test_products_that_are_made_twice_are_seen(reports: dict[str, list[Report]]) -> None:
    (report,) = reports["twice"]
    wanted = 2 * 4 * 32 * 64 * 128
    assert report.loops[0].flops(8) >= 1.5 * wanted and report.loops[0].narrowest < 64


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_products_are_wide(kernel: str, reports: dict[str, list[Report]]) -> None:
    """On Hopper 64 rows at once, but where there are 16 rows in all or blocks of 32."""
    for (_, given), report in zip(PRODUCTS[kernel], reports[kernel], strict=True):
        small = given.get("rows") == 16 or given.get("block") == 32
        for loop in report.loops:
            assert loop.narrowest >= (8 if small else 32), (given, loop)
            assert loop.spilled <= 2 and loop.waits <= 8, (given, loop)


@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
@pytest.mark.parametrize("kernel", FEW)
def test_kernels_of_few_rows_spill_nothing_and_read_ahead(
    kernel: str, arch: str, reports: dict[str, list[Report]]
) -> None:
    """On tensor cores; what a step reads comes by asynchronous copies, but for codes, whose rows are not of
    16 bytes.
    """
    found = reports[kernel if arch == "sm_90" else f"{kernel} on {arch}"]
    for (_, given), report in zip(FEW[kernel], found, strict=True):
        assert report.fits(arch) and report.tensor_ops > 0 and report.spills == 0, (given, report)
        assert 0 < report.registers <= 255 and report.loops, (given, report)
        for loop in report.loops:
            assert loop.copies >= (2 if given.get("held") == "int8" else 8), (given, loop)


def test_products_of_float8_are_summed_in_fp32(reports: dict[str, list[Report]]) -> None:
    """Step by step: one more addition for each of a thread's 64 sums, which the same tile of int8 does not
    have.
    """
    _, whole, _, _, float8 = reports["quantized_product"]
    assert float8.additions - whole.additions >= 128 * 128 // (8 * 32)


@pytest.mark.parametrize("kernel", PLAIN)
def test_kernels_without_products_do_not_spill(kernel: str, reports: dict[str, list[Report]]) -> None:
    for report in reports[kernel]:
        assert report.fits("sm_90") and report.spills == 0, report


def test_what_does_not_compile_says_why_and_costs_one_job(reports: dict[str, list[Report]]) -> None:
    """float8 on sm_80 is refused by the compiler, which is why the launcher does not ask it."""
    (dtype,), (ampere,), (dead,), (unknown,) = (reports[name] for name in WRONG)
    assert dtype.error is not None and "int3" in dtype.error
    assert ampere.error is not None and "fp8e4nv" in ampere.error
    assert dead == Report(error="the compiler ended its process (exit status 3)")
    assert unknown.error is not None and "no_such_function" in unknown.error


def test_every_kernel_that_is_launched_is_compiled_here() -> None:
    """What the launchers call, read off their source: `name[grid](…)`."""
    folder = TABLE.parent
    launched = {
        name
        for file in folder.glob("*.py")
        for name in re.findall(r"\b\w+(?=\[[^\n]*\]\()|(?<=\": \()attention_\w+", file.read_text("utf-8"))
    }
    kernels = {
        name
        for file in (folder / "kernels").glob("*.py")
        for name in re.findall(r"@triton.jit(?:\(.*\))?\ndef (\w+)", file.read_text("utf-8"))
    }
    assert len(launched & kernels) > 15
    assert launched & kernels == {*PRODUCTS, *PLAIN, *FEW, *(f"attention_{kernel}" for kernel in KERNELS)}


ROWS = [
    (arch, dtype, d, kernel)
    for arch in ARCHITECTURES
    for dtype, heads in HEADS.items()
    for d in heads
    for kernel in KERNELS
]


@pytest.mark.parametrize(("arch", "dtype", "d", "kernel"), ROWS)
def test_every_architecture_dtype_and_head_size_has_tiles_that_were_seen_to_fit(
    arch: str, dtype: str, d: int, kernel: str
) -> None:
    """Each row says what the compiler found: a tile of powers of two, room for it, registers that there are,
    nothing spilled.

    What was measured as the fastest on an H100 spills a little, and the twin of its dtype with it.
    """
    row = tomllib.loads(TABLE.read_text(encoding="utf-8"))[arch][dtype][str(d)][kernel]
    for m, n, warps, stages, shared in (
        [*(row[name] for name in TILE), row["shared"]],
        *row.get("others", []),
        *row.get("tma", []),
    ):
        assert (
            all(size >= 16 and size & (size - 1) == 0 for size in (m, n))
            and warps in (2, 4, 8)
            and 1 <= stages <= 4
        )
        assert 0 < shared <= SHARED_LIMIT[arch]
    assert 0 < row["registers"] <= (512 if arch.startswith("gfx") else 255) and row["spills"] <= (
        512 if arch == "sm_90" and row["triton"] == "3.6.0" else 0
    )
    assert row.get("precision") == ({"gfx942": "ieee"}.get(arch, "tf32x3") if dtype == "fp32" else None)
    assert row["triton"].split(".")[0].isdigit()


@pytest.mark.parametrize(("arch", "dtype", "d", "kernel"), ROWS)
def test_a_launch_takes_the_row_of_its_own_dtype_and_size(arch: str, dtype: str, d: int, kernel: str) -> None:
    row = tomllib.loads(TABLE.read_text(encoding="utf-8"))[arch][dtype][str(d)][kernel]
    made = next(key for key in (torch.float32, torch.float16, torch.bfloat16) if dtype_name(key) == dtype)
    first, *others = candidates(kernel, arch, made, d, d)
    assert (first.block_m, first.block_n, first.warps, first.stages) == tuple(row[name] for name in TILE)
    assert first.precision == row.get("precision") and [one.tma for one in others] == (
        [False] * len(row.get("others", [])) + [True] * len(row.get("tma", []))
    )
    # a GPU with less room than the architecture's
    little = candidates(kernel, arch, made, d - 8, d - 8, shared=row["shared"] - 1)
    assert first not in little


def test_where_a_tile_was_measured_nothing_is_left_to_choose() -> None:
    row = tomllib.loads(TABLE.read_text(encoding="utf-8"))["sm_90"]["bf16"]["128"]["dkdv"]
    only, *whole = candidates("dkdv", "sm_90", torch.bfloat16, 128, 128, here=row["measured"])
    assert (only.block_m, only.block_n, only.warps, only.stages) == tuple(row[name] for name in TILE)
    assert whole and all(one.tma for one in whole), "of those that copy whole tiles none was"
    assert len(
        candidates("dkdv", "sm_90", torch.bfloat16, 128, 128, here="another GPU, triton 3.6.0")
    ) == 1 + len(row["others"]) + len(whole)


def test_sizes_without_a_row_have_no_tiles() -> None:
    for arch in ARCHITECTURES:
        assert (
            candidates("forward", arch, torch.float32, 256, 256)
            == ()
            == candidates("forward", arch, torch.bfloat16, 512, 512)
        )
    assert candidates("forward", "sm_70", torch.float16, 64, 64) == ()
