"""Kernels are timed where torch has them and refused where not."""

from __future__ import annotations

import pytest

from effcompile.backends.torch import TorchEager
from effcompile.backends.torch.numerics import OPTIONS
from effcompile.machine.calibration import grid
from effcompile.machine.target import KERNELS, KernelCall

DIMS = {call.kernel: call.dims for call in grid(quick=True)}
ABSENT = {
    "attention/packed",
    "attention/sdpa_int8",
    "add_norm/fused",
    "linear/2:4",
    *(kernel for kernel in KERNELS if kernel.startswith("rows/")),
}


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k not in ABSENT])
def test_times_every_kernel_it_has(kernel: str) -> None:
    seconds = TorchEager().measure(KernelCall(kernel, DIMS[kernel]))
    assert seconds is not None
    assert 0 < seconds < 1


@pytest.mark.parametrize("kernel", sorted(ABSENT))
def test_has_no_such_kernel(kernel: str) -> None:
    assert TorchEager().measure(KernelCall(kernel, DIMS.get(kernel, (1, 2, 8, 8, 16)))) is None


def test_4_bit_needs_whole_groups() -> None:
    assert "w4" in OPTIONS
    assert TorchEager().measure(KernelCall("linear/w4", (4, 40, 64))) is None
