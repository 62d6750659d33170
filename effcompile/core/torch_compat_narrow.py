"""What oneDNN's narrow products are on this processor. Private operators, found by feature."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from effcompile.core import torch_compat
from effcompile.core.errors import LoweringError
from effcompile.core.floats import in_fp32

#: Columns of the probe: enough for every kernel's inner loop.
_K = 128


@cache
@in_fp32()
def products_saturate() -> bool:
    """Whether sums of two u8 × s8 products are cut at 16 bits, as the instructions of processors without VNNI
    do (vpmaddubsw).

    The error is not one of rounding: a linear of uniform weights is off by a tenth. Found by one product
    whose sums are the largest.
    """
    if not torch_compat.has_onednn() or not torch_compat.has_onednn_int8():
        return False
    x, weight = torch.full((16, _K), 255, dtype=torch.uint8), torch.full((16, _K), 127, dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    scale, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    made = torch.ops.onednn.qlinear_pointwise.default(
        x, 1.0, 0, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return bool((made != 255 * 127 * _K).any())


def made_elsewhere(path: Path) -> LoweringError:
    """What opening an artifact whose products would be cut here raises."""
    return LoweringError(
        f"{str(path)!r} was made for a processor with VNNI; this one cuts sums of its int8 products at 16 "
        "bits, which makes them wrong by a tenth. Run `effcompile optimize` on this machine."
    )


def has_bf16_products() -> bool:
    """Whether oneDNN multiplies bf16 here: it needs AVX-512, or AVX2 with conversions."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch_compat.has_onednn() and (supported is None or bool(supported()))
