"""The compiled linears with weights in groups (`group_linear.cpp`): which instruction set they use here, and
how they are called.

As `int8_native.py` has it: compiled at the first use for the best set that this CPU has, compared once with
torch, the next best else. Many rows are taken by `group_tiles.py` where this CPU has AMX.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from effcompile.machine.instructions import integer_isas, tile_isas
from effcompile.machine.native import library
from effcompile.ops import group_codes, int8_codes
from effcompile.ops.coded_rows import CodedRows, flat_rows
from effcompile.ops.instruction_sets import ARGUMENT, POINTER, best_of

_SOURCE = Path(__file__).with_name("group_linear.cpp")

#: Instruction set → words of a vector, rows and vectors of the register tile; a panel has 16 outputs.
#: Measured on AVX2 alone (Zen, 96×896×1024, 4 bits: 4×2 122 GOP/s, 6×1 105, 3×2 87).
TILES = {
    "avx512_vnni": (16, 8, 1),
    "avx_vnni": (8, 4, 2),
    "avx512": (16, 8, 1),
    "avx2": (8, 4, 2),
    "neon_i8mm": (4, 4, 4),
    "neon_dotprod": (4, 4, 4),
    "neon": (4, 4, 4),
}

#: Bytes of codes of x that one core multiplies with all panels of the weight before it takes the next rows.
_CHUNK = 1 << 18

_ARGUMENTS = (
    POINTER,
    *(ARGUMENT,) * 4,
    POINTER,
    POINTER,
    ARGUMENT,
    ARGUMENT,
    *(POINTER,) * 4,
    ARGUMENT,
    ARGUMENT,
)


@functools.cache
def kernels() -> GroupKernels | str:
    """The best kernels that this machine runs, or why there are none."""
    return best_of(GroupKernels, integer_isas())


def workspace_bytes(x: Tensor) -> int:
    """Bytes that a call holds beyond its arguments and result, where x (..., K) has adjacent columns."""
    return _room(x).nbytes


def _room(x: Tensor) -> CodedRows:
    return CodedRows.of(x, -(-int(x.shape[-1]) // group_codes.GROUP), group_codes.GROUP)


def macros(isa: str) -> dict[str, int]:
    """What `group_linear.cpp` is compiled with for an instruction set."""
    width, rows, vecs = TILES[isa]
    # as measured on an EPYC with Zen 4; processors with AMX read better from near
    far = int(isa == "avx512_vnni" and "amx_int8" not in tile_isas())
    return {"WIDTH": width, "ROWS": rows, "VECS": vecs, "FAR": far}


class GroupKernels:
    """The compiled kernels of one instruction set.

    `instead`: why better sets are not used; "" where there is none.
    """

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when they cannot be compiled."""
        self.isa, self.instead = isa, instead
        self.call = library(_SOURCE, macros(isa), isa).group_linear
        self.call.argtypes, self.call.restype = _ARGUMENTS, None

    def linear(self, x: Tensor, weight: Tensor, n: int, bias: Tensor | None, after: str) -> Tensor:
        """See `group_linear.group_linear`, which has checked the arguments."""
        k = x.shape[-1]
        result = x.new_empty((*x.shape[:-1], n))
        flat = flat_rows(x)
        room = _room(flat)
        workspace = torch.empty(room.nbytes, dtype=torch.uint8, device="cpu")
        codes, scales, sums = room.addresses(workspace.data_ptr())
        self.call(
            flat.data_ptr(), flat.stride(0), room.rows, k, group_codes.bits_of(weight), weight.data_ptr(),
            None if bias is None else bias.data_ptr(), n, int8_codes.AFTER.index(after), result.data_ptr(),
            codes, scales, sums, max(1, _CHUNK // room.row_bytes), torch.get_num_threads(),
        )  # fmt: skip
        return result

    def objection(self) -> str | None:
        """None, or that a linear differs from what torch computes of the same codes: whole tiles and rests,
        the largest codes, a NaN.
        """
        weight = (torch.arange(53 * 71) * 37 % 255 - 127).view(53, 71) / 64
        weight[0], bias = 1, ((torch.arange(53) + 1) / 997).cos()
        for rows, bits in ((rows, bits) for rows in (1, 2, 33) for bits in group_codes.BITS):
            packed = group_codes.pack(*group_codes.quantize(weight, bits), bits)
            x = (torch.arange(rows * 71) * 0.7).sin().view(rows, 71)
            x[0], x[-1, 3] = 1, torch.nan if rows == 2 else 1
            for after in int8_codes.AFTER:
                right = group_codes.linear_by_torch(x, packed, 53, bias, after)
                if not torch.allclose(
                    self.linear(x, packed, 53, bias, after), right, rtol=1e-5, atol=1e-5, equal_nan=True
                ):
                    return f"the compiled {self.isa} kernels gave a wrong product of codes in groups"
        return None
