"""Seconds of any aten operator on a machine that is not here: max(FLOPs / peak, bytes / bandwidth) + launch
(Williams et al. 2009).

FLOPs are torch's own counts (torch.utils.flop_counter), and ours of loss heads and of products in groups;
bytes those of operands and results.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from effcompile.core.torch_compat import UNCOUNTED_FLOPS
from effcompile.core.types import Args
from effcompile.machine.cluster import Cluster
from effcompile.machine.target import Target
from effcompile.ops import collectives, grouped
from effcompile.ops.attention import attention, attention_backward
from effcompile.ops.bf16_attention_backward import bf16_attention_backward
from effcompile.ops.frozen_codes import passed_bytes
from effcompile.ops.parts import add_select_, add_slice_

#: How often gloo moves a byte through memory from one process to another on a CPU: into a socket, out of it,
#: and a sum (measured: some 16).
_COPIES = 16
#: Seconds until two processes of a CPU have met in a collective, and of each message between them (measured
#: with 2 ranks on 2 cores: 1 KB in one message 290 µs, in 12 of them 800).
_MEETING, _MESSAGE = 250e-6, 45e-6

_DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp32",
    torch.int8: "int8",
}

_ATEN = torch.ops.aten
#: Operators of attention → their family in `Target.shares`.
_FAMILIES = {
    **dict.fromkeys(
        (
            _ATEN.scaled_dot_product_attention,
            _ATEN._scaled_dot_product_flash_attention,
            _ATEN._scaled_dot_product_efficient_attention,
            _ATEN._scaled_dot_product_cudnn_attention,
            _ATEN._scaled_dot_product_flash_attention_for_cpu,
        ),
        "sdpa",
    ),
    **dict.fromkeys(
        (
            _ATEN._scaled_dot_product_flash_attention_backward,
            _ATEN._scaled_dot_product_efficient_attention_backward,
            _ATEN._scaled_dot_product_cudnn_attention_backward,
            _ATEN._scaled_dot_product_flash_attention_for_cpu_backward,
            bf16_attention_backward,
        ),
        "sdpa_backward",
    ),
    attention._opoverload.overloadpacket: "attention",
    attention_backward._opoverload.overloadpacket: "attention_backward",
}

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
#: Our loss heads: which arguments are x (N, D) and W (V, D), and where `needs` says which gradients are made
#: (ops/loss_head.py).
_LOSS_HEADS = {
    "loss_head_gradients": (0, 1, 10),
    "loss_head_forward": (0, 1, None),
    "loss_head_backward": (1, 2, 12),
}


def roofline_seconds(node: fx.Node, target: Target) -> float:
    """Modelled seconds of one call_function node with `meta["val"]` on it and its operands."""
    if collectives.is_collective(node.target):
        return _collective_seconds(node, target)
    peak = target.peak_flops.get(_dtype(node)) or target.peak_flops.get("fp32", 0.0)
    compute = _seen(node) * flops(node) / peak if peak else 0.0
    share = target.share(_FAMILIES.get(getattr(node.target, "overloadpacket", None), ""))
    return (
        max(compute / share, moved_bytes(node) / target.memory_bandwidth / target.efficiency)
        + target.launch_seconds
    )


def _collective_seconds(node: fx.Node, target: Target) -> float:
    """A ring over the links of the target's cluster (Thakur et al. 2005); processes of one CPU copy through
    memory, several times each.
    """
    args: Any = fx.map_arg(node.args, lambda n: n.meta["val"])
    crossing, ranks = collectives.link_bytes(node.target, args) or 0.0, int(args[-1])
    if target.cluster is None:
        if target.device != "cpu":
            return crossing / target.link_bandwidth + target.launch_seconds
        count = collectives.message_count(node.target, args) or 0
        carried = crossing * _COPIES / target.memory_bandwidth
        return carried + (ranks - 1) * (_MEETING + count * _MESSAGE) + target.launch_seconds
    per_node = target.cluster.devices_per_node
    nodes, each = (1, ranks) if ranks <= per_node else (-(-ranks // per_node), per_node)
    there = Cluster(nodes=nodes, per_node=each, links=target.cluster)
    return (
        crossing / there.bandwidth(each, ranks)
        + (ranks - 1) * there.latency(each, ranks)
        + target.launch_seconds
    )


def _seen(node: fx.Node) -> float:
    """The share of its counted FLOPs that stock attention computes: torch counts all pairs, and a causal mask
    shows half of them.
    """
    if _FAMILIES.get(getattr(node.target, "overloadpacket", None), "") not in ("sdpa", "sdpa_backward"):
        return 1.0
    operator: Any = node.target
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return 0.5 if given.get("is_causal") is True else 1.0


def flops(node: fx.Node) -> float:
    """Floating-point operations of a matrix product, convolution or attention; 0 for all that
    memory bounds.
    """
    packet: Any = getattr(node.target, "overloadpacket", None)
    count = UNCOUNTED_FLOPS.get(packet) or flop_registry.get(packet)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    if (name := str(packet).removeprefix("effcompile.")) in _LOSS_HEADS:
        return _loss_head(name, args)
    if (of_groups := grouped.flops(node.target, args)) is not None:
        return of_groups
    if count is None:
        return 0.0
    try:
        return float(count(*args, **kwargs, out_val=node.meta["val"]))
    except Exception:  # a formula that does not know this call's form
        return 0.0


def _loss_head(name: str, args: Args) -> float:
    """2NVD for the logits, and as much for the gradients of x and of W each."""
    x, weight, needs = _LOSS_HEADS[name]
    products = 1 + (sum(map(bool, args[needs][:2])) if needs is not None else 0)
    return float(products * 2 * args[x].numel() * args[weight].shape[0])


def moved_bytes(node: fx.Node) -> float:
    """Bytes of operands and results, each tensor once; of a part that is added to a whole, those
    of the part.
    """
    if node.target in (add_select_, add_slice_):
        part: Any = node.args[1]
        return 3 * _bytes(part.meta["val"])
    if node.target is torch.ops.effcompile.expand_codes.default:
        given: Any = fx.map_arg(node.args, lambda n: n.meta["val"])
        codes, shape, form, dtype = given
        return passed_bytes(math.prod(shape), form, dtype) + _bytes([node.meta["val"], codes])
    values: list[Any] = [node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)]
    return _bytes(values)


def _bytes(values: object) -> float:
    """Bytes of the tensors in a structure."""
    return float(
        sum(t.numel() * t.element_size() for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor))
    )


def _dtype(node: fx.Node) -> str:
    """What the arithmetic is in: of products in float8 the operands', else the result's."""
    if any(
        isinstance(arg.meta.get("val"), torch.Tensor) and arg.meta["val"].dtype in _FLOAT8
        for arg in node.all_input_nodes
    ):
        return "fp8"
    leaves = [t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    return _DTYPES.get(leaves[0].dtype, "fp32") if leaves else "fp32"
