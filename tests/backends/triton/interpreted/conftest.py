"""These tests run in a process of their own, started with TRITON_INTERPRET=1: by ../test_interpreted.py, or
by hand.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import memory_watch

    from effcompile.backends.triton.interpreter import patch_interpreter

    patch_interpreter()
    memory_watch.watch()
else:
    collect_ignore_glob = ["test_*.py"]
