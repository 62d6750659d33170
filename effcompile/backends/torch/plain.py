"""Our operators as the plain functions that they are on a CPU."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx

from effcompile.ops import elsewhere, recurrence, rows_native
from effcompile.ops.add_norm import add_layer_norm, add_layer_norm_on_cpu
from effcompile.ops.bf16_attention import bf16_attention, bf16_attention_on_cpu
from effcompile.ops.bf16_linear import bf16_linear, bf16_linear_on_cpu
from effcompile.ops.bf16_mlp import (
    bf16_linear_residual,
    bf16_linear_residual_on_cpu,
    bf16_mlp,
    bf16_mlp_on_cpu,
)
from effcompile.ops.fp32_attention import fp32_attention, fp32_attention_on_cpu
from effcompile.ops.fp32_linear import fp32_linear, fp32_linear_on_cpu
from effcompile.ops.group_linear import group_linear, group_linear_on_cpu
from effcompile.ops.int8_attention import int8_attention, int8_attention_on_cpu
from effcompile.ops.int8_linear import int8_linear, int8_linear_on_cpu
from effcompile.ops.int8_mlp import (
    int8_linear_residual,
    int8_linear_residual_on_cpu,
    int8_mlp,
    int8_mlp_on_cpu,
)
from effcompile.ops.int8_sparse import int8_sparse_linear, int8_sparse_linear_on_cpu
from effcompile.ops.int13_linear import int13_linear, int13_linear_on_cpu

ours = torch.ops.effcompile


def without_dispatcher(module: fx.GraphModule) -> fx.GraphModule:
    """The module with our operators as the compiled functions that they are on a CPU; as it is on a GPU."""
    if on_cpu(module.graph):
        replace_by_plain(module.graph)
        module.recompile()
    return module


def on_cpu(graph: fx.Graph) -> bool:
    """Whether all its values are on a processor that stands for no GPU, as in Triton's interpreter."""
    if elsewhere.any_on("cpu"):
        return False
    values = (node.meta.get("val") for node in graph.nodes)
    return all(value.device.type == "cpu" for value in values if isinstance(value, Tensor))


#: Our operators → the plain functions that they are on a CPU: a call of a custom operator takes longer than
#: they do for one token.
PLAIN: dict[object, Callable[..., object]] = {
    ours.rms_norm.default: rows_native.rms_norm,
    ours.rms_norm_alone.default: rows_native.rms_norm_alone,
    ours.swiglu.default: rows_native.swiglu,
    ours.rotary.default: rows_native.rotary,
    group_linear.default: group_linear_on_cpu,
    int8_linear.default: int8_linear_on_cpu,
    int13_linear.default: int13_linear_on_cpu,
    fp32_linear.default: fp32_linear_on_cpu,
    bf16_linear.default: bf16_linear_on_cpu,
    bf16_mlp.default: bf16_mlp_on_cpu,
    bf16_linear_residual.default: bf16_linear_residual_on_cpu,
    int8_mlp.default: int8_mlp_on_cpu,
    int8_linear_residual.default: int8_linear_residual_on_cpu,
    int8_sparse_linear.default: int8_sparse_linear_on_cpu,
    add_layer_norm.default: add_layer_norm_on_cpu,
    fp32_attention.default: fp32_attention_on_cpu,
    bf16_attention.default: bf16_attention_on_cpu,
    int8_attention.default: int8_attention_on_cpu,
    ours.short_conv.default: recurrence.short_conv_on_cpu,
    ours.state_space.default: recurrence.state_space_on_cpu,
    ours.delta_rule.default: recurrence.delta_rule_on_cpu,
}


def replace_by_plain(graph: fx.Graph) -> None:
    """Operators by functions, but an RMSNorm whose inverse is read, which no function gives."""
    for node in graph.nodes:
        read = [
            user for user in node.users if user.target is not operator.getitem or user.args[1] not in (0, 1)
        ]
        if node.target in PLAIN and (node.target is not ours.rms_norm.default or not read):
            node.target = PLAIN[node.target]
