"""The tiles that the Triton kernels are shipped with, by compiling for GPUs that are not here.

    python benchmarks/triton_aot.py [--seconds 280] [--arch sm_90] [--retry] [--spilling] [--others] [--tma]

For each architecture, dtype, head size and kernel the candidates are compiled in their order, fastest tile
first by the reasoning beside them, and the first is taken that fits shared memory, uses tensor cores (where
the dtype has them) and does not spill; if all spill, the one that spills least. What is written to
effcompile/backends/triton/configs.toml says what each needs and with which triton it was found. It goes on
where it was stopped: rows that are there stay, unless --retry (or --spilling, for those that spill); what was
`measured` as the fastest on a GPU always does. With --others all candidates are compiled, and a row also says
which of the rest do not spill: backends/triton/tune.py chooses among them on a GPU, by time. With --tma the
forms that copy whole tiles are compiled for Hopper and Blackwell, and rows say which of them fit and spill
next to nothing.
"""

from __future__ import annotations

import argparse
import time
import tomllib
from importlib.metadata import version
from typing import Any

from effcompile.backends.triton.aot import ARCHITECTURES, CompileJob, Report, compile_jobs
from effcompile.backends.triton.configs import KERNELS, TABLE

FIELDS = ("block_m", "block_n", "warps", "stages")
LAUNCHES = "effcompile.backends.triton.aot_cases:attention_launches"
#: How many more of a row's candidates are tried on a GPU: each is compiled there, some seconds.
MOST = 4
Candidate = tuple[int, int, int, int]

#: (BLOCK_M, BLOCK_N, warps, stages), best first: larger tiles read K and V less often; eight warps halve the
#: registers of a thread on NVIDIA; AMD has 64 KiB of LDS and wants four. A dkdv tile that is short in M holds
#: fewer scores. A warp takes 16 rows of the scores (of queries in forward and dq, of keys in dkdv): where a
#: tile has fewer than 16 per warp, warps do the same work, at a third of the speed.
NVIDIA: dict[str, tuple[Candidate, ...]] = {
    "forward": (
        (128, 128, 8, 2),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (64, 64, 4, 2),
        (64, 32, 4, 2),
        (32, 32, 2, 2),
    ),
    "dq": (
        (64, 64, 4, 2),
        (128, 64, 8, 2),
        (128, 64, 8, 1),
        (64, 64, 4, 3),
        (64, 32, 4, 2),
        (32, 32, 2, 2),
        (32, 32, 2, 1),
    ),
    "dkdv": (
        (64, 64, 4, 2),
        (64, 128, 8, 3),
        (64, 128, 8, 2),
        (32, 128, 8, 2),
        (32, 64, 4, 2),
        (32, 64, 4, 1),
        (32, 32, 2, 2),
        (32, 32, 2, 1),
        (16, 32, 2, 1),
        (16, 16, 4, 1),
    ),
}
AMD: dict[str, tuple[Candidate, ...]] = {
    "forward": ((128, 64, 4, 2), (128, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
    "dq": ((64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
    "dkdv": ((64, 64, 4, 2), (64, 64, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1)),
}
#: Of those that copy whole tiles, which leaves more registers.
IN_TILES: dict[str, tuple[Candidate, ...]] = {
    "forward": ((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3)),
    "dq": ((128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)),
    "dkdv": ((64, 128, 8, 2), (64, 64, 4, 2), (32, 128, 8, 2), (64, 64, 4, 3)),
}
#: Bytes of a thread that they may spill: the fastest tiles on an H100 spilled more.
LITTLE = 128
#: fp32 takes twice the room, and on AMD has no tensor cores.
FP32: tuple[Candidate, ...] = (
    (64, 64, 8, 2),
    (64, 32, 4, 2),
    (32, 32, 4, 2),
    (32, 32, 4, 1),
    (16, 32, 4, 1),
    (16, 16, 4, 1),
    (16, 16, 8, 1),
)


def candidates(
    arch: str, dtype: str, kernel: str, like: dict[str, Any] | None = None, *, others: bool = False
) -> tuple[Candidate, ...]:
    """In order of preference; `like`: a row whose tile comes first, as fp16 and bf16 need nearly the same,
    with its `others` alone.
    """
    known = FP32 if dtype == "fp32" else (NVIDIA if arch.startswith("sm_") else AMD)[kernel]
    if like is None:
        return known
    rest = [tuple(other[: len(FIELDS)]) for other in like.get("others", [])] if others else known
    return tuple(dict.fromkeys(((like["block_m"], like["block_n"], like["warps"], like["stages"]), *rest)))


def choose(
    arch: str, dtype: str, d: int, kernel: str, *, others: bool = False, like: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """The first candidate without spills, else the one with the fewest, with what it needs; None where none
    fits.

    `others`: with the rest of those that do not spill, and their shared memory.
    """
    found: list[tuple[Candidate, Report]] = []
    tried = candidates(arch, dtype, kernel, like, others=others)
    jobs = [job(arch, dtype, d, kernel, candidate) for candidate in tried]
    for candidate, (_, report) in zip(tried, compile_jobs(jobs), strict=False):
        note = (
            report.error
            or f"{report.registers} registers, {report.spills} B spilled, {report.shared >> 10} KiB, "
            f"{report.tensor_ops} tensor ops"
        )
        print(f"{arch} {dtype} d{d} {kernel} {candidate}: {note}", flush=True)
        if report.fits(arch) and (report.tensor_ops or precision(arch, dtype).get("precision") == "ieee"):
            found.append((candidate, report))
            if not report.spills and not others:
                break
    if not found:
        return None
    best, report = min(found, key=lambda one: one[1].spills)
    rest = [
        [*candidate, needs.shared] for candidate, needs in found if candidate != best and not needs.spills
    ][:MOST]
    return dict(zip(FIELDS, best, strict=True)) | precision(arch, dtype) | {
        "shared": report.shared, "registers": report.registers, "spills": report.spills,
        "triton": version("triton"), **({"others": rest} if others else {}),
    }  # fmt: skip


def in_tiles(arch: str, dtype: str, d: int, kernel: str) -> list[list[int]]:
    """The tiles that are copied whole and fit, with their shared memory, the first MOST in their order."""
    tried = IN_TILES[kernel]
    jobs = [job(arch, dtype, d, kernel, candidate, tma=True) for candidate in tried]
    found = []
    for candidate, (_, report) in zip(tried, compile_jobs(jobs), strict=False):
        needs = f"{report.registers} registers, {report.spills} B spilled, {report.shared >> 10} KiB"
        print(f"{arch} {dtype} d{d} {kernel} {candidate} in tiles: {report.error or needs}", flush=True)
        if report.fits(arch) and report.tensor_ops and report.spills <= LITTLE:
            found.append([*candidate, report.shared])
    return found[:MOST]


def precision(arch: str, dtype: str) -> dict[str, str]:
    """How fp32 is multiplied; nothing for the narrow dtypes."""
    return {} if dtype != "fp32" else {"precision": "tf32x3" if arch.startswith("sm_") else "ieee"}


def job(arch: str, dtype: str, d: int, kernel: str, candidate: Candidate, *, tma: bool = False) -> CompileJob:
    """Causal attention with this tile."""
    whole = {"tma": True} if tma else {}
    config = dict(zip(FIELDS, candidate, strict=True)) | precision(arch, dtype) | whole
    arguments = {"dtype": dtype, "d": d, "kernel": kernel, "config": config}
    return CompileJob(
        arch=arch,
        launch="effcompile.backends.triton.aot_cases:attention_launches",
        kernel=f"attention_{kernel}",
        arguments=arguments,
    )


def described(arch: str, dtype: str, d: int) -> bool:
    """Whether an architecture copies whole tiles, and they are tried for such heads."""
    return arch in ("sm_90", "sm_100") and dtype != "fp32" and d <= 128


def write(table: dict[str, Any]) -> None:
    """The table as TOML, one row per line."""
    lines = [
        "# Tiles of the attention kernels, by architecture, dtype and head size: made by "
        "benchmarks/triton_aot.py."
    ]
    for arch, dtypes in sorted(table.items()):
        for dtype, heads in sorted(dtypes.items()):
            for d, rows in sorted(heads.items(), key=lambda item: int(item[0])):
                lines.append(f"\n[{arch}.{dtype}.{d}]")
                for kernel, row in rows.items():
                    cells = ", ".join(
                        f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"
                        for key, value in row.items()
                    )
                    lines.append(f"{kernel} = {{ {cells} }}")
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=280.0, help="start no further row after this time")
    parser.add_argument("--arch", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--heads", nargs="*", type=int, default=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="*", default=["bf16", "fp16", "fp32"])
    parser.add_argument("--retry", action="store_true", help="compile again what is in the table")
    parser.add_argument(
        "--spilling", action="store_true", help="compile again what is in the table and spills"
    )
    parser.add_argument(
        "--others", action="store_true", help="compile all candidates, and name all that do not spill"
    )
    parser.add_argument("--tma", action="store_true", help="name the tiles that are copied whole")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    table: dict[str, Any] = tomllib.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    rows = [
        (a, t, d, k) for d in options.heads for t in options.dtypes for a in options.arch for k in KERNELS
    ]
    for arch, dtype, d, kernel in rows:
        heads = table.setdefault(arch, {}).setdefault(dtype, {}).setdefault(str(d), {})
        if options.tma:
            if described(arch, dtype, d) and "tma" not in heads[kernel] and time.monotonic() < end:
                twin = table[arch]["bf16"][str(d)][kernel].get("tma") if dtype == "fp16" else None
                heads[kernel]["tma"] = twin or in_tiles(arch, dtype, d, kernel)
                write(table)
            continue
        there = kernel in heads and ("others" in heads[kernel] or not options.others)
        again = options.retry or (options.spilling and there and heads[kernel]["spills"])
        if (there and not again) or "measured" in heads.get(kernel, {}) or time.monotonic() > end:
            continue
        twin = {"fp16": "bf16", "bf16": "fp16"}.get(dtype, "")
        like = table[arch].get(twin, {}).get(str(d), {}).get(kernel) if dtype == "fp16" or again else None
        row = choose(arch, dtype, d, kernel, others=options.others, like=like)
        if row is not None:
            heads[kernel] = row
            write(table)


if __name__ == "__main__":
    main()
