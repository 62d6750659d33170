"""The fastest settings of a session, kept: a model is not timed under each again at the same sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated

import msgspec
import onnxruntime

from effcompile.backends.onnxruntime import session
from effcompile.backends.onnxruntime.session import Settings
from effcompile.core.arrays import Array
from effcompile.core.files import cache_folder
from effcompile.core.kept_json import recalled, remember
from effcompile.core.units import format_seconds
from effcompile.machine.hardware import this_hardware

#: Files that are kept, and bytes of one.
_MOST_FILES, _MOST_BYTES = 64, 64 << 10
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class Tuned(msgspec.Struct, kw_only=True, frozen=True):
    """The settings that were fastest, and seconds of a call under each that was timed, on that day."""

    chosen: Settings
    seconds: dict[str, _Seconds]
    day: str

    def told(self) -> str:
        """The figures in words; of another day with its date."""
        figures = ", ".join(f"{name}: {format_seconds(value)}" for name, value in self.seconds.items())
        return figures if self.day == _today() else f"{figures} ({self.day})"


def tuned(
    path: Path, feeds: Mapping[str, Array], measure: Callable[[], tuple[Settings, dict[str, float]]]
) -> Tuned:
    """What `measure` says is the fastest, read from the cache where this model was timed before, and kept
    there.
    """
    file = cache_folder() / "sessions" / f"{_key(path, feeds)}.json"
    if (known := recalled(file, Tuned, _MOST_BYTES, "kept settings")) is not None:
        return known
    chosen, seconds = measure()
    found = Tuned(chosen=chosen, seconds=seconds, day=_today())
    remember(file, found, _MOST_FILES)
    return found


def _key(path: Path, feeds: Mapping[str, Array]) -> str:
    """The hash of what a call's time follows from: the model's files, the sizes, the machine and its
    threads.
    """
    sizes = [(name, array.shape, str(array.dtype)) for name, array in feeds.items()]
    asked = (sizes, this_hardware(), onnxruntime.__version__, session.candidates())
    digest = hashlib.sha256(repr(asked).encode())
    for part in sorted(path.parent.glob(f"{path.name}*")):
        with part.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _today() -> str:
    return date.today().isoformat()
