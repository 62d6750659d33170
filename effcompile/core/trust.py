"""Whether code that lies on the disk is the user's own: nobody else can have written it, nor put it where it
is.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from effcompile.core.errors import UsageError

try:
    import grp
    import pwd
except ImportError:  # not a POSIX system: there are no owners and modes to look at
    grp = pwd = None  # type: ignore[assignment]


def distrust(path: Path) -> str | None:
    """Why a file or folder is not loaded from; None where it, and every folder above it, is the user's or
    root's and theirs to write alone.

    Folders are looked at as the path names them and as links resolve them. A file must be one itself, no
    link.
    """
    if pwd is None:
        return None
    try:
        if (said := _of_itself(path)) is not None:
            return said
        above = {*path.absolute().parents, *Path(os.path.realpath(path)).parents}
        return next(
            (said for folder in sorted(above) if (said := _of_status(folder, folder.stat())) is not None),
            None,
        )
    except OSError as error:
        return f"{str(path)!r}: {error.strerror or error}"


def distrust_file(path: Path) -> str | None:
    """Why what a file says is not taken: another user owns it, or everybody may write it.

    Of the file alone, for data that runs nothing.
    """
    if pwd is None:
        return None
    try:
        status = path.stat()
    except OSError as error:
        return f"{str(path)!r}: {error.strerror or error}"
    return _of_others(path, status)


def _of_itself(path: Path) -> str | None:
    """Of what is opened, not of what the name may mean a moment later."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
    finally:
        os.close(handle)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return f"{str(path)!r} is neither a file nor a folder"
    if status.st_mode & stat.S_ISVTX:  # a folder like /tmp: its content is anybody's
        return f"{str(path)!r} is for everybody"
    return _of_status(path, status)


def _of_status(path: Path, status: os.stat_result) -> str | None:
    if (said := _of_others(path, status)) is not None:
        return said
    if status.st_mode & stat.S_IWGRP and not _is_sticky(status) and not _private(status.st_gid):
        return f"{str(path)!r} may be written by its group"
    return None


def _of_others(path: Path, status: os.stat_result) -> str | None:
    if status.st_uid not in (0, os.geteuid()):
        return f"{str(path)!r} belongs to another user"
    return (
        f"{str(path)!r} may be written by everybody"
        if status.st_mode & stat.S_IWOTH and not _is_sticky(status)
        else None
    )


def _is_sticky(status: os.stat_result) -> bool:
    """A folder in which others cannot rename what is not theirs."""
    return stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)


def _private(group: int) -> bool:
    """Whether a group is the user's alone, as many systems make one for each user, or root's."""
    try:
        user, of = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (
        group in (0, user.pw_gid)
        and of.gr_name in (user.pw_name, "root")
        and set(of.gr_mem) <= {user.pw_name}
    )


def refuse_own_code(folder: Path, what: str, error: Exception) -> None:
    """Say in our words that transformers would have to run Python code of the folder's. Unless it is told not
    to, it asks at the terminal, and runs it where what it reads there begins with a y.

    Raises:
        UsageError: that is why it failed.
    """
    if "trust_remote_code" in str(error):
        raise UsageError(
            f"The {what} in {str(folder)!r} is Python code of that folder's own (auto_map), which is not "
            f"run. Give a folder whose {what} is one of transformers': --tokenizer DIR."
        ) from error
