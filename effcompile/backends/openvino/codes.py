"""Weights in 4 and 8 bits, which OpenVINO's products and lookups read as they are: codes, and a scale for
each group along K, of a table for each row. Values are those of `estimate.fake_quant`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from effcompile.core.arrays import Array
from effcompile.core.errors import LoweringError
from effcompile.ir.formats import FP32, NOT_FOUND, TABLE_INT8_ROWS, W4, W8, Form, WeightFormat
from effcompile.ir.program import Program
from effcompile.sites.parts import EmbeddingSite, LinearSite, embeddings, linears

#: A model or a node of openvino, which ships no types.
Untyped = Any
#: Formats of linears and of tables that are carried out here.
FAMILIES = (W8.family, W4.family)
#: Activations that share a scale where weights have codes: what formats promise at the coarsest.
ACTIVATION_GROUP = 32


def narrowed(program: Program, model: Untyped, names: Mapping[str, str]) -> Untyped:
    """The model, changed, with the weights of tagged sites in codes. `names`: of their products and lookups.

    Raises:
        LoweringError: a site that conversion lost.
    """
    ops = {op.get_friendly_name(): op for op in model.get_ordered_ops()}
    sites: list[LinearSite | EmbeddingSite] = [*linears(program), *embeddings(program)]
    for site in sites:
        held = program.format_at(site.site)
        if held.family not in FAMILIES and held != TABLE_INT8_ROWS:
            continue
        weight = program.tensor(site.weight)
        if site.site not in names or weight is None:
            raise LoweringError(
                f"OpenVINO's conversion merged {site.site} with another; it cannot be held in {held.name} "
                "alone."
            )
        op, name = ops[names[site.site]], names[site.site]
        if held == TABLE_INT8_ROWS:
            op.input(0).replace_source_output(coded(weight.detach().float().numpy(), held).output(0))
            continue
        whole = weight.detach().float()
        turned = isinstance(site, LinearSite) and site.transposed
        rows = (whole.t() if turned else whole).contiguous().numpy()
        made = _product(op, rows, held)
        op.set_friendly_name(f"{name}/before")
        made.set_friendly_name(name)
    model.validate_nodes_and_infer_types()
    return model


def _product(op: Untyped, rows: Array, held: WeightFormat) -> Untyped:
    """A product in the place of this one, with codes of its weight (N, K)."""
    from openvino import opset13 as ops

    made = ops.matmul(op.input_value(0), coded(rows, held), bool(op.get_attributes()["transpose_a"]), True)
    for user in list(op.output(0).get_target_inputs()):
        user.replace_source_output(made.output(0))
    return made


def coded(rows: Array, held: WeightFormat) -> Untyped:
    """A weight (N, K) in codes, as OpenVINO multiplies with it."""
    from openvino import opset13 as ops

    size = held.group or rows.shape[1]
    codes, scales = _codes(torch.from_numpy(rows).unflatten(1, (-1, size)), held)
    if not held.group:
        codes, scales = codes[:, 0], scales[:, 0]
    plain = ops.multiply(ops.convert(_constant(codes, held.bits), "f32"), ops.constant(scales))
    return ops.reshape(plain, ops.constant(np.array(rows.shape)), False) if held.group else plain


def _codes(groups: torch.Tensor, held: WeightFormat) -> tuple[Array, Array]:
    """(codes, scales): of groups that with the largest magnitude is the least code; of rows it is ±127."""
    half = 1 << (held.bits - 1)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if held.group:
        scales = torch.where(high > -low, high, low) / -half
    else:
        scales = torch.maximum(high, -low) / (half - 1)
    scales[scales == 0] = 1
    codes = (groups / scales).round_().clamp_(-half, half - 1).to(torch.int8)
    return codes.numpy(), scales.numpy()


def _constant(codes: Array, bits: int) -> Untyped:
    import openvino
    from openvino import opset13 as ops

    if bits == 8:
        return ops.constant(codes)
    halves = (codes.reshape(-1) & 0xF).astype(np.uint8)
    packed = openvino.Tensor(
        halves[0::2] | halves[1::2] << 4, openvino.Shape(list(codes.shape)), openvino.Type.i4
    )
    # copied: what shares an array's memory does not hold the array
    return ops.constant(packed, shared_memory=False)


def found(model: Untyped, names: Mapping[str, str]) -> dict[str, Form]:
    """site → what its product or lookup reads in the model."""
    ops = {op.get_friendly_name(): op for op in model.get_ordered_ops()}
    return {site: _form(ops[name]) if name in ops else NOT_FOUND for site, name in names.items()}


def _form(op: Untyped) -> Form:
    of_table = op.get_type_name() == "Gather"
    node = op.input_value(0 if of_table else 1).get_node()
    while node.get_type_name() in ("Convert", "Multiply", "Reshape", "Transpose"):
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant":
        return NOT_FOUND
    kind, sizes = node.get_element_type().get_type_name(), node.get_shape()
    if kind == "f32":
        return Form(weights=FP32)
    if of_table:
        return Form(weights=TABLE_INT8_ROWS) if kind == "i8" and len(sizes) == 2 else NOT_FOUND
    held = {"i4": W4, "i8": W8}.get(kind)
    return Form(weights=held.grouped_by(sizes[-1])) if held is not None and len(sizes) == 3 else NOT_FOUND
