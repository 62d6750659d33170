"""Where effcompile writes: its cache, and files that are whole or absent.

How it reads: never more than a file of ours can have.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import platformdirs

from effcompile.core.disk import abandoned, lock, sync
from effcompile.core.errors import FormatError, UsageError
from effcompile.core.trust import distrust_file

_UNFINISHED = ".unfinished"
#: Names of the files that tokenizers of transformers are made from: its classes' `vocab_files_names`, and
#: what is read beside.
TOKENIZERS = (
    "tokenizer*", "*.tokenizer", "special_tokens_map.json", "added_tokens.json", "vocab*", "*vocab.json",
    "merges.txt", "*.model", "*.spm", "*.tiktoken", "tekken.json", "bpe.codes", "dict.txt", "emoji.json",
    "byte_maps.json", "normalizer.json", "word_*.json",
)  # fmt: skip


def cache_folder() -> Path:
    """Where effcompile keeps what it measured and built."""
    if own := os.environ.get("EFFCOMPILE_CACHE"):
        return Path(own).expanduser()
    found = platformdirs.user_cache_path("effcompile", appauthor=False)
    # a user without a home
    return found if found.is_absolute() else Path(tempfile.gettempdir()) / "effcompile"


def found_in(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """The files of a folder whose names are of one of the patterns, each once."""
    found = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return sorted(found)


def read_bounded(path: Path, most: int, what: str) -> bytes:
    """A file's content; `what` it is, for errors: "the plan".

    Raises:
        UsageError: it cannot be read. FormatError: it has more than `most` bytes.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:  # a null byte in the name is a ValueError
        raise UsageError(
            f"Cannot read {what} {str(path)!r}: {getattr(error, 'strerror', None) or error}."
        ) from error
    if len(content) > most:
        raise FormatError(f"{str(path)!r} has more than {most:,} bytes: that is not {what}.")
    return content


def read_kept(path: Path, most: int, what: str) -> bytes:
    """The same of what effcompile keeps for itself, if nobody else can have written it.

    Raises:
        UsageError: it cannot be read, or may be another's. FormatError: it has more than `most` bytes.
    """
    if path.exists() and (said := distrust_file(path)) is not None:
        raise UsageError(f"{said}: {what} is not read.")
    return read_bounded(path, most, what)


def write_kept(path: Path, content: bytes) -> Path:
    """Write what `read_kept` reads, for nobody else to change. Raises as `write_atomically` does.

    The disk is not waited for, which took up to 0.9 s a file: what a crash of the machine leaves of it is
    found to be broken when it is read, and found again.
    """
    return write_atomically(path, content, mode=0o644, durable=False)


def keep(path: Path, content: bytes, most: int) -> None:
    """The same among others that are kept in its folder: of more than `most` the oldest go.

    Raises as `write_atomically` does, and OSError.
    """
    write_kept(path, content)
    for old in sorted(path.parent.glob(f"*{path.suffix}"), key=lambda each: each.stat().st_mtime)[:-most]:
        old.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes, *, mode: int = 0o666, durable: bool = True) -> Path:
    """Write a file so that it is whole or absent: temporary file beside it, fsync, rename.

    What killed writers left is removed.

    mode: of the file, but for what the process's umask takes away. durable: wait until it is on the disk, so
    that it is whole or absent even where the machine crashes.

    Raises:
        UsageError: the folder cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary, file = _temporary(path, mode)
        try:
            with file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            sync(path.parent)
    except OSError as error:
        raise UsageError(
            f"Cannot write {str(path)!r}: {error.strerror or error}. Choose a folder you may write to "
            "with -o."
        ) from error
    _remove_unfinished(path)
    return path


def _temporary(path: Path, mode: int) -> tuple[Path, BinaryIO]:
    """A new file beside, open and locked: nobody takes its writer for dead."""
    while True:
        temporary = path.with_name(f".{path.name[:64]}.{secrets.token_hex(4)}{_UNFINISHED}")
        file = os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")
        if lock(file.fileno()) is not False and temporary.exists():
            return temporary, file
        file.close()


def _remove_unfinished(path: Path) -> None:
    """Remove the temporary files of writers of this file that are dead: nobody holds their lock."""
    with contextlib.suppress(OSError):
        for left in path.parent.glob(f".{glob.escape(path.name[:64])}.*{_UNFINISHED}"):
            with abandoned(left) as dead:
                if dead:
                    left.unlink()
