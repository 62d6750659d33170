"""Kernels compiled for ARM and run under qemu, in the place of `native.library`: the classes that call
kernels call these as they call those of this machine.

What a pointer points to is copied to the emulated process and back, for which POINTERS says how many bytes
that are. Needs aarch64-linux-gnu-g++ and qemu-aarch64, Linux user mode.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from effcompile.machine import native
from effcompile.ops.cached_attention import scratch_floats
from effcompile.ops.int8_codes import panels_of

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
#: Instruction set → a processor that has it and no better one.
PROCESSORS = {"neon": "cortex-a53", "neon_dotprod": "cortex-a76", "neon_i8mm": "max"}
_DRIVER = Path(__file__).with_name("emulated_calls.cpp")
_ROOM, _IN, _OUT, _BOTH = range(4)


def missing() -> str | None:
    """What is not installed here that compiling takes; None where nothing is."""
    return None if shutil.which(COMPILER) else f"{COMPILER} is not installed"


def missing_emulator() -> str | None:
    """The same of running."""
    return missing() or (None if shutil.which(EMULATOR) else f"{EMULATOR} is not installed")


Pointers = Mapping[int, tuple[int, int]]  # argument → (way, bytes)
Of = Callable[[Sequence[int]], Pointers]


def _up(count: int, of: int) -> int:
    return -(-count // of)


def _rows(rows: int, apart: int, columns: int) -> tuple[int, int]:
    return _IN, 4 * ((rows - 1) * apart + columns) if rows else 0


def _coded(a: Sequence[int], rows: int, groups: int, at: int) -> Pointers:
    """Codes, scales and sums, which lie behind each other, and what codes are lowered by."""
    each = (_ROOM, 4 * rows * groups)
    return {at: (_ROOM, a[at + 1] - a[at]), at + 1: each, at + 2: (_ROOM, 2 * each[1])}


def _int8_linear(a: Sequence[int], size: int = 4) -> Pointers:
    m, k, n = a[2], a[3], a[7]
    weight = (_IN, 64 * panels_of(n, k, bool(a[8] & 256)) * _up(k, 4))
    given = {0: _rows(m, a[1], k), 4: weight, 5: (_IN, 4 * n), 6: (_IN, 4 * n), 9: (_OUT, size * m * n)}
    return {**given, **_coded(a, m, 1, 10)}


def _fp32_linear(a: Sequence[int]) -> Pointers:
    m, k, n, chunk = a[2], a[3], a[7], a[13]
    ends = {0: _rows(m, a[1], k), 6: (_IN, 4 * n), 9: (_OUT, 4 * m * n)}
    return {**ends, 4: (_IN, 128 * _up(n, 32) * k), 10: (_ROOM, 4 * chunk * min(k, 768))}


def _group_linear(a: Sequence[int]) -> Pointers:
    m, k, bits, n = a[2], a[3], a[4], a[7]
    weight = (_IN, _up(n, 16) * _up(k, 32) * (32 + 64 * bits))
    given = {0: _rows(m, a[1], k), 5: weight, 6: (_IN, 4 * n), 9: (_OUT, 4 * m * n)}
    return {**given, **_coded(a, m, _up(k, 32), 10)}


def _int8_sparse(a: Sequence[int]) -> Pointers:
    m, k, held, n = a[2], a[3], a[7], a[11]
    strips = _up(n, 16)
    indices = {4: (_IN, 64 * held), 5: (_IN, 4 * held), 6: (_IN, 4 * strips + 4), 8: (_IN, 64 * strips)}
    ends = {0: _rows(m, a[1], k), 9: (_IN, 4 * n), 10: (_IN, 4 * n), 13: (_OUT, 4 * m * n)}
    return {**indices, **ends, 14: (_ROOM, a[15] - a[14]), 15: (_ROOM, 4 * m)}


def _rms_norm(a: Sequence[int]) -> Pointers:
    whole, row = 4 * a[4] * a[5], 4 * a[5]
    return {0: (_IN, whole), 1: (_IN, whole), 2: (_IN, row), 6: (_OUT, whole), 7: (_OUT, whole)}


def _layer_norm(a: Sequence[int]) -> Pointers:
    whole, row = 4 * a[5] * a[6], 4 * a[6]
    return {0: (_IN, whole), 1: (_IN, whole), 2: (_IN, row), 3: (_IN, row), 7: (_OUT, whole)}


def _swiglu(a: Sequence[int]) -> Pointers:
    return {0: (_IN, 4 * a[2]), 1: (_IN, 4 * a[2]), 3: (_OUT, 4 * a[2])}


def _add(a: Sequence[int]) -> Pointers:
    return {0: (_IN, 4 * a[2]), 1: (_IN, 4 * a[2]), 3: (_OUT, 4 * a[2])}


def _follow(a: Sequence[int]) -> Pointers:
    return {0: (_IN, 4 * a[1]), 3: (_OUT, 4 * a[1])}


def _few_rows(a: Sequence[int]) -> Pointers:
    m, k, n = a[2], a[3], a[6]
    return {0: _rows(m, a[1], k), 4: (_IN, 4 * n * k), 5: (_IN, 4 * n), 7: (_OUT, 4 * m * n)}


def _group_codes(a: Sequence[int]) -> Pointers:
    n, k = a[1], a[2]
    scales = (_OUT, 2 * n * _up(k, 32))
    return {0: (_IN, 4 * n * k), 4: (_OUT, n * k), 5: scales, 6: (_OUT, 4 * n * k)}


def _read(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def _span(sizes: Sequence[int], strides: Sequence[int], width: int) -> int:
    """Elements from the first to the last one."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + width


def _rotary(a: Sequence[int]) -> Pointers:
    batch, heads, rows, wide = a[3], a[4], a[5], 2 * a[6]
    of_x, of_y = _read(a[7], 3), _read(a[8], 3)
    angles = (_IN, 4 * ((batch - 1) * a[9] + rows * wide))
    ends = {
        0: (_IN, 4 * _span((batch, heads, rows), of_x, wide)),
        10: (_OUT, 4 * _span((batch, heads, rows), of_y, wide)),
    }
    return {**ends, 1: angles, 2: angles, 7: (_IN, 24), 8: (_IN, 24)}


def _cached_attention(a: Sequence[int]) -> Pointers:
    batch, groups, shared, queries, keys, width = _read(a[5], 6)
    heads = groups * shared
    sizes = {0: (4, width), 1: (2, width), 2: (1, width + 4), 3: (1, width // 2 + 2 * _up(width, 32))}
    of_q, of_k, of_v, of_mask = (_read(a[at], 3) for at in (6, 7, 8, 9))
    cache = {
        at: (_IN, sizes[form][0] * _span((batch, groups, keys), strides, sizes[form][1]))
        for at, strides, form in ((1, of_k, a[10]), (2, of_v, a[11]))
    }
    seen = _span((batch, heads, queries), of_mask, keys) * (4 if a[12] else 1)
    ends = {
        0: (_IN, 4 * _span((batch, heads, queries), of_q, width)),
        4: (_OUT, 4 * batch * heads * queries * width),
    }
    told = {5: (_IN, 48), **dict.fromkeys((6, 7, 8, 9), (_IN, 24))}
    floats = scratch_floats(batch * groups, shared * queries, keys, width, a[15], narrow=bool(a[10] or a[11]))
    return {**cache, **ends, **told, 3: (_IN, seen), 14: (_ROOM, 4 * floats)}


def _fp32_attention(a: Sequence[int]) -> Pointers:
    batch, heads, groups, queries, keys, width, wide, *strides = _read(a[5], 19)
    of_q, of_k, of_v, of_out = (strides[at : at + 3] for at in range(0, 12, 3))
    seen = _span((batch, heads, queries), _read(a[6], 3), keys if _read(a[6], 4)[3] else 1) * (
        4 if a[7] == 2 else 1
    )
    ends = {
        0: (_IN, 4 * _span((batch, heads, queries), of_q, width)),
        1: (_IN, 4 * _span((batch, groups, keys), of_k, width)),
        2: (_IN, 4 * _span((batch, groups, keys), of_v, wide)),
        3: (_IN, seen),
        4: (_OUT, 4 * _span((batch, heads, queries), of_out, wide)),
    }
    # a thread's scratch: keys and values as they are laid, scores and results of some queries
    room = (keys + 16) * (width + wide + 16) + 64 * (512 + wide + 16)
    return {**ends, 5: (_IN, 152), 6: (_IN, 32), 10: (_ROOM, 4 * a[11] * room)}


def _adam8(a: Sequence[int]) -> Pointers:
    size, blocks = (2 if a[0] else 4), a[17]
    numbers, scales, table = 256 * blocks, (_BOTH, 4 * blocks), (_IN, 1024)
    codes = (_BOTH, numbers)
    return {
        1: (_BOTH, size * numbers),
        2: (_IN, size * numbers),
        3: codes,
        4: scales,
        5: codes,
        6: scales,
        7: table,
        8: table,
    }


def _loss_rows(a: Sequence[int]) -> Pointers:
    rows, size = a[2], 2 if a[1] else 4
    each = 4 * rows
    numbers = {7: (_IN, each), 8: (_OUT, each), 9: (_BOTH, each)}
    return {**numbers, 0: (_BOTH, size * ((rows - 1) * a[4] + a[3])), 6: (_IN, 2 * each)}


def _of_blocks(block: int, size: int) -> dict[str, Of]:
    """Of block_sparse.cpp, with elements of so many bytes; its kernels have weights in fp32."""

    def rows(count: int, apart: int, columns: int) -> int:
        return size * ((count - 1) * apart + columns)

    def linear(a: Sequence[int]) -> Pointers:
        m, k, n, held = a[2], a[3] * block, a[7] * block, a[8]
        room = 4 * a[14] * k * a[13] * 4
        indices = {
            4: (_IN, 4 * held * block * block),
            5: (_IN, 4 * a[7] + 4),
            6: (_IN, 4 * held),
            9: (_IN, 4 * n),
        }
        return {**indices, 0: (_IN, rows(m, a[1], k)), 10: (_OUT, rows(m, a[11], n)), 12: (_ROOM, room)}

    def transpose_values(a: Sequence[int]) -> Pointers:
        values = 4 * a[3] * block * block
        return {0: (_IN, values), 1: (_IN, 4 * a[2]), 4: (_OUT, values)}

    def grad_values(a: Sequence[int]) -> Pointers:
        m, n, k, held, threads = a[4], a[5] * block, a[6] * block, a[9], a[13]
        room = 4 * (k + threads * max(block, 4)) * a[12] * 4
        indices = {7: (_IN, 4 * a[5] + 4), 8: (_IN, 4 * held), 10: (_OUT, 4 * held * block * block)}
        return {**indices, 0: (_IN, rows(m, a[1], n)), 2: (_IN, rows(m, a[3], k)), 11: (_ROOM, room)}

    return {"linear": linear, "transpose_values": transpose_values, "grad_values": grad_values}


def _strided(sizes: Sequence[int], strides: Sequence[int], insides: Sequence[int]) -> Pointers:
    """Inputs of which each token's numbers stand side by side, from the first argument on."""
    pairs = zip(strides[::2], strides[1::2], insides, strict=True)
    ends = [(sizes[0] - 1) * batch + (sizes[1] - 1) * token + inside for batch, token, inside in pairs]
    return {at: (_IN, 4 * end) for at, end in enumerate(ends)}


def _numbers(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def _short_conv(a: Sequence[int]) -> Pointers:
    batch, tokens, channels, kernel, *strides = _numbers(a[6], 6)
    states = 4 * batch * channels * kernel
    weights = {1: (_IN, 4 * channels * kernel), 2: (_IN, 4 * channels), 3: (_IN, states)}
    made = {4: (_OUT, 4 * batch * tokens * channels), 5: (_OUT, states), 6: (_IN, 48)}
    return {**_strided((batch, tokens), strides, (channels,)), **weights, **made}


def _state_space(a: Sequence[int]) -> Pointers:
    batch, tokens, heads, rows, width, groups = _numbers(a[9], 6)
    states, shared = 4 * batch * heads * rows * width, groups * width
    x, dt, b, c = _strided(
        (batch, tokens), _numbers(a[10], 8), (heads * rows, heads, shared, shared)
    ).values()
    given = {0: x, 1: dt, 2: (_IN, 4 * heads * (width if a[11] else 1)), 3: b, 4: c, 5: (_IN, 4 * heads)}
    made = {7: (_OUT, 4 * batch * tokens * heads * rows), 8: (_OUT, states)}
    return {**given, 6: (_IN, states), **made, 9: (_IN, 48), 10: (_IN, 64)}


def _delta_rule(a: Sequence[int]) -> Pointers:
    batch, tokens, heads, rows, width, groups = _numbers(a[8], 6)
    states, shared = 4 * batch * heads * rows * width, groups * rows
    insides = (shared, shared, heads * width, heads, heads)
    made = {6: (_OUT, 4 * batch * tokens * heads * width), 7: (_OUT, states), 8: (_IN, 48), 9: (_IN, 80)}
    return {**_strided((batch, tokens), _numbers(a[9], 10), insides), 5: (_IN, states), **made}


#: Function → what its whole arguments point to.
POINTERS: dict[str, Of] = {
    "int8_linear": _int8_linear,
    "int8_linear_narrow": lambda a: _int8_linear(a, 2),
    "group_linear": _group_linear,
    "group_codes": _group_codes,
    "int8_sparse": _int8_sparse,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "swiglu": _swiglu,
    "add": _add,
    "follow": _follow,
    "few_rows": _few_rows,
    "fp32_linear": _fp32_linear,
    "rotary": _rotary,
    "cached_attention": _cached_attention,
    "fp32_attention": _fp32_attention,
    "scratch_floats": lambda a: {0: (_IN, 152)},
    "adam8": _adam8,
    "loss_rows": _loss_rows,
    "short_conv": _short_conv,
    "state_space": _state_space,
    "delta_rule": _delta_rule,
}


class Library:
    """As ctypes.CDLL: its functions are those of a library that runs under qemu."""

    def __init__(self, path: Path, isa: str, pointers: Mapping[str, Of]) -> None:
        driver = path.with_name("emulated_calls")
        if not driver.exists():
            subprocess.run([COMPILER, "-O1", "-o", str(driver), str(_DRIVER), "-ldl"], check=True)
        libc = subprocess.run(
            [COMPILER, "-print-file-name=libc.so.6"], capture_output=True, text=True, check=True
        )
        root = Path(libc.stdout.strip()).resolve().parents[1]
        command = [EMULATOR, "-cpu", PROCESSORS[isa], "-L", str(root), str(driver), str(path)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1 << 20
        )
        self.pointers = pointers

    def __getattr__(self, name: str) -> Function:
        made = Function(self, name)
        setattr(self, name, made)
        return made

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Function:
    """As a function of ctypes."""

    def __init__(self, library: Library, name: str) -> None:
        self.library, self.name = library, name
        self.argtypes: Sequence[Any] | None = None
        self.restype: Any = None

    def __call__(self, *given: Any) -> int:
        kinds = self.argtypes or [type(each) for each in given]
        floats = [
            struct.pack("<d", each) if kind is ctypes.c_double else struct.pack("<fxxxx", each)
            for each, kind in zip(given, kinds, strict=True)
            if kind in (ctypes.c_double, ctypes.c_float)
        ]
        whole = [_word(each, kind) for each, kind in zip(given, kinds, strict=True)]
        pointers = self.library.pointers[self.name](whole)
        kept = [at for at, kind in enumerate(kinds) if kind not in (ctypes.c_double, ctypes.c_float)]
        sent, back = (
            [struct.pack("<64sqq", self.name.encode(), len(kept), len(floats))],
            list[tuple[int, int]](),
        )
        for at in kept:
            way, size = pointers.get(at, (0, -1)) if whole[at] else (0, -1)
            sent.append(struct.pack("<qqq", size, whole[at], way))
            if size >= 0 and way & _IN:
                sent.append(ctypes.string_at(whole[at], size))
            if size >= 0 and way & _OUT:
                back.append((whole[at], size))
        return self._answer(b"".join((*sent, *floats)), back)

    def _answer(self, sent: bytes, back: Sequence[tuple[int, int]]) -> int:
        process = self.library.process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(sent)
        process.stdin.flush()
        result = process.stdout.read(8)
        assert len(result) == 8, f"{self.name} ended the emulated process: status {process.wait()}"
        for address, size in back:
            ctypes.memmove(address, process.stdout.read(size), size)
        return int.from_bytes(result[:4], "little", signed=True)


def _word(given: Any, kind: Any) -> int:
    if given is None or kind in (ctypes.c_double, ctypes.c_float):
        return 0
    if isinstance(given, ctypes.Array):
        return ctypes.addressof(given)
    value = given.value if isinstance(given, (ctypes.c_int64, ctypes.c_void_p)) else given
    return int(value or 0)


class Emulator:
    """Makes libraries."""

    def __init__(self) -> None:
        self.made: list[Library] = []

    def library(self, source: Path, defines: Mapping[str, int], isa: str) -> Library:
        """As `native.library`."""
        blocks = _of_blocks(defines["BLOCK"], 2 if defines["KIND"] else 4) if "BLOCK" in defines else {}
        self.made.append(Library(native.compiled(source, defines, isa), isa, {**POINTERS, **blocks}))
        return self.made[-1]

    def close(self) -> None:
        """Ends all processes."""
        for each in self.made:
            each.close()
