"""The whole path from a model to a verified, measured Executable."""

from effcompile.compiler.artifact import ArtifactRun, run_artifact
from effcompile.compiler.compile import frontier, make_plan, optimize
from effcompile.compiler.executable import Executable
from effcompile.compiler.machine import calibrate
from effcompile.compiler.progress import QUIET, Progress

__all__ = ["QUIET", "ArtifactRun", "Executable", "Progress", "calibrate", "frontier", "make_plan", "optimize", "run_artifact"]
