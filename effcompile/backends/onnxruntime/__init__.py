"""ONNX Runtime: export, planned quantisation, graph choices, a self-contained artifact."""

from effcompile.backends.onnxruntime.backend import OnnxRuntime, load

__all__ = ["OnnxRuntime", "load"]
