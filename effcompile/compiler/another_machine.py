"""A plan that is carried out on another machine than it was made for says so: what is predicted is of that
one.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from effcompile.core.errors import UsageError
from effcompile.core.reasons import Because
from effcompile.ir.plan import Plan
from effcompile.machine.accelerator import this_accelerator
from effcompile.machine.hardware import Hardware, this_hardware
from effcompile.machine.here import HERE
from effcompile.search.machine import is_here


def carried_out_here(plan: Plan, place: torch.device) -> Plan:
    """The plan, with a note where it was made for another machine than this one.

    place: where the model lies, on this machine's processor or its current GPU.
    """
    hardware = this_hardware(this_accelerator() if place.type == "cuda" else None)
    if _made_for(hardware, plan, place):
        return plan
    here = hardware.device.name if hardware.device else f"{hardware.cores} cores, {hardware.cpu}"
    text = "made for {name}: what is predicted is of that machine, what is measured of this one ({name})"
    target = plan.target_line if plan.target == HERE else plan.target
    note = Because(text, (target, here))
    return replace(plan, notes=tuple(dict.fromkeys((*plan.notes, note))))


def _made_for(hardware: Hardware, plan: Plan, place: torch.device) -> bool:
    """Whether the plan's target is this machine, as far as its line tells."""
    if hardware.device is not None and hardware.device.name in plan.target_line:
        return True
    if plan.target == HERE:
        line = plan.target_line
        return hardware.device is None and line.startswith(f"{hardware.cores} core") and hardware.cpu in line
    try:
        return is_here(plan.target, place)
    except UsageError:  # a target of a file
        return False
