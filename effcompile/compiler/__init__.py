"""The whole path from a model to a verified, measured Executable."""

from effcompile.compiler.artifact import Artifact, ArtifactRun, open_artifact, run_artifact
from effcompile.compiler.compile import frontier, make_plan, optimize
from effcompile.compiler.executable import Executable
from effcompile.compiler.loaded import LoadedExecutable, load
from effcompile.compiler.machine import calibrate
from effcompile.compiler.parallel.lower import optimize_on_ranks
from effcompile.compiler.parallel.lower_stages import plan_parts
from effcompile.compiler.parallel.plan import plan_devices
from effcompile.compiler.progress import QUIET, Progress
from effcompile.compiler.request import AnyOptimizer, Batch, Dynamic, OnChange, Request
from effcompile.compiler.training import TrainingExecutable, frontier_training, optimize_training, plan_training, training_backend

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
