"""ONNX Runtime: export, planned quantisation, graph choices, a self-contained artifact."""

from effcompile.backends.onnxruntime.backend import OnnxRuntime, load
from effcompile.backends.onnxruntime.custom_ops import custom_ops_library

__all__ = ["OnnxRuntime", "custom_ops_library", "load"]
