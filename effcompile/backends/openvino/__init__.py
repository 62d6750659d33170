"""OpenVINO, behind the extra `effcompile[openvino]`."""
