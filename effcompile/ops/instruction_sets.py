"""Kernels compiled for the best instruction set that this CPU has, what is said of them, and the types that
they are called with.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from torch import Tensor

from effcompile.core.errors import LoweringError
from effcompile.core.floats import in_fp32

POINTER, ARGUMENT = ctypes.c_void_p, ctypes.c_int64
#: Bytes of a cache line, by which scratch is moved to begin with one.
LINE = 64
#: Instruction set → words of 32 bits in a vector.
WORDS = {
    **dict.fromkeys(("avx512_vnni", "avx512_bf16", "avx512"), 16),
    **dict.fromkeys(("avx_vnni", "avx2"), 8),
    **dict.fromkeys(("neon_i8mm", "neon_dotprod", "neon", "generic"), 4),
}


class Checked(Protocol):
    """What is compiled for one instruction set, and compared with torch before it is used.

    `instead`: why not a better one, or "".
    """

    isa: str
    instead: str

    def objection(self) -> str | None:
        """None, or what is wrong with it."""


K = TypeVar("K", bound=Checked)


@in_fp32()
def best_of(make: Callable[[str, str], K], isas: Iterable[str]) -> K | str:
    """The first that can be made and is right, of an instruction set and why better ones are not used; or why
    there is none.
    """
    failed: list[str] = []
    for isa in isas:
        try:
            made = make(isa, "; ".join(failed))
        except LoweringError as error:
            failed.append(str(error))
            continue
        if (said := made.objection()) is None:
            return made
        failed.append(said)
    return (
        "; ".join(failed)
        or "the C++ kernels multiply bytes on ARM and on x86 with AVX2 at least; this processor is neither"
    )


def at_line(scratch: Tensor) -> int:
    """The first address in it at which a cache line begins."""
    return -(-scratch.data_ptr() // LINE) * LINE


def with_tiles(found: ctypes.CDLL) -> ctypes.CDLL:
    """The library of kernels that multiply by AMX's tiles.

    Raises:
        LoweringError: the system does not give them to this process.
    """
    if not found.permitted():
        raise LoweringError("the system does not give this process AMX's tiles")
    return found


def why_torch(found: Checked | str) -> str | None:
    """Why torch computes instead; None where there are kernels."""
    return found if isinstance(found, str) else None


def warn_of_torch(what: str, reason: str) -> None:
    """Say to who calls an operator that torch computes it, and why."""
    warnings.warn(f"{what} are computed by torch, slowly: {reason}.", RuntimeWarning, stacklevel=3)


def whose(found: Checked | str) -> str:
    """Whose kernels compute here, for a report."""
    if isinstance(found, str):
        return f"torch ({found})"
    return f"{found.isa} (not a better one: {found.instead})" if found.instead else found.isa
