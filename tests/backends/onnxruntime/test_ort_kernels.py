"""Every kernel that ONNX Runtime has can be timed; those it lacks are None."""

import pytest

from effcompile.backends.onnxruntime import OnnxRuntime
from effcompile.target import KERNELS, KernelCall

DIMS = {
    "M K N": (4, 64, 32), "M K N Z B": (4, 64, 32, 3, 8), "B M K N": (2, 4, 8, 4), "B H Sq Sk D": (1, 2, 8, 8, 8),
    "B H Sq Sk D V": (1, 2, 8, 8, 8, 4), "rows cols": (4, 32), "elements": (64,),
}  # fmt: skip
ABSENT = {"linear/bf16", "linear/sparse", *(f"attention/{form}" for form in ("math", "sdpa_int8", "tiled", "tiled_scores", "flex"))}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(kernel):
    seconds = OnnxRuntime().measure(KernelCall(kernel, DIMS[KERNELS[kernel].dims]))
    if kernel in ABSENT:
        assert seconds is None
    else:
        assert seconds is not None
        assert 0 < seconds < 1


def test_weight_only_needs_whole_groups():
    assert OnnxRuntime().measure(KernelCall("linear/w4", (4, 48, 32))) is None
