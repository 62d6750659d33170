"""Weights that passes made, mapped from files: their pages can be given back while something still refers to them."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

#: Bytes of a weight from which on it is worth a file's pages.
_PAGES = 1 << 16


def mapped(parameters: Iterable[nn.Parameter], folder: Path | None = None) -> list[mmap.mmap]:
    """Have parameters mapped from files in a folder, by default that of temporary ones; those on a device, and small ones, stay.

    Raises:
        OSError: the disk is full.
    """
    found: list[mmap.mmap] = []
    for parameter in parameters:
        if parameter.device.type == "cpu" and parameter.nbytes > _PAGES:
            with tempfile.TemporaryFile(dir=folder) as file:
                if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and not a signal at the copy
                    os.posix_fallocate(file.fileno(), 0, parameter.nbytes)
                file.truncate(parameter.nbytes)
                found.append(mmap.mmap(file.fileno(), parameter.nbytes))
            parameter.data = torch.frombuffer(found[-1], dtype=parameter.dtype).view(parameter.shape).copy_(parameter.detach())
    return found


def put_aside(maps: Iterable[mmap.mmap]) -> None:
    """Give their pages back; they are in the file, and come again where they are read."""
    for pages in maps if hasattr(mmap, "MADV_DONTNEED") else ():
        pages.madvise(mmap.MADV_DONTNEED)
