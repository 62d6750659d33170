"""Operator figures of this machine, kept between plans: a JSON file beside the calibration, written whole or
not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from effcompile.core.errors import UsageError
from effcompile.core.files import read_kept, write_kept
from effcompile.core.reasons import Because, Reason
from effcompile.estimate.operators import Measured
from effcompile.machine.calibration import Calibration, calibration_path

_FORMAT = "effcompile-operators-4"
#: More than this many, and the file is begun anew.
_MOST = 20_000
#: What a figure can be: seconds of one operator, bytes of its workspace, bytes of the file.
_LONGEST, _LARGEST, _MOST_BYTES = 600.0, 1 << 50, 64 << 20


class _File(msgspec.Struct, kw_only=True):
    format: str
    torch: str
    threads: int
    operators: dict[str, Measured]


def figures_path(of: Calibration | None = None) -> Path:
    """Where this machine's figures are kept, by hardware and thread count; those of the GPU that a
    calibration is `of` apart from them.
    """
    calibration = calibration_path(None if of is None else of.machine)
    return calibration.with_name(
        calibration.name.replace("calibration-", f"operators-{torch.get_num_threads()}t-")
    )


def known_figures(of: Calibration | None = None) -> dict[str, Measured]:
    """Figures measured before with this torch and thread count; none when there is no such file or it is not
    ours.
    """
    try:
        found = msgspec.json.decode(
            read_kept(figures_path(of), _MOST_BYTES, "the operator times"), type=_File
        )
    except (UsageError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    fits = (
        found.format == _FORMAT
        and found.torch == str(torch.__version__)
        and found.threads == torch.get_num_threads()
    )
    return dict(found.operators) if fits and all(map(_sound, found.operators.values())) else {}


def _sound(measured: Measured) -> bool:
    sizes = (measured.workspace, *measured.results)
    return 0 < measured.seconds <= _LONGEST and min(sizes) >= 0 and max(sizes) <= _LARGEST


def keep_figures(known: Mapping[str, Measured], of: Calibration | None = None) -> Reason | None:
    """Write the figures for the next plan; returns a note where that was not possible."""
    kept = dict(list(known.items())[-_MOST:])
    file = _File(
        format=_FORMAT, torch=str(torch.__version__), threads=torch.get_num_threads(), operators=kept
    )
    try:
        write_kept(figures_path(of), msgspec.json.encode(file))
    except (UsageError, OSError) as error:
        text = "operator times could not be kept for the next plan ({name}); EFFCOMPILE_CACHE={name}"
        return Because(text, (str(error), os.environ.get("EFFCOMPILE_CACHE", "")))
    return None
