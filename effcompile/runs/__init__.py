"""A run is a sequence of plans: what holds for a while, and what each while costs."""

from effcompile.runs.run import Active, Run
from effcompile.runs.scheduling import schedule
from effcompile.runs.scoring import Scores, scores
from effcompile.runs.stage import Stage

__all__ = ["Active", "Run", "Scores", "Stage", "schedule", "scores"]
