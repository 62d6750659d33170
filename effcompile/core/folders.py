"""A folder that is replaced whole: whoever reads it finds the old one or the new one, also after a kill or a power cut in between.

A new folder is written beside, under a hidden name, brought to the disk, and takes the place of the old one in one step: Linux exchanges
the two names (renameat2); elsewhere the old folder is first renamed aside, where `place_of` finds it. What killed writers left
beside is removed by the next one. A writer that lives holds a lock on its folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

from effcompile.core.disk import lock, sync
from effcompile.core.errors import EffcompileError, UsageError

T = TypeVar("T")
#: The names in a folder that may be replaced; all others are the user's.
Ours = Callable[[Path], Collection[str]]

_PART, _WHOLE, _OLD = ".part", ".whole", ".old"  # being written; complete, or just exchanged for; put aside where names cannot be exchanged
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
_TRIES = 20


@contextlib.contextmanager
def replacing(folder: Path, ours: Ours) -> Iterator[Path]:
    """A new, empty folder to write into. At the end it takes the place of `folder`, whole; after an error inside nothing has changed.

    Raises:
        UsageError: the folder cannot be written or replaced, or holds files that are not `ours`.
    """
    check_replaceable(folder, ours)
    target = Path(os.path.realpath(folder))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        new, handle = _claim(target)
        try:
            yield new
            _switch(new, target, ours)
        finally:
            shutil.rmtree(new, ignore_errors=True)
            os.close(handle)
        _collect(target, ours)
    except OSError as error:
        raise UsageError(f"Cannot write {str(folder)!r}: {error.strerror or error}. Choose a folder you may write to with -o.") from error


def check_replaceable(folder: Path, ours: Ours) -> None:
    """Refuse early what `replacing` could not do.

    Raises:
        UsageError: no folder, one that cannot be written or renamed, or one with files that are not `ours`.
    """
    target = Path(os.path.realpath(folder))
    there = next(path for path in (target, *target.parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"-o {str(folder)!r}: {str(there)!r} is a file. Give a folder; it is made when it does not exist.")
    if there == target:
        _refuse_strangers(target, ours)
        if target == Path(os.path.realpath(os.curdir)):
            raise UsageError(f"{str(folder)!r} is the current folder, which cannot be replaced as a whole. {_instead(target)}")
        if os.path.ismount(target):
            raise UsageError(f"{str(folder)!r} is a mount point, which cannot be replaced as a whole. {_instead(target)}")
        there = target.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        choose = f"Choose a folder you may write to with -o: a new one is written beside {str(target)!r} and takes its place."
        raise UsageError(f"Cannot write in {str(there)!r}: {error.strerror or error}. {choose}") from error


def _refuse_strangers(target: Path, ours: Ours) -> None:
    for _ in range(_TRIES):
        before = _identity(target)
        strangers = sorted(set(_names(target)) - set(ours(target)))
        if not strangers:
            return
        if _identity(target) == before:  # else another writer replaced it between the two looks
            break
    named = ", ".join(strangers[:3]) + (f" and {len(strangers) - 3} more" if len(strangers) > 3 else "")
    raise UsageError(
        f"{str(target)!r} holds what effcompile did not write: {named}. A save replaces the folder as a whole. {_instead(target)}"
    )


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _instead(target: Path) -> str:
    return f"Give a folder of its own: -o {str(target / 'effcompile')!r}"


def place_of(folder: Path) -> Path:
    """The folder to read: `folder`, or where a writer was killed between two renames, the old one that it had put aside."""
    if folder.exists():
        return folder
    target = Path(os.path.realpath(folder))
    aside = [path for path in _beside(target) if path.suffix == _OLD]
    return max(aside, key=lambda path: path.stat().st_mtime_ns) if aside else folder


def read_steadily(folder: Path, read: Callable[[Path], T]) -> T:
    """What `read` returns of a folder that was one and the same from its beginning to its end: again when it was replaced meanwhile.

    Raises:
        UsageError: it was replaced every time. What `read` raises of a folder that stayed the same.
    """
    for _ in range(_TRIES):
        place = place_of(folder)
        before = _identity(place)
        try:
            result = read(place)
        except EffcompileError:
            if _identity(place_of(folder)) == before:
                raise
            continue
        if _identity(place) == before:
            return result
    raise UsageError(f"{str(folder)!r} was replaced each of the {_TRIES} times that it was read. Wait until it is written.")


# ------------------------------------------------------------------ writing


def _claim(target: Path) -> tuple[Path, int]:
    """A new folder beside the target, and the descriptor whose lock says that its writer lives."""
    while True:
        new = target.with_name(f"{_prefix(target)}{secrets.token_hex(4)}{_PART}")
        new.mkdir()
        handle = os.open(new, os.O_RDONLY)
        if lock(handle) is not False and new.exists():  # else another writer took it for a dead one's
            return new, handle
        os.close(handle)


def _switch(new: Path, target: Path, ours: Ours) -> None:
    """Bring the new folder to the disk and put it at the target's name; what was there stands beside now."""
    for file in new.iterdir():
        sync(file)
    sync(new)
    whole = new.with_suffix(_WHOLE)
    try:
        if target.exists():
            _refuse_strangers(target, ours)
            with contextlib.suppress(FileNotFoundError):
                shutil.copymode(target, new)
        os.rename(new, whole)
        _put(whole, target)
    except BaseException:
        shutil.rmtree(whole, ignore_errors=True)
        raise
    sync(target.parent)


def _put(whole: Path, target: Path) -> None:
    for _ in range(_TRIES):
        try:
            return os.rename(whole, target)  # also onto an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with contextlib.suppress(FileNotFoundError):  # another writer is between its two renames
            if _exchange(whole, target):
                return None
            os.rename(target, whole.with_name(f"{_prefix(target)}{secrets.token_hex(4)}{_OLD}"))
    raise UsageError(f"{str(target)!r} is being written by others all the time. Wait for them, or choose another folder with -o.")


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system cannot."""
    if sys.platform != "linux":
        return False
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(b))


# ------------------------------------------------------------------ what others left


def _collect(target: Path, ours: Ours) -> None:
    """Remove what was replaced, and what writers of this target left beside it when they were killed."""
    for path in _beside(target):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            try:
                if lock(handle):
                    _discard(path, target, ours)
            finally:
                os.close(handle)


def _discard(folder: Path, target: Path, ours: Ours) -> None:
    """Remove a folder. What somebody else put into the one that was replaced, at the last moment, goes where the new one is."""
    if folder.suffix != _PART:
        for name in set(_names(folder)) - set(ours(folder)):
            if os.path.lexists(target / name):
                return
            os.rename(folder / name, target / name)
        folder = folder.rename(folder.with_suffix(_PART))  # half removed, it could not be told from a stranger's
    shutil.rmtree(folder)


def _beside(target: Path) -> list[Path]:
    """Folders of this target's writers, living and dead."""
    try:
        return [path for path in target.parent.iterdir() if path.name.startswith(_prefix(target))]
    except OSError:
        return []


def _prefix(target: Path) -> str:
    """Hidden, and short whatever the target's name is."""
    return f".effcompile-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:12]}-"


# ------------------------------------------------------------------ what is there


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """Another folder has another one; None where there is none."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns
