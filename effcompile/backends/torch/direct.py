"""A graph's calls without what stands between Python and the operator: of a small model's token a third.

A call of an operator by overload takes 0.7 to 1 µs longer than the function that Python has for it, and a
weight that a module has to look for, a part of its name after the other, 0.6 µs a part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from effcompile.ops.by_expert import by_expert, is_by_expert

aten = torch.ops.aten

#: Operators → what Python calls them by, with the same arguments in the same order.
_SAME: dict[object, Callable[..., object]] = {
    aten.view.default: torch.Tensor.view,
    aten.expand.default: torch.Tensor.expand,
    aten.sym_size.int: torch.Tensor.size,
    aten.reshape.default: torch.Tensor.reshape,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.layer_norm.default: torch.layer_norm,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.add.Tensor: torch.add,
    aten.mul.Tensor: torch.mul,
    aten.cat.default: torch.cat,
    aten.matmul.default: torch.matmul,
    aten.where.self: torch.where,
    aten.sub.Tensor: torch.sub,
    aten.div.Tensor: torch.div,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.exp.default: torch.exp,
    aten.tanh.default: torch.tanh,
    aten.sigmoid.default: torch.sigmoid,
    aten.cos.default: torch.cos,
    aten.sin.default: torch.sin,
    aten.mean.dim: torch.mean,
    aten.sum.dim_IntList: torch.sum,
    aten.cumsum.default: torch.cumsum,
    aten.softmax.int: torch.softmax,
    aten.bmm.default: torch.bmm,
    aten.clone.default: torch.clone,
    aten.repeat.default: torch.Tensor.repeat,
    aten.select.int: torch.select,
    aten.gather.default: torch.gather,
    aten.scatter.src: torch.scatter,
    aten.topk.default: torch.topk,
    aten.le.Tensor: torch.le,
    aten.eq.Tensor: torch.eq,
    aten.view_as_complex.default: torch.view_as_complex,
    aten.view_as_real.default: torch.view_as_real,
    aten.embedding.default: torch.embedding,
    aten.linear.default: torch.nn.functional.linear,
}


def direct(module: fx.GraphModule) -> fx.GraphModule:
    """The module, changed: its operators called by Python's own functions, its weights in reach."""
    names: dict[str, str] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            name = names.setdefault(node.target, f"_held_{len(names)}")
            value: object = module
            for part in node.target.split("."):
                value = getattr(value, part)
            # past Module.__setattr__, which would hand a weight a second name: one that is looked for, too
            module.__dict__[name], node.target = value, name
        elif node.op == "call_function" and not node.kwargs:
            own = by_expert if is_by_expert(node.target) else node.target
            node.target = _SAME.get(node.target, own)
    module.recompile()
    return module
