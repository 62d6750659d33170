"""The compiled linears with weights in groups for many rows on CPUs with AMX (`group_tiles.cpp`): what
`group_native.py` computes, to the bit, in half of the time.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from effcompile.machine.instructions import tile_isas
from effcompile.machine.native import library
from effcompile.ops import group_codes, int8_codes
from effcompile.ops.coded_rows import flat_rows
from effcompile.ops.group_codes import GROUP
from effcompile.ops.instruction_sets import ARGUMENT, POINTER, best_of, with_tiles

_SOURCE = Path(__file__).with_name("group_tiles.cpp")
_WIDTH = 16  # 32-bit words of a vector
ISA = "amx_int8"

#: Rows from which on these are used: not those of a program of few tokens (row_program.py). By then they are
#: no slower (AMX beside AVX512-VNNI, 896×4864, 4 bits, GOP/s: 10 rows 477 and 280, 18 rows 435 and 302, 128
#: rows 768 and 351).
ROWS = 9

#: Bytes that a thread holds for each group of columns: codes of 16 outputs, and their scales.
_OF_A_GROUP = 16 * GROUP + 64
_ARGUMENTS = (
    POINTER,
    *(ARGUMENT,) * 4,
    POINTER,
    POINTER,
    ARGUMENT,
    ARGUMENT,
    *(POINTER,) * 4,
    ARGUMENT,
)


@functools.cache
def kernels() -> TileKernels | str:
    """The kernels, or why there are none."""
    return best_of(TileKernels, [isa for isa in tile_isas() if isa == ISA])


def kernels_for(x: Tensor) -> TileKernels | None:
    """The kernels, where x (..., K) has so many rows and this machine has them."""
    columns = int(x.shape[-1])
    found = kernels() if columns and int(x.numel()) // columns >= ROWS else "few rows"
    return None if isinstance(found, str) else found


class TileKernels:
    """The compiled kernels of one instruction set.

    `instead`: why better sets are not used; "" where there is none.
    """

    def __init__(self, isa: str, instead: str = "") -> None:
        """Raises LoweringError when they cannot be compiled, or the system does not give AMX's registers."""
        self.isa, self.instead = isa, instead
        self.call = with_tiles(library(_SOURCE, {"WIDTH": _WIDTH}, isa)).group_tiles
        self.call.argtypes, self.call.restype = _ARGUMENTS, None

    def workspace_bytes(self, x: Tensor) -> int:
        """Bytes that a call holds beyond its arguments and result, where x (..., K) has adjacent columns:
        codes of x and their scales, and for each thread a panel of the weight.
        """
        groups = -(-int(x.shape[-1]) // GROUP)
        rows = int(x.numel()) // int(x.shape[-1])
        return groups * (rows * (GROUP + 4) + torch.get_num_threads() * _OF_A_GROUP)

    def linear(self, x: Tensor, weight: Tensor, n: int, bias: Tensor | None, after: str) -> Tensor:
        """See `group_linear.group_linear`, which has checked the arguments."""
        result, flat = x.new_empty((*x.shape[:-1], n)), flat_rows(x)
        rows, k = flat.shape
        groups, threads = -(-k // GROUP), torch.get_num_threads()
        workspace = torch.empty(self.workspace_bytes(flat), dtype=torch.uint8, device="cpu")
        room = workspace.data_ptr()
        codes = room + threads * groups * _OF_A_GROUP
        self.call(
            flat.data_ptr(), flat.stride(0), rows, k, group_codes.bits_of(weight), weight.data_ptr(),
            None if bias is None else bias.data_ptr(), n, int8_codes.AFTER.index(after), result.data_ptr(),
            codes, codes + rows * groups * GROUP, room, threads,
        )  # fmt: skip
        return result

    def objection(self) -> str | None:
        """None, or that a linear differs from what torch computes of the same codes: whole tiles and rests,
        odd and even groups, the largest codes, a NaN.
        """
        weight = (torch.arange(53 * 71) * 37 % 255 - 127).view(53, 71) / 64
        weight[0], bias = 1, ((torch.arange(53) + 1) / 997).cos()
        cases = ((rows, k, bits) for rows in (1, 33) for k in (20, 64, 71) for bits in group_codes.BITS)
        for rows, k, bits in cases:
            packed = group_codes.pack(*group_codes.quantize(weight[:, :k], bits), bits)
            x = (torch.arange(rows * k) * 0.7).sin().view(rows, k)
            x[0], x[-1, 3] = 1, torch.nan if rows == 33 else 1
            for after in int8_codes.AFTER:
                made = self.linear(x, packed, 53, bias, after)
                right = group_codes.linear_by_torch(x, packed, 53, bias, after)
                if not torch.allclose(made, right, rtol=1e-5, atol=1e-5, equal_nan=True):
                    return f"the compiled {self.isa} kernels gave a wrong product of codes in groups"
        return None
