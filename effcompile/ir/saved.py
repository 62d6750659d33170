"""The folder that `-o` writes: plan.json, the artifact whose digests it holds, report.html, and nothing else.

It is replaced whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from effcompile.core.errors import FormatError, UsageError, clipped
from effcompile.core.files import read_bounded
from effcompile.core.folders import check_replaceable, replacing
from effcompile.ir.plan import FORMAT, MOST_BYTES, Plan

PLAN, REPORT = "plan.json", "report.html"


class _Head(msgspec.Struct):
    """What tells that a file is a plan of ours, of whatever version, and which files were written with it."""

    format: str
    artifact: dict[str, str] = {}


def save(
    plan: Plan,
    folder: Path,
    *,
    artifact: Callable[[Path], Iterable[Path]] | None = None,
    beside: Mapping[str, str] | None = None,
) -> Plan:
    """Write a plan with its artifact into a folder, which holds nothing else afterwards; who reads it sees
    all of the old or of the new.

    Args:
        plan: what is written as plan.json, with the digests of the artifact.
        folder: made where it does not exist; what effcompile wrote there before is replaced.
        artifact: writes the artifact's files; None for a plan without one.
        beside: file name → text.

    Returns:
        The plan as it was written, with the SHA-256 of each file of the artifact.

    Raises:
        UsageError: the folder cannot be written, or holds files of others. LoweringError: the backend cannot
            save the model.
    """
    with replacing(folder, files_of) as new:
        files = () if artifact is None else artifact(new)
        written = plan.with_changes(artifact={file.name: _digest(file) for file in files})
        for name, text in (beside or {}).items():
            (new / name).write_text(text, encoding="utf-8")
        written.save(new / PLAN)
    return written


def save_alone(plan: Plan, directory: str | os.PathLike[str]) -> Path:
    """Write plan.json into a folder, whole or not at all, beside what lies there. Returns the folder.

    Raises:
        UsageError: the folder cannot be written.
    """
    folder = Path(directory)
    plan.save(folder / PLAN)
    return folder


def is_plan(path: Path) -> bool:
    """Whether a path names a saved plan: a .json, or a folder with a plan.json."""
    return (path / PLAN).is_file() if path.is_dir() else path.suffix == ".json" and path.is_file()


def check_folder(folder: Path) -> None:
    """Fail before the work, not after it.

    Raises:
        UsageError: `folder` is none, or cannot be written or replaced.
    """
    check_replaceable(folder, files_of)


def files_of(folder: Path) -> set[str]:
    """Names of the files in a folder that effcompile wrote: a plan of ours, the artifact that it names, a
    report of ours.
    """
    found = set()
    try:
        head = msgspec.json.decode(read_bounded(folder / PLAN, MOST_BYTES, "the plan"), type=_Head)
        if head.format == FORMAT:
            found = {PLAN, *head.artifact}
    except (UsageError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        with (folder / REPORT).open("rb") as report:
            if b"<title>effcompile " in report.read(1 << 10):
                found.add(REPORT)
    except OSError:
        pass
    return found


def check_artifact(plan: Plan, folder: Path) -> None:
    """Make sure that `folder` holds the very files that `plan` was written with.

    Raises:
        UsageError: a file is missing, or the plan was written without an artifact. FormatError: a file is
            another one.
    """
    if not plan.artifact:
        raise UsageError(
            f"{str(folder / PLAN)!r} was written without an artifact. Make one with `effcompile optimize -o`."
        )
    for name, wanted in plan.artifact.items():
        file = folder / Path(name).name  # a foreign plan may not point elsewhere
        if not os.path.isfile(file):  # Path.is_file raises for a name longer than a file's may be
            raise UsageError(
                f"There is no {clipped(repr(str(file)))}, which {PLAN} describes. Write it again with "
                "`effcompile optimize -o`."
            )
        if _digest(file) != wanted:
            raise FormatError(
                f"{str(file)!r} is not the artifact that {PLAN} beside it describes (SHA-256 differs): one "
                f"of the two was changed. Write both again with `effcompile optimize -o {folder}`."
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
