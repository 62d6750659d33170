"""ONNX Runtime: export, planned quantisation, graph choices, a self-contained artifact."""
