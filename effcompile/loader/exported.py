"""A program of torch.export from its .pt2, with the inputs that it was exported with."""

from __future__ import annotations

from pathlib import Path

import torch

from effcompile.core.errors import InputsError, UsageError
from effcompile.core.reasons import Because
from effcompile.core.stages import first_line
from effcompile.core.torch_compat_archives import what_runs_code
from effcompile.loader.loaded import Loaded
from effcompile.loader.source import ModelSource, Reading


def load_exported(source: ModelSource, reading: Reading) -> Loaded:
    """The program as a module, with its example inputs.

    Raises:
        UsageError: no program of torch.export, or one with pickles in it, which were not allowed.
            InputsError: it has no example inputs.
    """
    if not reading.allow_pickle:
        refuse_pickles(source.path)
    try:
        program = torch.export.load(source.path)
        module = program.module(check_guards=False)
    except Exception as error:
        raise UsageError(
            f"{str(source.path)!r} is no program that torch.export.load reads: {first_line(error)}"
        ) from error
    if program.example_inputs is None:
        raise InputsError(
            f"{str(source.path)!r} holds no example inputs. Export the model again: torch.export.save "
            "keeps them."
        )
    args, kwargs = program.example_inputs
    note = Because(
        "the inputs are those that the program was exported with, whose free axes are planned as they "
        "were then"
    )
    module.__class__.__name__ = source.path.stem.replace("-", "_")
    return Loaded(
        path=source.path,
        name=source.path.stem,
        model=module,
        args=tuple(args),
        kwargs=dict(kwargs),
        notes=(note,),
    )


def refuse_pickles(path: Path) -> None:
    """Refuse an archive that runs code of its own when torch opens it.

    Raises:
        UsageError: it is one, or no archive.
    """
    try:
        brought = what_runs_code(path)
    except (ValueError, OSError) as error:
        raise UsageError(
            f"{str(path)!r} is no program of torch.export ({first_line(error)}). It may be cut off: "
            "export it again."
        ) from error
    if brought is not None:
        raise UsageError(
            f"{str(path)!r} holds {brought}, which may run code when it is opened. If you trust its source, "
            "give --allow-pickle; a program of plain tensors that this torch exports holds nothing of it."
        )
