"""How a run is written to a file, and read: tensors and plain values only."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effcompile.core.errors import FormatError, UsageError
from effcompile.core.files import write_atomically
from effcompile.runs.stage import Stage

#: The form of what `write` writes.
_VERSION = 3
_WANTED: Mapping[str, type | tuple[type, ...]] = {
    "stages": list, "done": list, "batches": list, "at": int, "model": Mapping, "states": dict,
    "effects": dict, "plateaus": list, "random": Tensor, "rates": list,
}  # fmt: skip


def write(file: Path, held: Mapping[str, object]) -> None:
    """Whole, or not at all.

    Raises:
        UsageError: the file cannot be written.
    """
    buffer = io.BytesIO()
    torch.save({"version": _VERSION, **held}, buffer)
    write_atomically(file, buffer.getvalue())


def read(file: Path) -> dict[str, Any]:
    """What `write` wrote.

    Raises:
        UsageError: there is no such file. FormatError: it is not one of ours.
    """
    if not file.is_file():
        raise UsageError(f"There is no saved run at {str(file)!r}. Run.save(file) writes one.")
    try:
        held = torch.load(file, weights_only=True)
        if held["version"] != _VERSION:
            raise ValueError(f"version {held['version']!r}")
        wrong = [name for name, kind in _WANTED.items() if not isinstance(held[name], kind)]
        if wrong:
            raise ValueError(f"{wrong[0]} is a {type(held[wrong[0]]).__name__}")
    except Exception as error:
        raise FormatError(
            f"{str(file)!r} is not a saved run: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
    return dict(held)


def plain(stage: Stage) -> dict[str, object]:
    """A stage as JSON has it; of scores how they were made."""
    found = asdict(replace(stage, scores=None, data=None))
    return {**found, "data": stage.data, "scores": None if stage.scores is None else stage.scores.kind}
