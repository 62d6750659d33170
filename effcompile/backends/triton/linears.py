"""Linears with weights in 4 and 8 bits on a GPU: tagged sites become `effcompile::quantized_linear`, whose product takes codes as they are.

`w4`, `w8`: codes in groups of 32 along K, x in the model's dtype. `int8_channel`: int8 with a scale per output channel, times rows of x
that are made int8 with a scale each. Codes are symmetric.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, fx

from effcompile.backends.torch.edit import SITE
from effcompile.core.errors import LoweringError
from effcompile.ir.program import Program, dtype_of, shape_of
from effcompile.machine.target import Dims
from effcompile.ops import two_of_four
from effcompile.ops.group_quant import pack_int4, quantize_by_torch, quantize_groups, quantized_linear
from effcompile.sites.parts import LinearSite, linears

__all__ = ["HALVES", "OPTIONS", "body", "emit", "half_body", "stored", "why_not"]

#: Options of a linear that are carried out here.
OPTIONS = ("w8", "w4", "int8_channel")
GROUP = 32
#: Those in 16 bits on a GPU, which torch's own products carry out (see backends/torch/edit.py).
HALVES = ("bf16", "2:4")


def why_not(option: str, k: int) -> str | None:
    """None, or why a linear of K columns has no such form."""
    return None if option in OPTIONS and k % GROUP == 0 else f"its K, {k}, is no multiple of {GROUP}"


def stored(option: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of an (N, K) weight."""
    if option == "w4":
        groups = weight.float().unflatten(1, (-1, GROUP))
        scales = groups.abs().amax(2) / 7
        scales = torch.where(scales > 0, scales, 1.0)
        return pack_int4((groups / scales.unsqueeze(2)).round().clamp(-8, 7).to(torch.int8).flatten(1)), scales
    return quantize_by_torch(weight, GROUP if option == "w8" else weight.shape[1], torch.int8)


def body(option: str, dims: Dims) -> Callable[[], Tensor]:
    """One call on made-up values, on torch's default device."""
    m, k, n = dims
    x, bias = torch.randn(m, k), torch.randn(n)
    codes, scales = stored(option, torch.randn(n, k))
    if option == "int8_channel":
        return lambda: quantized_linear(*_swapped(quantize_groups(x, k, torch.int8), codes, scales), bias, None, "none", x.dtype)
    return lambda: quantized_linear(x, codes, scales, None, bias, None, "none", x.dtype)


def half_body(option: str, dims: Dims) -> Callable[[], Tensor] | None:
    """One call in bf16 on made-up values, around it the casts of a model in fp32; None where this GPU has no such product."""
    m, k, n = dims
    x, weight, bias = torch.randn(m, k), torch.randn(n, k, dtype=torch.bfloat16), torch.randn(n)
    if option == "bf16":
        return lambda: torch.nn.functional.linear(x.bfloat16(), weight).float() + bias
    if two_of_four.no_cores(weight.device) is not None or two_of_four.misfit(weight.dtype, n, k) is not None:
        return None
    packed, meta = two_of_four.compress(weight * torch.tensor([1, 0, 0, 1], dtype=torch.bfloat16).repeat(k // 4))
    return lambda: two_of_four.two_of_four_linear(x.bfloat16(), packed, meta, None, n).float() + bias


def _swapped(pair: tuple[Tensor, Tensor], codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and its scales around the weight's, as the operator takes them."""
    return pair[0], codes, scales, pair[1]


def emit(program: Program) -> Program:
    """The program with those sites carried out; all else is as it was.

    Raises:
        LoweringError: a tag that a site's shape does not allow.
    """
    edited = program.editable("triton")
    rows: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for site in linears(edited):
        option = program.tags.get(site.site, "")
        if option in OPTIONS:
            _replace(edited, site, option, rows)
    edited.graph.eliminate_dead_code()
    return replace(edited, module=fx.GraphModule(edited.module, edited.graph, class_name=type(edited.module).__name__))


def _replace(program: Program, site: LinearSite, option: str, rows: dict[fx.Node, tuple[fx.Node, fx.Node]]) -> None:
    """`rows`: activations → their codes and scales, which several linears share."""
    weight = program.tensor(site.weight)
    assert weight is not None
    if (reason := why_not(option, site.k)) is not None:
        raise LoweringError(f"Cannot run {site.site} as {option}: {reason}. Plan again with another backend.")
    codes, scales = stored(option, (weight.t() if site.transposed else weight).detach())
    whole = site.bias is None or shape_of(site.bias) == (site.n,)
    with program.graph.inserting_before(site.node):
        x, x_scales = (site.x, None) if option != "int8_channel" else rows.get(site.x) or rows.setdefault(site.x, _rows(program, site))
        constants = [_constant(program, f"{site.node.name}_{name}", value) for name, value in (("codes", codes), ("scales", scales))]
        arguments = (x, *constants, x_scales, site.bias if whole else None, None, "none", dtype_of(site.node))
        made = program.graph.call_function(torch.ops.effcompile.quantized_linear.default, arguments)
        made.meta = {**site.node.meta, SITE: site.site}
        result = made if whole else program.graph.call_function(torch.ops.aten.add.Tensor, (made, site.bias))
    if result is not made:
        result.meta = dict(site.node.meta)
    site.node.replace_all_uses_with(result)
    program.graph.erase_node(site.node)


def _rows(program: Program, site: LinearSite) -> tuple[fx.Node, fx.Node]:
    pair = program.graph.call_function(torch.ops.effcompile.quantize_groups.default, (site.x, site.k, torch.int8))
    codes, scales = (program.graph.call_function(operator.getitem, (pair, i)) for i in range(2))
    return codes, scales


def _constant(program: Program, name: str, value: Tensor) -> fx.Node:
    """A new buffer of the module, and the node that reads it."""
    name = f"_{name}"
    program.module.register_buffer(name, value)
    return program.graph.get_attr(name)
