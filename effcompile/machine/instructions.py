"""The instruction sets of native.ISA_FLAGS that this CPU has and torch uses: on x86 $ATEN_CPU_CAPABILITY
lowers what torch uses, and so these.

On ARM: NEON, which every 64-bit one has, SDOT and SMMLA. SVE is told of a machine (hardware.py) and not used:
registers whose width is known at run time alone are no types of C++ that arrays hold, and where they are 128
bits, or 256 with half as many units, NEON computes as much in a cycle.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Mapping

import torch

from effcompile.core import torch_compat


def best_isa() -> str:
    """The widest for floating-point arithmetic."""
    if on_arm():
        return "neon"
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        return "avx512_bf16" if torch_compat.has_avx512_bf16() else "avx512"
    return "avx2" if capability == "AVX2" else "generic"


def integer_isas() -> tuple[str, ...]:
    """Those with products of bytes in vector registers, the fastest first; none on other processors than
    x86 and ARM.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    found = _found()
    if on_arm():
        dot = ("neon_dotprod",) if found.get("dot") else ()
        return ("neon_i8mm", *dot, "neon") if dot and found.get("i8mm") else (*dot, "neon")
    wide = ("avx512_vnni",) if found.get("avx512_vnni") else ()
    narrow = ("avx_vnni", "avx2") if found.get("avx_vnni") else ("avx2",)
    return {"AVX512": (*wide, "avx512", *narrow), "AVX2": narrow}.get(capability, ())


def tile_isas() -> tuple[str, ...]:
    """Those with products of bytes, of tiles too: `amx_int8` before the rest."""
    isas = integer_isas()
    there = "avx512_vnni" in isas and _found().get("amx_int8") and torch_compat.has_avx512_bf16()
    return ("amx_int8", *isas) if there else isas


def bf16_isas() -> tuple[str, ...]:
    """Those with products of bf16, `amx_bf16` before `avx512_bf16`; none on other processors than x86."""
    if best_isa() != "avx512_bf16":
        return ()
    found = _found()
    return (*(("amx_bf16",) if found.get("amx_bf16") and found.get("avx512_vnni") else ()), "avx512_bf16")


@functools.cache
def l2_bytes() -> int:
    """Bytes of a core's L2 cache; a torch that cannot tell has 1 MiB of it."""
    told = _found().get("l2_cache_size")
    return told if isinstance(told, int) and told > 0 else 1 << 20


def on_arm() -> bool:
    """Whether this is a 64-bit ARM, as Linux and macOS name it."""
    return platform.machine() in ("aarch64", "arm64")


def _found() -> Mapping[str, object]:
    """What torch says of this CPU; a torch that cannot tell has none of it."""
    tell: Callable[[], Mapping[str, object]] = getattr(torch.cpu, "get_capabilities", dict)
    return tell()
