"""`python -m effcompile`, and the command `effcompile`: Ctrl-C ends it quietly, also while it is still being
imported.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading


def main() -> None:
    """Run the command line and exit."""
    try:
        from effcompile.cli import main as command_line
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        sys.exit(130)
    try:
        command_line()
    except SystemExit as ended:
        if "torch" in sys.modules and (ended.code is None or isinstance(ended.code, int)):
            _leave(ended.code or 0)
        raise


def _leave(status: int) -> None:
    """End the process as Python does, but for taking apart what was loaded: of torch and a model that is a
    second. It comes back where something cannot be written.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        # threads that others wait for, and what they and the system are to be told at the end
        getattr(threading, "_shutdown", lambda: None)()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return
    os._exit(status)


if __name__ == "__main__":
    main()
