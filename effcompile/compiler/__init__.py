"""The whole path from a model to a verified, measured Executable."""

from effcompile.compiler.compile import frontier, make_plan, optimize
from effcompile.compiler.parallel.lower import optimize_on_ranks
from effcompile.compiler.parallel.lower_stages import plan_parts
from effcompile.compiler.training import (
    TrainingExecutable,
    frontier_training,
    optimize_training,
    plan_training,
    training_backend,
)
from effcompile.runtime.artifact import Artifact, ArtifactRun, open_artifact, run_artifact
from effcompile.runtime.executable import Executable
from effcompile.runtime.loaded import LoadedExecutable, load
from effcompile.search.machine import calibrate
from effcompile.search.parallel.plan import plan_devices
from effcompile.search.progress import QUIET, Progress
from effcompile.search.request import AnyOptimizer, Batch, Dynamic, OnChange, Request

__all__ = [
    "QUIET",
    "AnyOptimizer",
    "Artifact",
    "ArtifactRun",
    "Batch",
    "Dynamic",
    "Executable",
    "LoadedExecutable",
    "OnChange",
    "Progress",
    "Request",
    "TrainingExecutable",
    "calibrate",
    "frontier",
    "frontier_training",
    "load",
    "make_plan",
    "open_artifact",
    "optimize",
    "optimize_on_ranks",
    "optimize_training",
    "plan_devices",
    "plan_parts",
    "plan_training",
    "run_artifact",
    "training_backend",
]
