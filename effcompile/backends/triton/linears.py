"""Linears with weights in 4 and 8 bits on a GPU: tagged sites become `effcompile::quantized_linear`, whose
product takes codes as they are.

`w4`, `w8`: codes in groups along K, x in the model's dtype. `int8_channel`: int8 with a scale per output
channel, times rows of x that are made int8 with a scale each. Codes are symmetric.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, fx

from effcompile.backends.torch.edit_attentions import SITE
from effcompile.core.errors import LoweringError
from effcompile.core.reasons import Reason, Unsupported
from effcompile.ir.formats import (
    BF16,
    FP32,
    INT4_GROUPS,
    INT8_CHANNEL,
    INT8_GROUPS,
    TABLE_INT8_ROWS,
    TWO_OF_FOUR,
    W4,
    W8,
    WeightFormat,
)
from effcompile.ir.program import Program, dtype_of, shape_of
from effcompile.machine.target import Dims, KernelCall
from effcompile.ops import group_codes, two_of_four
from effcompile.ops.group_linear import group_linear, misfit
from effcompile.ops.group_quant import pack_int4, quantize_by_torch, quantize_groups, quantized_linear
from effcompile.sites.parts import LinearSite, linears

__all__ = ["FAMILIES", "GROUPED", "HALVES", "body", "emit", "half_body", "lacks", "stored", "why_not"]

#: Families of formats of a linear that are carried out here.
FAMILIES = (W8.family, W4.family, INT8_CHANNEL.family)
#: And by torch's own edit, with an operator that has a kernel of ours (group_linear.py).
GROUPED = (INT8_GROUPS.family, INT4_GROUPS.family)
#: Codes that tensor cores multiply at once.
_TOGETHER = 32
#: Kernels in 16 bits on a GPU, which torch's own products carry out (see backends/torch/edit.py).
HALVES = (f"linear/{BF16.family}", f"linear/{TWO_OF_FOUR.family}")


def why_not(held: WeightFormat, k: int) -> Reason | None:
    """None, or why a linear of K columns is not carried out so here."""
    if held.family in GROUPED:
        return misfit(held.group)
    if held.family not in FAMILIES:
        return Unsupported("there is no kernel for a linear in {name} on a GPU", (held.name,))
    if held.group % _TOGETHER:
        return Unsupported(
            "tensor cores multiply {} codes at once: groups of {} are not offered", (_TOGETHER, held.group)
        )
    wanted = held.group or _TOGETHER
    return Unsupported("its K, {}, is no multiple of {}", (k, wanted)) if k % wanted else None


def lacks(call: KernelCall) -> Reason | None:
    """See `backends.base.Backend.lacks`."""
    held = call.format
    if held is None or held.family in (FP32.family, BF16.family):
        return None
    if call.kernel.startswith("embedding/"):
        return (
            Unsupported("tables of 8 bits have a scale per row here: int8_rows")
            if held != TABLE_INT8_ROWS
            else None
        )
    return why_not(held, call.dims[1])


def stored(held: WeightFormat, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of an (N, K) weight; of 4 bits the value of largest magnitude is −8."""
    if held.family == W4.family:
        groups = weight.float().unflatten(1, (-1, held.group))
        low, high = groups.amin(2), groups.amax(2)
        scales = torch.where(high > -low, high, low) / -8
        scales = torch.where(scales == 0, 1.0, scales)
        return pack_int4(
            (groups / scales.unsqueeze(2)).round().clamp(-8, 7).to(torch.int8).flatten(1)
        ), scales
    return quantize_by_torch(weight, held.group or weight.shape[1], torch.int8)


def body(held: WeightFormat, dims: Dims) -> Callable[[], Tensor]:
    """One call on made-up values, on torch's default device."""
    m, k, n = dims[:3]
    x, bias = torch.randn(m, k), torch.randn(n)
    if held.family in GROUPED:
        packed = group_codes.pack(*group_codes.quantize(torch.randn(n, k), held.bits), held.bits)
        return lambda: group_linear(x, packed, n, bias)
    codes, scales = stored(held, torch.randn(n, k))
    if held == INT8_CHANNEL:
        return lambda: quantized_linear(
            *_swapped(quantize_groups(x, k, torch.int8), codes, scales), bias, None, "none", x.dtype
        )
    return lambda: quantized_linear(x, codes, scales, None, bias, None, "none", x.dtype)


def half_body(call: KernelCall) -> Callable[[], Tensor] | None:
    """One call in bf16 on made-up values, around it the casts of a model in fp32; None where this GPU has no
    such product.
    """
    m, k, n = call.dims
    x, weight, bias = torch.randn(m, k), torch.randn(n, k, dtype=torch.bfloat16), torch.randn(n)
    if call.format == BF16:
        return lambda: torch.nn.functional.linear(x.bfloat16(), weight).float() + bias
    if two_of_four.no_cores(weight.device) is not None or two_of_four.misfit(weight.dtype, n, k) is not None:
        return None
    packed, meta = two_of_four.compress(
        weight * torch.tensor([1, 0, 0, 1], dtype=torch.bfloat16).repeat(k // 4)
    )
    return lambda: two_of_four.two_of_four_linear(x.bfloat16(), packed, meta, None, n).float() + bias


def _swapped(
    pair: tuple[Tensor, Tensor], codes: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
        held = program.format_at(site.site)
        if held.family in FAMILIES:
            _replace(edited, site, held, rows)
    edited.graph.eliminate_dead_code()
    return replace(
        edited, module=fx.GraphModule(edited.module, edited.graph, class_name=type(edited.module).__name__)
    )


def _replace(
    program: Program, site: LinearSite, held: WeightFormat, rows: dict[fx.Node, tuple[fx.Node, fx.Node]]
) -> None:
    """`rows`: activations → their codes and scales, which several linears share."""
    weight = program.tensor(site.weight)
    assert weight is not None
    if (reason := why_not(held, site.k)) is not None:
        raise LoweringError(
            f"Cannot run {site.site} as {held.name}: {reason}. Plan again with another backend."
        )
    codes, scales = stored(held, (weight.t() if site.transposed else weight).detach())
    whole = site.bias is None or shape_of(site.bias) == (site.n,)
    with program.graph.inserting_before(site.node):
        x, x_scales = (
            (site.x, None)
            if held != INT8_CHANNEL
            else rows.get(site.x) or rows.setdefault(site.x, _rows(program, site))
        )
        constants = [
            _constant(program, f"{site.node.name}_{name}", value)
            for name, value in (("codes", codes), ("scales", scales))
        ]
        arguments = (x, *constants, x_scales, site.bias if whole else None, None, "none", dtype_of(site.node))
        made = program.graph.call_function(torch.ops.effcompile.quantized_linear.default, arguments)
        made.meta = {**site.node.meta, SITE: site.site}
        result = made if whole else program.graph.call_function(torch.ops.aten.add.Tensor, (made, site.bias))
    if result is not made:
        result.meta = dict(site.node.meta)
    site.node.replace_all_uses_with(result)
    program.graph.erase_node(site.node)


def _rows(program: Program, site: LinearSite) -> tuple[fx.Node, fx.Node]:
    pair = program.graph.call_function(
        torch.ops.effcompile.quantize_groups.default, (site.x, site.k, torch.int8)
    )
    codes, scales = (program.graph.call_function(operator.getitem, (pair, i)) for i in range(2))
    return codes, scales


def _constant(program: Program, name: str, value: Tensor) -> fx.Node:
    """A new buffer of the module, and the node that reads it."""
    name = f"_{name}"
    program.module.register_buffer(name, value)
    return program.graph.get_attr(name)
