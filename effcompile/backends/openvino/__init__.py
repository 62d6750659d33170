"""Lowering to OpenVINO, an optional extra: importing this does not import openvino."""

from effcompile.backends.openvino.backend import OpenVino, OpenVinoLowered, load

__all__ = ["OpenVino", "OpenVinoLowered", "load"]
