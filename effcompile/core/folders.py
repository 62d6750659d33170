"""A folder that is replaced whole: whoever reads it finds the old one or the new one, also after a kill or a
power cut in between.

A new folder is written beside, under a hidden name, brought to the disk, and takes the place of the old one
in one step: Linux exchanges the two names (renameat2); elsewhere the old folder is first renamed aside, where
`place_of` finds it. Writers take turns by a lock on the folder in which all of this stands. A writer that
lives also holds a lock on its new folder: what killed ones left, the next one removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

from effcompile.core.disk import abandoned, lock, locked, sync
from effcompile.core.errors import EffcompileError, UsageError, clipped

T = TypeVar("T")
#: The names in a folder that may be replaced; all others are the user's.
Ours = Callable[[Path], Collection[str]]

# worth nothing; complete, or just exchanged for; put aside where names cannot be exchanged
_PART, _WHOLE, _OLD = ".part", ".whole", ".old"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
_FREE_TRIES, _TRIES = 3, 20


@contextlib.contextmanager
def replacing(folder: Path, ours: Ours) -> Iterator[Path]:
    """A new, empty folder to write into.

    At the end it takes the place of `folder`, whole; after an error inside nothing has changed.

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
            for path in (*new.iterdir(), new):
                sync(path)
            with locked(target.parent):
                _refuse_strangers(target, ours)
                _switch(new, target)
        finally:
            os.close(handle)
            _collect(target, ours, own=new.stem)
    except OSError as error:
        raise UsageError(
            f"Cannot write {str(folder)!r}: {error.strerror or error}. Choose a folder you may write to "
            "with -o."
        ) from error


def check_replaceable(folder: Path, ours: Ours) -> None:
    """Refuse early what `replacing` could not do.

    Raises:
        UsageError: no folder, one that cannot be written or renamed, or one with files that are not `ours`.
    """
    target = Path(os.path.realpath(folder))
    with locked(target.parent, shared=True):
        try:
            os.lstat(target)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            pass  # it is made, or the folder above tells
        except OSError as error:  # a name that is too long
            raise UsageError(
                f"-o {clipped(repr(str(folder)))}: {error.strerror or error}. Give another name."
            ) from error
        if _nearest(target) == target:
            _refuse_strangers(target, ours)
            if target == Path(os.path.realpath(os.curdir)):
                raise UsageError(
                    f"{str(folder)!r} is the current folder, which cannot be replaced as a whole. "
                    f"{_instead(target)}"
                )
            if os.path.ismount(target):
                raise UsageError(
                    f"{str(folder)!r} is a mount point, which cannot be replaced as a whole. "
                    f"{_instead(target)}"
                )
    check_writable(target.parent, f": a new one is written beside {str(target)!r} and takes its place")


def check_writable(folder: Path, why: str = "") -> None:
    """Refuse early a folder that cannot be made, or be written into.

    Raises:
        UsageError: it cannot.
    """
    there = _nearest(folder.absolute())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UsageError(
            f"Cannot write in {str(there)!r}: {error.strerror or error}. Choose a folder you may write to "
            f"with -o{why}."
        ) from error


def _nearest(folder: Path) -> Path:
    """The folder itself, or the first above it that exists.

    Raises:
        UsageError: it is none.
    """
    for path in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(path.stat().st_mode):  # asked once: a writer may be between two renames
                return path
            raise UsageError(
                f"-o {str(folder)!r}: {str(path)!r} is a file. Give a folder; it is made when it does not "
                "exist."
            )
    raise UsageError(f"-o {str(folder)!r}: nothing of this path can be looked at. Give another folder.")


def _refuse_strangers(target: Path, ours: Ours) -> None:
    strangers = sorted(set(_names(target)) - set(ours(target)))
    if strangers:
        named = ", ".join(strangers[:3]) + (f" and {len(strangers) - 3} more" if len(strangers) > 3 else "")
        raise UsageError(
            f"{str(target)!r} holds what effcompile did not write: {named}. A save replaces the folder as "
            f"a whole. {_instead(target)}"
        )


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _instead(target: Path) -> str:
    return f"Give a folder of its own: -o {str(target / 'effcompile')!r}"


# ------------------------------------------------------------------ reading


def place_of(folder: Path) -> Path:
    """The folder to read: `folder`, or where a writer was killed between two renames, the old one that it had
    put aside.
    """
    if os.path.exists(folder):
        return folder
    aside = [path for path in _beside(Path(os.path.realpath(folder))) if path.suffix == _OLD]
    dated = [(identity[-1], path) for path in aside if (identity := _identity(path)) is not None]
    return max(dated)[1] if dated else folder


def read_steadily(folder: Path, read: Callable[[Path], T]) -> T:
    """What `read` returns of a folder that was one and the same from its beginning to its end: again when it
    was replaced meanwhile.

    Raises:
        UsageError: it was replaced every time. What `read` raises of a folder that stayed the same.
    """
    parent = Path(os.path.realpath(folder)).parent
    for attempt in range(_TRIES):
        # reading may take long, and writers need not wait for it; but who lost a few times lets none in
        free = attempt < _FREE_TRIES
        with contextlib.nullcontext() if free else locked(parent, shared=True):
            place = place_of(folder)
            before = _identity(place)
            if before is None and free:  # perhaps between two renames
                continue
            try:
                result = read(place)
            except (EffcompileError, OSError):
                if _identity(place) == before:
                    raise
            else:
                if _identity(place) == before:
                    return result
    raise UsageError(
        f"{str(folder)!r} was replaced each of the {_TRIES} times that it was read. Wait until it is written."
    )


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """Another folder has another one; None where there is none."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


# ------------------------------------------------------------------ writing


def _claim(target: Path) -> tuple[Path, int]:
    """A new folder beside the target, and the descriptor whose lock says that its writer lives."""
    with locked(target.parent):
        new = target.with_name(f"{_prefix(target)}{secrets.token_hex(4)}{_PART}")
        new.mkdir()
        handle = os.open(new, os.O_RDONLY)
        lock(handle)
        return new, handle


def _switch(new: Path, target: Path) -> None:
    """Put the new folder at the target's name; what was there stands beside now."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copymode(target, new)
    _put(new.rename(new.with_suffix(_WHOLE)), target)
    sync(target.parent)


def _put(whole: Path, target: Path) -> None:
    try:
        os.rename(whole, target)  # also onto an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange(whole, target):
            os.rename(target, whole.with_suffix(_OLD))
            os.rename(whole, target)


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


# ------------------------------------------------------------------ what is left beside


def _collect(target: Path, ours: Ours, own: str) -> None:
    """Remove what the writer of this name replaced or gave up, and what writers of this target left when they
    were killed.
    """
    with locked(target.parent):
        for path in _beside(target):
            with contextlib.suppress(OSError), abandoned(path) as dead:
                if dead or path.name.startswith(own):
                    # where there are no locks, nobody else is known to be dead
                    _discard(path, target, ours)


def _discard(folder: Path, target: Path, ours: Ours) -> None:
    """Remove a folder.

    What somebody else put into the one that was replaced, at the last moment, goes where the new one is.
    """
    if folder.suffix == _OLD and not target.exists():  # it is what is read
        return
    if folder.suffix != _PART:
        for name in set(_names(folder)) - set(ours(folder)):
            if os.path.lexists(target / name):
                return
            os.rename(folder / name, target / name)
        # half removed, it could not be told from a stranger's
        folder = folder.rename(folder.with_name(folder.name + _PART))
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
