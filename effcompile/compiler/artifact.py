"""Writes what `optimize -o DIR` leaves in DIR, and runs it without the model it was made of."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from effcompile.backends.base import Lowered
from effcompile.compiler.machine import usable_backends
from effcompile.core.errors import FormatError, InputsError, UsageError, VerificationError
from effcompile.core.timing import median_seconds
from effcompile.ir.plan import Plan

PLAN = "plan.json"
_INPUT = re.compile(r"(?P<name>\S+) \[(?P<dims>.*)\] (?P<dtype>\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRun:
    """Seconds per call, and a line for each output."""

    seconds: float
    outputs: tuple[str, ...]


def save_artifact(lowered: Lowered, plan: Plan, directory: Path) -> Plan:
    """Write the artifact, then plan.json with the SHA-256 of each of its files: a kill in between is noticed by `check_artifact`.

    Raises:
        UsageError: the folder cannot be written. LoweringError: the backend cannot save the model.
    """
    files = lowered.save(directory)
    written = plan.with_changes(artifact={file.name: _digest(file) for file in files})
    written.save(directory / PLAN)
    return written


def check_artifact(plan: Plan, directory: Path) -> None:
    """Make sure that `directory` holds the very files that `plan` was written with; plans of before that say nothing.

    Raises:
        UsageError: a file is missing. FormatError: a file is another one.
    """
    for name, wanted in plan.artifact.items():
        file = directory / Path(name).name  # a foreign plan may not point elsewhere
        if not file.is_file():
            raise UsageError(f"There is no {str(file)!r}, which {PLAN} describes. Write it again with `effcompile optimize -o`.")
        if _digest(file) != wanted:
            raise FormatError(
                f"{str(file)!r} is not the artifact that {PLAN} beside it describes (SHA-256 differs): one of the two was changed, or "
                f"writing was interrupted. Write both again with `effcompile optimize -o {directory}`."
            )


def _digest(file: Path) -> str:
    """SHA-256 in hexadecimal.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"Cannot read {str(file)!r}: {error.strerror or error}.") from error


def run_artifact(directory: str | Path, inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None) -> ArtifactRun:
    """Load a saved artifact, run it, time it.

    Args:
        directory: what `optimize -o` wrote: plan.json and the artifact.
        inputs: (args, kwargs); None makes inputs of the plan's example sizes (integers 1, floats of unit variance).

    Raises:
        UsageError: no plan or artifact there. FormatError: not one of ours, or not the one that the plan describes.
        InputsError: other inputs than the plan's.
        VerificationError: the outputs hold NaN.
    """
    folder = Path(directory)
    plan = Plan.load(folder / PLAN)
    check_artifact(plan, folder)
    backends, _ = usable_backends(plan.backend)
    run = backends[0].open(folder, plan)
    tensors = _generated(plan) if inputs is None else _named(plan, inputs)
    outputs = run(tensors)
    if any(output.is_floating_point() and bool(output.isnan().any()) for output in outputs):
        raise VerificationError(f"The artifact in {str(folder)!r} returned NaN. Check it with `effcompile optimize` again.")
    seconds = median_seconds(partial(run, tensors), min_rounds=5, budget=1.0)
    return ArtifactRun(seconds=seconds, outputs=tuple(_describe(output) for output in outputs))


def _generated(plan: Plan) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for line in plan.inputs:
        match = _INPUT.fullmatch(line)
        dtype = getattr(torch, match["dtype"], None) if match else None
        if match is None or not isinstance(dtype, torch.dtype):
            raise FormatError(f"The plan's input line {line!r} does not read `name [sizes] dtype`. Plan again, or give inputs.")
        sizes = [int(dim.rpartition("=")[2]) for dim in match["dims"].split(" × ") if dim]
        if math.prod(sizes) > 2**31:
            raise FormatError(f"The plan's input {line!r} is larger than any model's. Plan again, or give inputs.")
        made[match["name"]] = (
            torch.randn(sizes, generator=generator).to(dtype) if dtype.is_floating_point else torch.ones(sizes, dtype=dtype)
        )
    return made


def _named(plan: Plan, inputs: tuple[tuple[Any, ...], Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The tensors under the plan's names: by keyword where they have one, positional ones in order."""
    args, kwargs = inputs
    names = [line.partition(" ")[0] for line in plan.inputs]
    positional = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    named = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    rest = [name for name in names if name not in named]
    if len(rest) != len(positional) or not set(named) <= set(names):
        raise InputsError(
            f"The artifact takes {', '.join(names)}; given were {len(positional)} positional and {', '.join(named) or 'no named'}."
        )
    found = {**named, **dict(zip(rest, positional, strict=True))}
    return {name: found[name] for name in names}


def _describe(output: torch.Tensor) -> str:
    dtype = str(output.dtype).removeprefix("torch.")
    norm = f", norm {float(output.float().norm()):.4g}" if output.numel() else ""
    return f"{dtype} [{' × '.join(map(str, output.shape))}]{norm}"
