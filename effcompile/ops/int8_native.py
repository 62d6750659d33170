"""The compiled 8-bit linears (`int8_linear.cpp`): which instruction set they use here, and how they are
called.

The first use compiles them for the best set that this CPU has and compares them once with torch. What cannot
be compiled or is wrong is not used: the next best set is tried, and `ByteKernels.instead` says why.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import torch
from torch import Tensor

from effcompile.machine.instructions import l2_bytes, tile_isas
from effcompile.machine.native import library
from effcompile.ops import int8_codes
from effcompile.ops.coded_rows import CodedRows, flat_rows
from effcompile.ops.instruction_sets import ARGUMENT, POINTER, best_of, with_tiles

_SOURCE = Path(__file__).with_name("int8_linear.cpp")

#: Instruction set → words of a vector, rows and vectors of the register tile. AVX512-VNNI, 128×768×3072 with
#: weights that other layers pushed out of the L2 cache, one core of an AMD EPYC (Zen 4; 468 GOP/s at the
#: most): 14×2 350 GOP/s, 9×3 378, 6×4 390, 5×5 388; of an Intel Xeon (Emerald Rapids; 770 at the most): 14×2
#: 637, 9×3 679, 8×3 668, 6×4 660. Those of ARM were timed nowhere: they are the largest that GCC keeps in its
#: 32 registers.
TILES = {
    "amx_int8": (16, 14, 2),
    "avx512_vnni": (16, 6, 4),
    "avx_vnni": (8, 5, 2),
    "avx512": (16, 6, 4),
    "avx2": (8, 4, 2),
    "neon_i8mm": (4, 8, 2),
    "neon_dotprod": (4, 6, 4),
    "neon": (4, 4, 4),
}

#: Rows of x from which on AMX multiplies, where there is any; 0: never.
TILED = {"amx_int8": 12}
#: Codes of a row that are read at a time, where these are not four.
_DEPTHS = {"amx_int8": 64, "neon_i8mm": 8}

#: One part in so many of its L2 cache holds the codes of x that a core multiplies with all panels of W
#: before it takes the next rows.
_CHUNK = 4

#: Of `int8_linear`, and of what is called alike.
ARGUMENTS = (
    POINTER,
    *(ARGUMENT,) * 3,
    *(POINTER,) * 3,
    ARGUMENT,
    ARGUMENT,
    *(POINTER,) * 4,
    ARGUMENT,
    ARGUMENT,
)


@functools.cache
def kernels() -> ByteKernels | str:
    """The best kernels that this machine runs, or why there are none."""
    return best_of(ByteKernels, tile_isas())


def workspace_bytes(x: Tensor) -> int:
    """Bytes that a call holds beyond its arguments and result, where x (..., K) has adjacent columns and
    there are kernels.
    """
    found = kernels()
    assert not isinstance(found, str)
    return found.room(x).nbytes


def macros(isa: str) -> dict[str, int]:
    """What `int8_linear.cpp` is compiled with for an instruction set."""
    width, rows, vecs = TILES[isa]
    return {"WIDTH": width, "ROWS": rows, "VECS": vecs, "TILED": TILED.get(isa, 0)}


class ByteKernels:
    """The compiled kernels of one instruction set.

    `instead`: why better sets are not used; "" where there is none.
    """

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when they cannot be compiled."""
        self.isa, self.instead = isa, instead
        found = library(_SOURCE, macros(isa), isa)
        found = with_tiles(found) if TILED.get(isa) else found
        self.call, self.narrow = found.int8_linear, found.int8_linear_narrow
        for call in (self.call, self.narrow):
            call.argtypes, call.restype = ARGUMENTS, None

    def room(self, x: Tensor) -> CodedRows:
        """Each row is one group, whole reads of it."""
        k = int(x.shape[-1])
        return self.room_of(int(x.numel()) // max(1, k), k)

    def room_of(self, rows: int, k: int) -> CodedRows:
        """The same of so many rows and columns."""
        depth = _DEPTHS.get(self.isa, 4)
        return CodedRows(rows, 1, -(-k // depth) * depth, numbers=3)

    def chunk(self, room: CodedRows) -> int:
        """Rows that a core multiplies with all of W before it takes the next."""
        chunks = max(1, -(-room.rows * room.row_bytes * _CHUNK // l2_bytes()))
        return max(1, -(-room.rows // chunks))

    def linear(
        self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, after: str, narrow: bool = False
    ) -> Tensor:
        """See `int8_linear.int8_linear`, which has checked the arguments."""
        n, k = scales.shape[0], x.shape[-1]
        result = x.new_empty((*x.shape[:-1], n), dtype=torch.bfloat16 if narrow else None)
        flat = flat_rows(x)
        room = self.room(flat)
        workspace = torch.empty(room.nbytes, dtype=torch.uint8, device="cpu")
        codes, row_scales, sums = room.addresses(workspace.data_ptr())
        (self.narrow if narrow else self.call)(
            flat.data_ptr(), flat.stride(0), room.rows, k, weight.data_ptr(), scales.data_ptr(),
            None if bias is None else bias.data_ptr(), n,
            int8_codes.following(after, (weight, scales, bias)), result.data_ptr(), codes, row_scales, sums,
            self.chunk(room), torch.get_num_threads(),
        )  # fmt: skip
        return result

    def objection(self) -> str | None:
        """None, or that a linear differs from what torch computes of the same codes: whole tiles and rests,
        the largest codes, a NaN.
        """
        codes = (torch.arange(53 * 71) * 37 % 255 - 127).to(torch.int8).view(53, 71)
        codes[0], scales = 127, (torch.arange(53) + 1) / 997
        columns = (torch.arange(71) * 0.6).sin().exp()
        bias = scales.cos()
        weights = [int8_codes.pack(codes, *how) for how in ((), (columns,))]
        for rows in (1, 2, 33):
            x = (torch.arange(rows * 71) * 0.7).sin().view(rows, 71)
            x[0], x[-1, 3] = 1, torch.nan if rows == 2 else 1
            for after, weight in itertools.product(int8_codes.AFTER, weights):
                right = int8_codes.linear_by_torch(x, weight, scales, bias, after)
                if not torch.allclose(
                    self.linear(x, weight, scales, bias, after), right, rtol=1e-5, atol=1e-5, equal_nan=True
                ):
                    return f"the compiled {self.isa} kernels gave a wrong product of bytes"
        return None
