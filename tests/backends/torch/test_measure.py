"""Kernels are timed where torch has them and refused where not."""

from __future__ import annotations

from typing import Any

import pytest
from form_names import KNOWN
from torch_formats import where_there

from effcompile.backends.torch import TorchEager
from effcompile.machine.grid import grid
from effcompile.machine.target import KERNELS, KernelCall
from effcompile.ops import rows_native

DIMS = {call.kernel: call.dims for call in grid(quick=True)}
ABSENT = {
    "attention/packed",
    "attention/sdpa_int8",
    "add_norm/fused",
    "linear/2:4",
    "linear/w8",
    "embedding/int8",
    *(kernel for kernel in KERNELS if kernel.startswith("rows/") and isinstance(rows_native.kernels(), str)),
}


def _where_there(kernel: str) -> Any:
    name = kernel.removeprefix("linear/")
    return where_there(name, id=kernel, value=kernel) if name in KNOWN and name != kernel else kernel


@pytest.mark.parametrize("kernel", [_where_there(k) for k in KERNELS if k not in ABSENT])
def test_times_every_kernel_it_has(kernel: str) -> None:
    seconds = TorchEager().measure(KernelCall(kernel, DIMS[kernel]))
    assert seconds is not None
    assert 0 < seconds < 1


@pytest.mark.parametrize("kernel", sorted(ABSENT))
def test_has_no_such_kernel(kernel: str) -> None:
    assert TorchEager().measure(KernelCall(kernel, DIMS.get(kernel, (1, 2, 8, 8, 16)))) is None


def test_4_bit_needs_whole_groups() -> None:
    assert TorchEager().measure(KernelCall("linear/w4", (4, 64, 64, 32))) is not None
    call = KernelCall("linear/w4", (4, 40, 64, 32))
    assert TorchEager().measure(call) is None
    assert str(TorchEager().lacks(call)) == "4-bit weights need K a multiple of 32 and N of 32; here K = 40, N = 64"


def test_what_torch_lacks_on_any_machine_it_says() -> None:
    assert "groups of 32, 64, 128, 256, not of 16" in str(TorchEager().lacks(KernelCall("linear/w4", (4, 64, 64, 16))))
    assert "w8_channel" in str(TorchEager().lacks(KernelCall("linear/w8", (4, 64, 64, 32))))
    assert TorchEager().lacks(KernelCall("linear/w4", (4, 64, 64, 64))) is None
