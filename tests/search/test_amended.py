"""A time of a kernel that is corrected while passes propose is the time that all of them go by."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import nn

from effcompile.backends import load_backend
from effcompile.capture import capture
from effcompile.core.goal import Goal
from effcompile.machine.calibration import Calibration
from effcompile.machine.hardware import this_hardware
from effcompile.machine.here import this_machine
from effcompile.machine.target import KernelCall
from effcompile.passes import load_passes
from effcompile.search import pricing
from effcompile.search.machine import Machine
from effcompile.search.progress import QUIET


class Reading(nn.Module):
    """Three linears that read the same, and a wider one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.o = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x) + self.k(x) * self.v(x))


def test_options_are_priced_by_one_time_of_each_kernel() -> None:
    """The machine stood while the three were timed first, apart and merged: to merge them once saved seconds
    of which they themselves, timed again beside the wider one, had none, and a plan took less than no time.
    """
    asked = Counter[KernelCall]()

    def measure(call: KernelCall) -> float:
        asked[call] += 1
        stood = call.kernel.startswith("linear/") and call.dims[2] != 64 and asked[call] == 1
        return 0.06 if stood else 1e-5 + (call.flops or call.bytes) / 1e11

    torch.manual_seed(0)
    program = capture(Reading().eval(), (torch.randn(64, 32),))
    known = Calibration(machine=this_hardware(), date="today", memory_bandwidth=1e10, peak_flops={})
    machine = Machine(target=this_machine(known, {"torch-eager": measure}), calibration=known)
    backend, passes = load_backend("torch-eager"), load_passes(("quantize", "merge"))
    search = pricing.search_for(program, Goal(max_error=0.9), machine, passes, QUIET)
    found = search.plan_for(backend).predicted.seconds
    assert known.amended and found is not None and found > 0
    again = replace(search, _proposals={})
    assert again._proposal(backend).choices == search._proposal(backend).choices
