"""The files that a model reads its weights from, which ONNX Runtime opens by itself."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from effcompile.core.errors import FormatError, clipped

#: A tensor's entry `location` as protobuf writes it, up to the length of its value. The file is searched and
#: not parsed: a large model is read once, by the runtime.
_LOCATION = re.compile(rb"\n\x08location\x12([\x80-\xff]{0,4}[\x00-\x7f])")


def check_beside(model: Path, artifact: Mapping[str, str]) -> None:
    """Refuse a model that reads a file of which no digest was compared. `artifact`: a plan's, by name.

    Raises:
        FormatError: it names such a file.
    """
    if others := sorted(set(_locations(model)) - artifact.keys()):
        raise FormatError(
            f"{str(model)!r} reads its weights from {clipped(others[0])!r}, a file that the plan beside it "
            "does not describe: one of the two was changed. Write both again with `effcompile optimize -o "
            f"{model.parent}`."
        )


def _locations(model: Path) -> Iterator[str]:
    if not model.is_file() or not model.stat().st_size:
        return  # ONNX Runtime says so better
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for found in _LOCATION.finditer(content):
            length = sum((byte & 0x7F) << 7 * at for at, byte in enumerate(found[1]))
            yield content[found.end() : found.end() + length].decode(errors="replace")
