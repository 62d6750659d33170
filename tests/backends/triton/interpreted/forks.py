"""Runs pytest on the file that each line of its input names, in a fork: what all of them import, torch and
transformers above all, is imported once. Answers with the exit code and, as JSON, what was printed.
"""

import contextlib
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import IO

import pytest

OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")


def run(file: str, printed: IO[str]) -> int:
    """The exit code of pytest on this file, and what it prints in `printed`."""
    child = os.fork()
    if not child:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        os._exit(pytest.main([*OPTIONS, file]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # imports, and runs nothing
        pytest.main([*OPTIONS, "--collect-only", str(Path(__file__).parent)])
    gc.freeze()
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as printed:
            code = run(line.strip(), printed)
            printed.seek(0)
            print(json.dumps([code, printed.read()]), flush=True)
