"""ONNX Runtime: export, planned quantisation, graph choices, a self-contained artifact."""

from effcompile.backends.onnxruntime.backend import OnnxModel, OnnxRuntime, OpenedStep, load
from effcompile.backends.onnxruntime.custom_ops import custom_ops_library

__all__ = ["OnnxModel", "OnnxRuntime", "OpenedStep", "custom_ops_library", "load"]
