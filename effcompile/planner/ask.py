"""Asking z3, which may give up: for its time, its limit of work, or memory."""

from __future__ import annotations

import z3


def ask(solver: z3.Solver) -> z3.CheckSatResult:
    """z3's answer; unknown where it stopped by an exception, as when it has no memory: who asks has to live with unknown anyway."""
    try:
        return solver.check()
    except z3.Z3Exception:
        return z3.unknown
