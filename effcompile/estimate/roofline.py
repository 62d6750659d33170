"""Seconds of any aten operator on a machine that is not here: max(FLOPs / peak, bytes / bandwidth) + launch (Williams et al. 2009).

FLOPs are torch's own counts (torch.utils.flop_counter), bytes those of operands and results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from effcompile.target import Target

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp32", torch.int8: "int8"}


def roofline_seconds(node: fx.Node, target: Target) -> float:
    """Modelled seconds of one call_function node with `meta["val"]` on it and its operands."""
    peak = target.peak_flops.get(_dtype(node)) or target.peak_flops.get("fp32", 0.0)
    compute = flops(node) / peak if peak else 0.0
    return max(compute, moved_bytes(node) / target.memory_bandwidth) / target.efficiency + target.launch_seconds


def flops(node: fx.Node) -> float:
    """Floating-point operations of a matrix product, convolution or attention; 0 for all that memory bounds."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    try:
        return float(count(*args, **kwargs, out_val=node.meta["val"]))
    except Exception:  # a formula that does not know this call's form
        return 0.0


def moved_bytes(node: fx.Node) -> float:
    """Bytes of operands and results, each tensor once."""
    values: list[Any] = [node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)]
    return float(sum(t.numel() * t.element_size() for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)))


def _dtype(node: fx.Node) -> str:
    leaves = [t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    return _DTYPES.get(leaves[0].dtype, "fp32") if leaves else "fp32"
