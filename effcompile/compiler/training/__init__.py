"""Planning, building and proving a training step within a byte budget."""

from effcompile.compiler.training.compile import frontier_training, optimize_training, plan_training
from effcompile.compiler.training.dynamo import training_backend
from effcompile.runtime.training import TrainingExecutable

__all__ = [
    "TrainingExecutable",
    "frontier_training",
    "optimize_training",
    "plan_training",
    "training_backend",
]
