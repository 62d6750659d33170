"""Python for a process of its own that measures as briefly as the tests do (conftest.py)."""

from __future__ import annotations

#: Before what such a process runs.
QUICKLY = "from effcompile.core import timing\ntiming.PATIENCE = 0.02\n"
#: The command line.
COMMAND = f"{QUICKLY}import sys\nfrom effcompile.cli import main\nmain(sys.argv[1:])\n"
