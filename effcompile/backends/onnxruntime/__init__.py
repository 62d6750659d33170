"""ONNX Runtime: export, planned quantisation, graph choices, a self-contained artifact."""

import os

# Since 1.29 its builds tell Microsoft of each session, and keep a device's number in the home folder; what is
# said when it is imported holds for the process. Somebody who wants it sets ORT_DISABLE_TELEMETRY=0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from effcompile.backends.onnxruntime.backend import OnnxModel, OnnxRuntime, OpenedStep, load
from effcompile.backends.onnxruntime.beside import check_beside
from effcompile.backends.onnxruntime.custom_ops import custom_ops_library

__all__ = ["OnnxModel", "OnnxRuntime", "OpenedStep", "check_beside", "custom_ops_library", "load"]
