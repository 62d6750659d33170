"""Tiled kernels in Triton. Importing this package imports no triton: `unavailable` says why the kernels cannot run here."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

__all__ = ["interpreting", "register", "unavailable"]

#: The oldest triton the kernels are tested with (torch 2.11 brings 3.6).
_OLDEST = (3, 6)
#: Modules whose `register` gives a device our kernels.
_OPERATORS = ("attention", "block_sparse", "group_quant", "loss_head", "rows")


def interpreting() -> bool:
    """Whether this process runs kernels in triton's interpreter: decided by the environment when triton is imported, for good."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def unavailable() -> str | None:
    """None, or why the kernels cannot run in this process, with what would mend it. Imports no triton."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'effcompile[triton]'"
    found = _version()
    if found is not None and tuple(map(int, found.split(".")[:2])) < _OLDEST:
        return f"triton {found} is older than {_OLDEST[0]}.{_OLDEST[1]}: pip install --upgrade triton"
    if interpreting() or torch.cuda.is_available():
        return None
    return "there is no GPU here, and this is not an interpreter process (TRITON_INTERPRET=1)"


def _version() -> str | None:
    """Of triton, without importing it; None for a build that came under another name."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def register(device: str = "cuda") -> str | None:
    """Make the kernels those of our operators for a type of device, in this process. Returns why not, where they cannot run."""
    reason = unavailable()
    if reason is None:
        for name in _OPERATORS:
            importlib.import_module(f"effcompile.backends.triton.{name}").register(device)
    return reason
