"""Where to keep and where to recompute: block frontiers, their allocation along the chain, and the proof.

`block_front` gives the Pareto front of one block (block.py; the mathematics in prove.py), `solve_chain` an
option for every stage of a chain (chain.py; the constraints in links.py, the certificate in count.py). Knows
no torch.
"""

from effcompile.planner.remat.block import BlockFront, block_front, joint_front, keep_fronts
from effcompile.planner.remat.chain import chain_frontier, frontier_budgets, solve_chain
from effcompile.planner.remat.least import smallest_budget
from effcompile.planner.remat.problem import (
    BackwardStep,
    BlockOption,
    BlockProblem,
    BlockStage,
    ChainProblem,
    ChainSolution,
    Group,
    Op,
    Residency,
)
from effcompile.planner.remat.simulate import in_order_of_need, option, simulate_block

__all__ = [
    "BackwardStep",
    "BlockFront",
    "BlockOption",
    "BlockProblem",
    "BlockStage",
    "ChainProblem",
    "ChainSolution",
    "Group",
    "Op",
    "Residency",
    "block_front",
    "chain_frontier",
    "frontier_budgets",
    "in_order_of_need",
    "joint_front",
    "keep_fronts",
    "option",
    "simulate_block",
    "smallest_budget",
    "solve_chain",
]
