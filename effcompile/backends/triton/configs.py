"""Tile sizes of the kernels per architecture, dtype and head size: read from configs.toml, which
benchmarks/triton_aot.py writes.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "KERNELS", "TABLE", "TILE", "LaunchConfig", "architecture", "architecture_of", "candidates", "dtype_name",
    "forced", "found_with", "head_class", "here", "interpreting", "shared_memory", "using",
]  # fmt: skip

TABLE = Path(__file__).with_name("configs.toml")
#: The attention kernels that have tiles of their own.
KERNELS = ("forward", "dq", "dkdv")
#: What a tile is in the table; `others` of a row are such numbers and their bytes of shared memory, `tma`
#: those that copy whole tiles; `measured` is where its own tile was found the fastest of the others.
TILE = ("block_m", "block_n", "warps", "stages")
_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def interpreting() -> bool:
    """Whether this process runs kernels in triton's interpreter: decided by the environment when triton is
    imported, for good.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """block_m × block_n elements of the score matrix per step, warps per program, stages of the software
    pipeline.

    precision: how fp32 is multiplied: "ieee", or "tf32x3", which is three tensor-core products as exact as
    fp32's inputs. tma: what a step reads is copied in whole tiles by the tensor memory accelerator (from
    Hopper on).
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    precision: str | None = None
    tma: bool = False

    @property
    def launch(self) -> dict[str, int]:
        """Keywords of a launch.

        Fused multiply-adds are asked for: triton ≥ 3.9 leaves them off by default.
        """
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


_forced: ContextVar[dict[str, LaunchConfig] | None] = ContextVar("forced", default=None)


@contextmanager
def using(**configs: LaunchConfig) -> Iterator[None]:
    """Within this context, kernels are launched so, whatever the table says: for measuring and for compiling
    without a GPU.
    """
    token = _forced.set(configs)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> bool:
    """Whether some kernel's launches are."""
    return bool(_forced.get())


def dtype_name(dtype: torch.dtype) -> str:
    """The table's name of a dtype."""
    return _NAMES[dtype]


def head_class(d: int, dv: int) -> int:
    """The head size whose configuration is taken: the next power of two of the wider one, from 64 on."""
    return max(64, 1 << (max(d, dv) - 1).bit_length())


@cache
def architecture(device: torch.device | None = None) -> str | None:
    """The table's name for a GPU (None: the current one); None where the table has nothing for it."""
    properties = torch.cuda.get_device_properties(device)
    return architecture_of(properties.major, properties.gcnArchName if torch.version.hip else None)


def architecture_of(major: int, amd: str | None = None) -> str | None:
    """By compute capability, or AMD's name: where other GPUs than the table's have the same instructions, its
    tiles are theirs.

    Capability 12 (consumer Blackwell) has neither Hopper's nor data-centre Blackwell's matrix instructions,
    and is like sm_80. Before 8 there is no bf16 and no asynchronous copy.
    """
    if amd is not None:
        return "gfx942" if amd.partition(":")[0] in ("gfx942", "gfx950") else None
    return {8: "sm_80", 9: "sm_90", 10: "sm_100", 12: "sm_80"}.get(major)


@cache
def shared_memory(device: torch.device | None = None) -> int | None:
    """Bytes that one program may take on a GPU; None where torch does not say (HIP: the table's
    own 64 KiB).
    """
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None) or None


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def found_with(arch: str) -> str:
    """The versions of triton that the architecture's tiles were compiled with."""
    versions = {
        row["triton"] for heads in _table()[arch].values() for rows in heads.values() for row in rows.values()
    }
    return ", ".join(sorted(versions))


@cache
def here(device: torch.device | None = None) -> str:
    """A GPU and the triton that compiles for it, as rows name what they were measured on."""
    return f"{torch.cuda.get_device_name(device)}, triton {version('triton')}"


def candidates(
    kernel: str,
    arch: str | None,
    dtype: torch.dtype,
    d: int,
    dv: int,
    shared: int | None = None,
    here: str | None = None,
) -> tuple[LaunchConfig, ...]:
    """Configurations of one of KERNELS that compile and fit, the likeliest first; none where no tile fits,
    one where it was measured.

    `arch` is of the table (None: the interpreter's); `shared`: bytes that a program may take, where a GPU has
    less than that architecture; `here`: where they will run.
    """
    forced = (_forced.get() or {}).get(kernel)
    if forced is not None:
        return (forced,)
    if arch is None or interpreting():
        return (
            LaunchConfig(
                block_m=32,
                block_n=32,
                warps=4,
                stages=1,
                precision="ieee" if dtype == torch.float32 else None,
            ),
        )
    return _of_table(kernel, arch, dtype_name(dtype), head_class(d, dv), shared, here)


@cache
def _of_table(
    kernel: str, arch: str, dtype: str, size: int, shared: int | None, here: str | None
) -> tuple[LaunchConfig, ...]:
    row = _table().get(arch, {}).get(dtype, {}).get(str(size), {}).get(kernel)
    if row is None:
        return ()
    first = [row[name] for name in TILE]
    others = [] if here is not None and row.get("measured") == here else row.get("others", [])
    kinds = (
        (False, [*first, row["shared"]]),
        *((False, o) for o in others),
        *((True, o) for o in row.get("tma", [])),
    )
    return tuple(
        LaunchConfig(**dict(zip(TILE, numbers, strict=False)), precision=row.get("precision"), tma=tma)
        for tma, numbers in kinds
        if shared is None or numbers[len(TILE)] <= shared
    )
