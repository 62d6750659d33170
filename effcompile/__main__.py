"""`python -m effcompile`, and the command `effcompile`: Ctrl-C ends it quietly, also while it is still being
imported.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit."""
    try:
        from effcompile.cli import main as command_line
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
