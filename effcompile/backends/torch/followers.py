"""A function that alone reads one of our linears is taken into it."""

from __future__ import annotations

import torch
from torch import fx

from effcompile.ir.program import Program, module_path
from effcompile.ops.bf16_linear import bf16_linear
from effcompile.ops.fp32_linear import fp32_linear
from effcompile.ops.group_linear import group_linear
from effcompile.ops.int8_linear import int8_linear
from effcompile.ops.int8_sparse import int8_sparse_linear
from effcompile.ops.int13_linear import int13_linear
from effcompile.sites.parts import argument

#: What named the function that a linear took in, in its meta.
FOLLOWED = "effcompile_followed"


#: Linears that take in what follows them.
FOLLOWS = (
    int8_linear.default, int13_linear.default, group_linear.default, int8_sparse_linear.default,
    fp32_linear.default, bf16_linear.default,
)  # fmt: skip


def fuse_followers(program: Program) -> None:
    """A GELU, SiLU or ReLU that alone reads one of our linears, into it: results are at hand there."""
    for node in list(program.graph.nodes):
        source, after = node.args[0] if node.args else None, _after(node)
        if (
            not after
            or not isinstance(source, fx.Node)
            or source.target not in FOLLOWS
            or len(source.users) > 1
        ):
            continue
        source.args = (*source.args, after)
        source.meta[FOLLOWED] = module_path(node) or node.name
        node.replace_all_uses_with(source)
        program.graph.erase_node(node)


def _after(node: fx.Node) -> str:
    """What int8_linear calls the function of a node; "" for one that it has not."""
    if node.target is torch.ops.aten.gelu.default:
        return "gelu_tanh" if argument(node, "approximate") == "tanh" else "gelu"
    if node.target is torch.ops.aten.relu.default:
        return "relu"
    return "silu" if node.target is torch.ops.aten.silu.default else ""
