"""Whose code a class or a function is of: the user's own, an installed package's, torch's, Python's."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch

from effcompile.capture.holders import file_of

#: Where the files lie of torch, of ours, of Python itself; and what the path of an installed package has in
#: it.
TORCH = f"{Path(torch.__file__).parent}/"
OURS = f"{Path(__file__).parent.parent}/"
STANDARD = tuple(f"{path}/" for key, path in sysconfig.get_paths().items() if key in ("stdlib", "platstdlib"))
INSTALLED = ("/site-packages/", "/dist-packages/")


def is_installed(filename: str) -> bool:
    """Whether code comes from an installed package or from Python itself: nobody edits its state by hand."""
    return (
        filename.startswith("<frozen")
        or any(part in filename for part in INSTALLED)
        or filename.startswith(STANDARD)
    )


def is_of_torch(kind: type) -> bool:
    """Whether a class is one of torch's own, whose code is known to read attributes by written names only."""
    return (kind.__module__ or "").partition(".")[0] == "torch"


def is_own(kind: type) -> bool:
    """Whether a class is of the user's own code, so that its objects' attributes are for the user to set."""
    file = file_of(kind)
    return not (is_plain_code(kind) or is_of_torch(kind) or is_installed(file) or file.startswith(OURS))


def is_plain_code(kind: type) -> bool:
    """Whether a class is Python's own, and none that just holds attributes."""
    if kind.__module__ in ("types", "argparse"):
        return False
    return (
        kind.__module__ in ("builtins", "typing", "abc", "collections")
        or kind.__module__ in sys.stdlib_module_names
    )
