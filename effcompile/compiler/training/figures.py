"""Operator figures of this machine, kept between plans: a JSON file beside the calibration, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from effcompile.core.errors import UsageError
from effcompile.core.files import write_atomically
from effcompile.estimate.operators import Measured
from effcompile.machine.calibration import calibration_path

_FORMAT = "effcompile-operators-2"
#: More than this many, and the file is begun anew.
_MOST = 20_000


class _File(msgspec.Struct, kw_only=True):
    format: str
    torch: str
    threads: int
    operators: dict[str, Measured]


def figures_path() -> Path:
    """Where this machine's figures are kept, by hardware and thread count."""
    calibration = calibration_path()
    return calibration.with_name(calibration.name.replace("calibration-", f"operators-{torch.get_num_threads()}t-"))


def known_figures() -> dict[str, Measured]:
    """Figures measured before with this torch and thread count; none when there is no such file or it is not ours."""
    try:
        found = msgspec.json.decode(figures_path().read_bytes(), type=_File)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    fits = found.format == _FORMAT and found.torch == str(torch.__version__) and found.threads == torch.get_num_threads()
    sound = all(m.seconds >= 0 and min(m.workspace, *m.results, 0) >= 0 for m in found.operators.values())
    return dict(found.operators) if fits and sound else {}


def keep_figures(known: Mapping[str, Measured]) -> str | None:
    """Write the figures for the next plan; returns a note where that was not possible."""
    kept = dict(list(known.items())[-_MOST:])
    file = _File(format=_FORMAT, torch=str(torch.__version__), threads=torch.get_num_threads(), operators=kept)
    try:
        write_atomically(figures_path(), msgspec.json.encode(file))
    except (UsageError, OSError) as error:
        return f"operator times could not be kept for the next plan ({error}); EFFCOMPILE_CACHE={os.environ.get('EFFCOMPILE_CACHE', '')}"
    return None
