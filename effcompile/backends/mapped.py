"""Weights in files that are mapped: pages that nobody needs are given back, or never come."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

#: Bytes of a weight from which on it is worth a file's pages.
_PAGES = 1 << 16
#: Bytes that one system call writes of a file that is mapped later.
_PIECE = 1 << 16


def mapped(parameters: Iterable[nn.Parameter], folder: Path | None = None) -> list[mmap.mmap]:
    """Have parameters mapped from files in a folder, by default that of temporary ones; those on a device,
    and small ones, stay.

    Raises:
        OSError: the disk is full.
    """
    found: list[mmap.mmap] = []
    for parameter in parameters:
        if parameter.device.type == "cpu" and parameter.nbytes > _PAGES:
            with tempfile.TemporaryFile(dir=folder) as file:
                if hasattr(os, "posix_fallocate"):
                    # a full disk is an error here, and not a signal at the copy
                    os.posix_fallocate(file.fileno(), 0, parameter.nbytes)
                file.truncate(parameter.nbytes)
                found.append(mmap.mmap(file.fileno(), parameter.nbytes))
            parameter.data = (
                torch.frombuffer(found[-1], dtype=parameter.dtype)
                .view(parameter.shape)
                .copy_(parameter.detach())
            )
    return found


def put_aside(maps: Iterable[mmap.mmap]) -> None:
    """Give their pages back; they are in the file, and come again where they are read."""
    for pages in maps if hasattr(mmap, "MADV_DONTNEED") else ():
        pages.madvise(mmap.MADV_DONTNEED)


def copied(source: Path, target: Path) -> Path:
    """A copy of a file, of which whoever maps it has little more resident than what is read.

    Linux caches what one call writes in folios up to its size and, from 6.18 on, maps the whole folio of a
    page that is read: of a table written at once, a few rows would bring all of it.

    Raises:
        OSError: the disk is full.
    """
    with source.open("rb") as read, target.open("wb", buffering=_PIECE) as written:
        shutil.copyfileobj(read, written, _PIECE)
    return target
