"""Attention that drops weights, as GPUs run it: one operator that keeps no scores, for steps that are planned
without the machine.

A step without data is traced as on a CPU, whose kernel drops nothing: there scaled_dot_product_attention with
dropout is products of matrices and a softmax, which keep every score. CUDA's kernels draw what they drop by
place, from a seed that they keep (Dao et al. 2022, FlashAttention, appendix B.4), and so does the operator of
the CPU's kernel as autograd sees it: it is put in their place. It is not run.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, fx

from effcompile.core.types import Value

aten = torch.ops.aten
_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default


def as_on_gpu(front: fx.GraphModule) -> int:
    """Change every attention with dropout of a flat aten graph in place; returns how many.

    Those stay whose heads of queries and keys differ in number, or whose mask needs a gradient.
    """
    changed = 0
    for node in front.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        given = _arguments(node)
        mask = given["attn_mask"]
        if not given["dropout_p"] or not _alike(node) or (mask is not None and _needs_gradient(mask)):
            continue
        with front.graph.inserting_before(node):
            mask = _in_numbers(front.graph, mask, node)
            causal, scale = given["is_causal"], given["scale"]
            made = front.graph.call_function(
                _FLASH, (*node.args[:3], given["dropout_p"], causal), {"attn_mask": mask, "scale": scale}
            )
            first = front.graph.call_function(operator.getitem, (made, 0))
        for each in (made, first):
            each.meta = {key: value for key, value in node.meta.items() if key != "val"}
        first.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(first)
        front.graph.erase_node(node)
        changed += 1
    front.recompile()
    return changed


def _arguments(node: fx.Node) -> dict[str, Value]:
    schema = aten.scaled_dot_product_attention.default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema}
    return defaults | dict(zip(defaults, node.args, strict=False)) | dict(node.kwargs)


def _alike(node: fx.Node) -> bool:
    """Queries, keys and values of four axes with one number of heads."""
    shapes = [argument.meta["val"].shape for argument in node.args[:3]]  # type: ignore[union-attr]
    return all(len(shape) == 4 for shape in shapes) and len({shape[:2] for shape in shapes}) == 1


def _needs_gradient(mask: fx.Node) -> bool:
    value = mask.meta.get("val")
    return isinstance(value, Tensor) and value.requires_grad


def _in_numbers(graph: fx.Graph, mask: fx.Node | None, node: fx.Node) -> fx.Node | None:
    """A mask as what is added to the scores."""
    if mask is None or mask.meta["val"].dtype != torch.bool:
        return mask
    dtype = node.meta["val"].dtype
    value = mask.meta["val"]
    zeros = graph.call_function(
        aten.zeros.default, (list(value.shape),), {"dtype": dtype, "device": value.device}
    )
    hidden = graph.call_function(aten.logical_not.default, (mask,))
    return graph.call_function(aten.masked_fill.Scalar, (zeros, hidden, -math.inf))
