"""Kernels that a plan will time, compiled beside what needs one core: the model is loaded and captured
meanwhile.

Only files are made: who uses a kernel loads it, and compares it with torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from effcompile.core.errors import EffcompileError
from effcompile.core.torch_compat_inductor import begin_compiling, headers_compiled
from effcompile.machine.instructions import bf16_isas, integer_isas, tile_isas
from effcompile.machine.native import SOURCES, compiled
from effcompile.ops import (
    bf16_linear,
    cached_attention,
    fp32_attention,
    fp32_linear,
    group_native,
    int8_attention,
    int8_mlp,
    int8_native,
    int13_linear,
    loss_rows,
)
from effcompile.ops.instruction_sets import WORDS

Library = tuple[Path, Mapping[str, int], str]


def libraries(*, exact: bool, steps: bool = False) -> list[Library]:
    """Source, macros and instruction set of each that this machine uses; without those that change numbers,
    where the plan is exact. `steps`: of a generation, whose programs of rows take all of them.
    """
    return [*_of_steps()] if steps else [*_of_calls(exact=exact)]


def _of_calls(*, exact: bool) -> Iterator[Library]:
    if not exact:
        yield from _of_bytes()
    yield from _of_rows()
    for isa in fp32_attention.isas()[:1]:
        yield SOURCES / "fp32_attention.cpp", {"WIDTH": WORDS[isa]}, isa
    for isa in integer_isas()[:1]:
        yield SOURCES / "fp32_linear.cpp", fp32_linear.macros(isa), isa
    yield from _of_runners()
    if exact:
        return
    yield from ((SOURCES / "bf16_linear.cpp", bf16_linear.MACROS, isa) for isa in bf16_linear.isas()[:1])
    yield from ((SOURCES / "attention_tiles.cpp", {}, isa) for isa in bf16_isas()[:1])
    for isa in int8_attention.isas()[:1]:
        yield SOURCES / "int8_attention.cpp", {"WIDTH": WORDS[isa]}, isa
    yield from _of_groups()
    yield from _of_words()


def _of_steps() -> Iterator[Library]:
    yield from _of_groups()
    yield from _of_bytes()
    for isa in cached_attention.isas()[:1]:
        yield SOURCES / "cached_attention.cpp", {"WIDTH": cached_attention.WIDTHS[isa]}, isa
    yield from _of_rows()
    yield from _of_runners()
    yield from _of_words()


def _of_runners() -> Iterator[Library]:
    """Of lists of kernels: small files."""
    yield from ((SOURCES / name, {}, "generic") for name in ("row_program.cpp", "tape.cpp"))


def _of_rows() -> Iterator[Library]:
    for isa in integer_isas()[:1]:
        yield from ((SOURCES / name, {"WIDTH": WORDS[isa]}, isa) for name in ("rows.cpp", "few_rows.cpp"))


def _of_bytes() -> Iterator[Library]:
    for isa in tile_isas()[:1]:
        names = ["int8_linear.cpp", *["int8_mlp.cpp"] * int8_mlp.has_kernel(isa)]
        yield from ((SOURCES / name, int8_native.macros(isa), isa) for name in names)


def _of_groups() -> Iterator[Library]:
    for isa in integer_isas()[:1]:
        yield SOURCES / "group_linear.cpp", group_native.macros(isa), isa
        yield SOURCES / "group_codes.cpp", {"WIDTH": WORDS[isa]}, isa


def _of_words() -> Iterator[Library]:
    for isa in int13_linear.isas()[:1]:
        yield SOURCES / "int13_linear.cpp", int13_linear.macros(isa), isa


def of_training() -> list[Library]:
    """As `libraries`, of a training step beside what Inductor compiles for it."""
    return [(SOURCES / "loss_rows.cpp", {"WIDTH": WORDS[isa]}, isa) for isa in loss_rows.isas()[:1]]


@functools.cache
def begin(*, exact: bool, steps: bool = False) -> threading.Thread:
    """Compile them on a thread, one after the other; once a process. It ends early with the main thread."""
    return _begun(lambda: libraries(exact=exact, steps=steps))


@functools.cache
def begin_training() -> threading.Thread:
    """The same for a training step: what its element-wise kernels include, and its own kernels."""
    begin_compiling()

    def found() -> list[Library]:
        with contextlib.suppress(Exception):  # torch's own, of this version: it does it when it needs it
            headers_compiled()
        return of_training()

    return _begun(found)


#: How much a compiler gives way to the process it compiles for.
_NICE = 10


def _give_way() -> None:
    """Have what this thread starts run where nothing else does: beside a compiler on one of two cores, each
    of the hundreds of parallel loops of a forward waited for a thread that had none, and it took up to eight
    times as long.
    """
    with contextlib.suppress(AttributeError, OSError):  # not on this system
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, min(19, os.getpriority(os.PRIO_PROCESS, me) + _NICE))


def _begun(find: Callable[[], list[Library]]) -> threading.Thread:
    main = threading.current_thread()

    def work() -> None:
        _give_way()
        for library in find():
            if not main.is_alive():
                return
            with contextlib.suppress(EffcompileError, OSError):  # who needs it is told
                compiled(*library)

    thread = threading.Thread(target=work, name="effcompile kernels")
    thread.start()
    return thread
