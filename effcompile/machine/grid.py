"""The shapes at which a calibration times every kernel: those of a BERT-base block, few and many rows."""

from __future__ import annotations

from effcompile.ir.formats import USUAL_GROUP
from effcompile.machine.target import KERNELS, Dims, KernelCall


def grid(*, quick: bool = False) -> tuple[KernelCall, ...]:
    """The kernels that `calibrate` times, cheap ones first within each kernel.

    `quick`: one small shape each.
    """
    if quick:
        small: dict[str, Dims] = {
            "M K N": (8, 64, 64), "M K N G": (8, 64, 64, 32), "M K N Z B": (8, 64, 64, 4, 16),
            "B M K N": (2, 8, 16, 8), "B H Sq Sk D": (1, 2, 16, 16, 16),
            "B H Sq Sk D V": (1, 2, 16, 16, 16, 8), "B H Sq Sk D V T": (1, 2, 32, 32, 16, 16, 16),
            "B H Sq Sk D V P T R": (1, 2, 32, 32, 16, 16, 8, 16, 4), "rows cols": (16, 64),
            "elements": (1024,),
        }  # fmt: skip
        return tuple(KernelCall(kernel, small[spec.dims]) for kernel, spec in KERNELS.items())
    layers = ((768, 768), (768, 3072), (3072, 768))  # the linears of a BERT-base block
    shapes: dict[str, tuple[Dims, ...]] = {
        "M K N": (*((m, k, n) for m in (1, 8, 32, 128, 1024) for k, n in layers), (1, 4096, 4096)),
        "M K N G": (
            *((m, k, n, USUAL_GROUP) for m in (1, 8, 32, 128, 1024) for k, n in layers),
            (1, 4096, 4096, USUAL_GROUP),
        ),
        # a tenth of the blocks kept
        "M K N Z B": tuple((m, k, n, k * n // 2560, 16) for m in (128, 1024) for k, n in layers),
        "B M K N": ((12, 128, 64, 128), (12, 128, 128, 64), (96, 128, 64, 128)),
        "B H Sq Sk D": ((1, 12, 128, 128, 64), (8, 12, 128, 128, 64), (1, 12, 512, 512, 64)),
        "B H Sq Sk D V": (
            (1, 12, 128, 128, 64, 64),
            (1, 12, 512, 512, 64, 256),
            (1, 12, 1024, 1024, 64, 192),
        ),
        "B H Sq Sk D V T": ((1, 12, 1024, 1024, 64, 256, 64),),
        "B H Sq Sk D V P T R": ((1, 12, 1024, 1024, 64, 512, 8, 64, 16),),
        "rows cols": ((128, 768), (1024, 768)),
        "elements": ((128 * 768,), (128 * 3072,), (1024 * 3072,)),
    }
    return tuple(KernelCall(kernel, dims) for kernel, spec in KERNELS.items() for dims in shapes[spec.dims])
