"""Lowering to torch itself, eager and compiled by Inductor."""

from effcompile.backends.torch.backend import TorchEager, TorchInductor
from effcompile.backends.torch.lowered import TorchLowered, load

__all__ = ["TorchEager", "TorchInductor", "TorchLowered", "load"]
