"""Many devices: the plan that divides a step among them, and a step carried out and proven on ranks."""

from effcompile.compiler.parallel.lower import optimize_on_ranks
from effcompile.compiler.parallel.processes import on_ranks

__all__ = ["on_ranks", "optimize_on_ranks"]
