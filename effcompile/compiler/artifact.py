"""Runs what `optimize -o DIR` left in DIR, without the model it was made of."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from effcompile.backends.base import Run
from effcompile.compiler.machine import usable_backends
from effcompile.core.errors import EffcompileError, FormatError, InputsError, LoweringError, VerificationError, clipped
from effcompile.core.folders import read_steadily
from effcompile.core.stages import first_line
from effcompile.core.timing import median_seconds
from effcompile.core.units import format_bytes
from effcompile.ir.plan import Plan
from effcompile.ir.saved import PLAN, check_artifact
from effcompile.machine.hardware import this_hardware

_INPUT = re.compile(r"(?P<name>\S+) \[(?P<dims>.*)\] (?P<dtype>\w+)")
_SIZE = re.compile(r"[0-9]{1,18}")
_INPUT_SHARE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRun:
    """Seconds per call, and a line for each output."""

    seconds: float
    outputs: tuple[str, ...]


def run_artifact(directory: str | Path, inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None) -> ArtifactRun:
    """Load a saved artifact, run it, time it.

    Args:
        directory: what `optimize -o` wrote: plan.json and the artifact.
        inputs: (args, kwargs); None makes inputs of the plan's example sizes (integers 1, floats of unit variance).

    Raises:
        UsageError: no plan or artifact there. FormatError: not one of ours, or not the one that the plan describes.
        InputsError: other inputs than the plan's.
        LoweringError: it cannot be run. VerificationError: the outputs hold NaN.
    """
    folder = Path(directory)
    plan, run = read_steadily(folder, _opened)
    tensors = _generated(plan) if inputs is None else _named(plan, inputs)
    try:
        outputs = run(tensors)
    except EffcompileError:
        raise
    except Exception as error:  # the runtimes' errors have no common base: of memory, of shapes
        raise LoweringError(f"The artifact in {str(folder)!r} cannot be run on these inputs: {first_line(error)}") from error
    if any(output.is_floating_point() and bool(output.isnan().any()) for output in outputs):
        raise VerificationError(f"The artifact in {str(folder)!r} returned NaN. Check it with `effcompile optimize` again.")
    seconds = median_seconds(partial(run, tensors), min_rounds=5, budget=1.0)
    return ArtifactRun(seconds=seconds, outputs=tuple(_describe(output) for output in outputs))


def _opened(folder: Path) -> tuple[Plan, Run]:
    plan = Plan.load(folder / PLAN)
    check_artifact(plan, folder)
    backends, _ = usable_backends(plan.backend)
    return plan, backends[0].open(folder, plan)


def _generated(plan: Plan) -> dict[str, torch.Tensor]:
    """Inputs of the plan's example sizes.

    Raises:
        FormatError: a line that is none, or sizes that no example has.
    """
    specs = [_spec(line) for line in plan.inputs]
    most = this_hardware().memory_bytes // _INPUT_SHARE
    needed = sum(math.prod(sizes) * dtype.itemsize for _, sizes, dtype in specs)
    if needed > most:
        raise FormatError(
            f"The plan's inputs ({clipped('; '.join(plan.inputs))}) take {format_bytes(min(needed, 1 << 63))}; examples are given "
            f"{format_bytes(most)} here, a {_INPUT_SHARE}th of this machine's memory. Give inputs of your own: `effcompile run --inputs`."
        )
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(sizes, generator=generator).to(dtype) if dtype.is_floating_point else torch.ones(sizes, dtype=dtype)
        for name, sizes, dtype in specs
    }


def _spec(line: str) -> tuple[str, list[int], torch.dtype]:
    """(name, sizes, dtype) of a plan's input line: `ids [batch=2 × 128] int64`."""
    match = _INPUT.fullmatch(line)
    dtype = vars(torch).get(match["dtype"]) if match else None
    sizes = [dim.rpartition("=")[2] for dim in match["dims"].split(" × ") if dim] if match else []
    if match is None or not isinstance(dtype, torch.dtype) or not all(_SIZE.fullmatch(size) for size in sizes):
        raise FormatError(f"The plan's input line {clipped(line)!r} does not read `name [sizes] dtype`. Plan again, or give inputs.")
    return match["name"], [int(size) for size in sizes], dtype


def _named(plan: Plan, inputs: tuple[tuple[Any, ...], Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The tensors under the plan's names: by keyword where they have one, positional ones in order."""
    args, kwargs = inputs
    names = [line.partition(" ")[0] for line in plan.inputs]
    positional = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    named = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    rest = [name for name in names if name not in named]
    if len(rest) != len(positional) or not set(named) <= set(names):
        raise InputsError(
            f"The artifact takes {clipped(', '.join(names))}; given were {len(positional)} positional and {', '.join(named) or 'no named'}."
        )
    found = {**named, **dict(zip(rest, positional, strict=True))}
    return {name: found[name] for name in names}


def _describe(output: torch.Tensor) -> str:
    dtype = str(output.dtype).removeprefix("torch.")
    norm = f", norm {float(output.float().norm()):.4g}" if output.numel() else ""
    return f"{dtype} [{' × '.join(map(str, output.shape))}]{norm}"
