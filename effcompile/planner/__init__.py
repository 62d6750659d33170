"""z3: plain numbers in, choices and a certificate out. Knows no torch."""

from effcompile.planner.problem import OPTIMAL, SINGLE, UNPROVEN, Alternative, Problem, Solution
from effcompile.planner.solver import UndecidedError, frontier, solve

__all__ = [
    "OPTIMAL",
    "SINGLE",
    "UNPROVEN",
    "Alternative",
    "Problem",
    "Solution",
    "UndecidedError",
    "frontier",
    "solve",
]
