"""Kernels that a plan of a forward call will time, compiled beside what needs one core: the model is loaded
and captured meanwhile.

Only files are made: who uses a kernel loads it, and compares it with torch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Mapping
from pathlib import Path

from effcompile.core.errors import EffcompileError
from effcompile.machine.instructions import bf16_isas, integer_isas, tile_isas
from effcompile.machine.native import SOURCES, compiled
from effcompile.ops import fp32_attention, group_native, int8_mlp, int8_native
from effcompile.ops.instruction_sets import WORDS

Library = tuple[Path, Mapping[str, int], str]


def libraries(*, exact: bool) -> list[Library]:
    """Source, macros and instruction set of each that this machine uses; without those that change numbers,
    where the plan is exact.
    """
    found: list[Library] = []
    for isa in integer_isas()[:1]:
        found += [(SOURCES / name, {"WIDTH": WORDS[isa]}, isa) for name in ("rows.cpp", "few_rows.cpp")]
    found += [
        (SOURCES / "fp32_attention.cpp", {"WIDTH": WORDS[isa]}, isa) for isa in fp32_attention.isas()[:1]
    ]
    if exact:
        return found
    for isa in tile_isas()[:1]:
        names = ["int8_linear.cpp", *["int8_mlp.cpp"] * int8_mlp.has_kernel(isa)]
        found = [*((SOURCES / name, int8_native.macros(isa), isa) for name in names), *found]
    found += [(SOURCES / "attention_tiles.cpp", {}, isa) for isa in bf16_isas()[:1]]
    for isa in integer_isas()[:1]:
        found.append((SOURCES / "group_linear.cpp", group_native.macros(isa), isa))
        found.append((SOURCES / "group_codes.cpp", {"WIDTH": WORDS[isa]}, isa))
    return found


@functools.cache
def begin(*, exact: bool) -> threading.Thread:
    """Compile them on a thread, one after the other; once a process. It ends early with the main thread."""
    main = threading.current_thread()

    def work() -> None:
        for library in libraries(exact=exact):
            if not main.is_alive():
                return
            with contextlib.suppress(EffcompileError, OSError):  # who needs it is told
                compiled(*library)

    thread = threading.Thread(target=work, name="effcompile kernels")
    thread.start()
    return thread
