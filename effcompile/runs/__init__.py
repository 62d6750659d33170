"""A run is a sequence of plans: what holds for a while, and what each while costs."""

from effcompile.runs.noise import CriticalBatch, critical_batch
from effcompile.runs.run import Active, Run
from effcompile.runs.scheduling import schedule
from effcompile.runs.scoring import Scores, scores
from effcompile.runs.sparse_choice import SparseLayers, sparse_layers
from effcompile.runs.stage import Stage

__all__ = [
    "Active",
    "CriticalBatch",
    "Run",
    "Scores",
    "SparseLayers",
    "Stage",
    "critical_batch",
    "schedule",
    "scores",
    "sparse_layers",
]
