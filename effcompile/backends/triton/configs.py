"""Tile sizes of the kernels per architecture, dtype and head size: read from configs.toml, which benchmarks/triton_aot.py writes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from effcompile.backends.triton import interpreting

__all__ = ["KERNELS", "TABLE", "Config", "architecture", "attention_config", "dtype_name", "head_class", "using"]

TABLE = Path(__file__).with_name("configs.toml")
#: The attention kernels that have tiles of their own.
KERNELS = ("forward", "dq", "dkdv")
_NAMES = {torch.float32: "fp32", torch.float16: "bf16", torch.bfloat16: "bf16"}  # fp16 needs what bf16 needs: one table


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """block_m × block_n elements of the score matrix per step, warps per program, stages of the software pipeline.

    precision: how fp32 is multiplied: "ieee", or "tf32x3", which is three tensor-core products as exact as fp32's inputs.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    precision: str | None = None

    @property
    def launch(self) -> dict[str, Any]:
        """Keywords of a launch. Fused multiply-adds are asked for: triton ≥ 3.9 leaves them off by default."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


_forced: ContextVar[dict[str, Config] | None] = ContextVar("forced", default=None)


@contextmanager
def using(**configs: Config) -> Iterator[None]:
    """Within this context, kernels are launched so, whatever the table says: for measuring and for compiling without a GPU."""
    token = _forced.set(configs)
    try:
        yield
    finally:
        _forced.reset(token)


def dtype_name(dtype: torch.dtype) -> str:
    """The table's name of a dtype."""
    return _NAMES[dtype]


def head_class(d: int, dv: int) -> int:
    """The head size whose configuration is taken: the next power of two of the wider one, from 64 on."""
    return max(64, 1 << (max(d, dv) - 1).bit_length())


@cache
def architecture(device: torch.device) -> str:
    """The table's name of a GPU: of its generation, or of the nearest older one there is."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return "gfx942"
    return next((f"sm_{at}" for at in (100, 90) if properties.major * 10 >= at), "sm_80")


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def attention_config(kernel: str, arch: str | None, dtype: torch.dtype, d: int, dv: int) -> Config | None:
    """The configuration of one of KERNELS, None where no tile fits the architecture. arch None: the interpreter's."""
    forced = (_forced.get() or {}).get(kernel)
    if forced is not None:
        return forced
    if arch is None or interpreting():
        return Config(block_m=32, block_n=32, warps=4, stages=1, precision="ieee" if dtype == torch.float32 else None)
    row = _table().get(arch, {}).get(dtype_name(dtype), {}).get(str(head_class(d, dv)), {}).get(kernel)
    return Config(**{field.name: row[field.name] for field in fields(Config) if field.name in row}) if row else None
