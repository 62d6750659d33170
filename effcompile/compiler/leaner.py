"""What a lowered program can be set to, to hold less."""

from __future__ import annotations

from effcompile.backends.base import Leaner, Lowered
from effcompile.core.goal import Goal
from effcompile.ir.footprint import excess
from effcompile.ir.program import Program


def hold_less(goal: Goal, program: Program, lowered: Lowered) -> bool:
    """Set what can be set to hold less, where the least is asked for or more than declared is held; whether
    anything was.
    """
    if not isinstance(lowered, Leaner):
        return False
    least = goal.minimize == "memory"
    over = not least and goal.memory and excess(lowered.peak_bytes(program.flat_inputs()), goal.memory)
    return bool(least or over) and lowered.leaner()
