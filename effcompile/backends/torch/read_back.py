"""Reads off an emitted graph what was applied at each site: from operators and the dtypes of tensors, never
from tags.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import fx

from effcompile.backends.torch.chains import FIRST, NORM
from effcompile.backends.torch.edit_attentions import SITE
from effcompile.backends.torch.followers import FOLLOWED
from effcompile.backends.torch.read_attention import attentions, packet
from effcompile.core import torch_compat
from effcompile.ir.formats import (
    BF16,
    FP16,
    FP32,
    INT4_GROUPS,
    INT8_CHANNEL,
    INT8_DYNAMIC,
    INT8_GROUPS,
    INT8_STATIC,
    INT8_TOKEN,
    INT13_TOKEN,
    NOT_FOUND,
    TABLE_INT8_GROUPS,
    TABLE_INT8_ROWS,
    TWO_OF_FOUR,
    W4,
    W8,
    W8_CHANNEL,
    Form,
    WeightFormat,
    in_bytes,
    sparse_format,
)  # fmt: skip
from effcompile.ir.program import Program, module_path, shape_of
from effcompile.ops import group_codes
from effcompile.ops.add_norm import add_layer_norm
from effcompile.ops.bf16_linear import bf16_linear
from effcompile.ops.bf16_mlp import bf16_linear_residual, bf16_mlp
from effcompile.ops.fp32_linear import fp32_linear, fp32_pack
from effcompile.ops.group_linear import group_linear
from effcompile.ops.group_quant import quantized_linear as _registers  # noqa: F401 - an operator that is read
from effcompile.ops.int8_linear import int8_linear
from effcompile.ops.int8_mlp import int8_linear_residual, int8_mlp
from effcompile.ops.int8_sparse import int8_sparse_linear
from effcompile.ops.int13_linear import int13_linear
from effcompile.ops.sparse_codes import SparseCodes
from effcompile.ops.two_of_four import two_of_four_linear as _registers_too  # noqa: F401 - the same
from effcompile.sites.parts import add_norms, argument, linears, stored_format
from effcompile.sites.rows import ROW_SITE, row_sites
from effcompile.sparse.forms import pattern_format
from effcompile.sparse.pattern import BlockPattern

aten = torch.ops.aten

#: What a compiled graph and the graph it was compiled from must agree on: format and weight shape.
Signature = tuple[WeightFormat, int, int]

_FLOAT = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
_ROWS_LAST = (aten.slice.Tensor, aten.select.int, aten.index_select.default)


def applied(program: Program, module: fx.GraphModule) -> dict[str, Form]:
    """site → form of everything in `module`, the graph that runs; `program` is what it was made of."""
    held = {site: signature[0] for site, _, signature in signatures(module) if site}
    # what nobody asked for is then as it was given, by the baseline's name
    as_given = stored_format(program) == BF16
    found = {
        site: Form(
            weights=FP32
            if as_given and weights in (BF16, FP16) and program.format_at(site) == FP32
            else weights
        )
        for site, weights in held.items()
    }
    found.update(attentions(module))
    found.update(_gelus(module))
    found.update({site.site: Form(word="separate") for site in row_sites(program)})
    found.update(
        {
            node.meta[ROW_SITE]: Form(word="fused")
            for node in module.graph.nodes
            if ROW_SITE in node.meta and packet(node) in _ROWS
        }
    )
    found.update(_structure(program, found))
    return found


def signatures(module: fx.GraphModule) -> Iterator[tuple[str, fx.Node, Signature]]:
    """Each linear and embedding with a constant weight: its site or "", its node, its option with K and N (or
    rows and columns of the table).
    """
    for node in module.graph.nodes:
        reader = _FIRST.get(packet(node))
        if reader is not None and (first := reader(module, node)) is not None:
            yield node.meta.get(FIRST, ""), node, first
        signature = _signature(module, node) if node.op == "call_function" else None
        if signature is not None:
            yield node.meta.get(SITE, ""), node, signature


def confirm(
    found: Mapping[str, Form], edited: fx.GraphModule, compiled: Counter[Signature]
) -> dict[str, Form]:
    """`found` with NOT_FOUND at every site whose kind of kernel occurs less often in the compiled graph than
    in the edited one.

    A compiler may not lose reduced precision; fp32 linears it may rewrite as it likes, and lookups of
    constant ids it folds.
    """
    by_signature: dict[Signature, list[str]] = defaultdict(list)
    for site, node, signature in signatures(edited):
        if site and signature[0] != FP32 and packet(node) is not aten.embedding:
            by_signature[signature].append(site)
    missing = {
        site
        for signature, sites in by_signature.items()
        if compiled[signature] < len(sites)
        for site in sites
    }
    return {site: NOT_FOUND if site in missing else form for site, form in found.items()}


def _signature(module: fx.GraphModule, node: fx.Node) -> Signature | None:
    if "packed_weight" in node.kwargs:  # Inductor's fused form of a qlinear
        return _int8(module, *(node.kwargs[name] for name in ("packed_weight", "w_scale", "x_scale")))
    reader = _READERS.get(packet(node))
    return reader(module, node) if reader else None


def _constant(module: fx.GraphModule, node: object) -> torch.Tensor | None:
    """The tensor behind a get_attr node, also behind the packing of one."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_function" and packet(node) in (
        torch.ops.onednn.qlinear_prepack,
        torch.ops.mkldnn._reorder_linear_weight,
        fp32_pack,
    ):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value: object = module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, torch.Tensor) else None


def _float_linear(
    position: int, *, transposed: bool = False
) -> Callable[[fx.GraphModule, fx.Node], Signature | None]:
    def read(module: fx.GraphModule, node: fx.Node) -> Signature | None:
        weight = _constant(module, node.args[position])
        if weight is None or weight.dim() != 2 or weight.dtype not in _FLOAT:
            return None
        n, k = reversed(weight.shape) if transposed else weight.shape
        return _FLOAT[weight.dtype], int(k), int(n)

    return read


def _packed_float(module: fx.GraphModule, node: fx.Node) -> Signature | None:
    weight = _constant(module, argument(node, "W"))
    return None if weight is None else (_FLOAT[weight.dtype], int(weight.shape[1]), int(weight.shape[0]))


def _qlinear(module: fx.GraphModule, node: fx.Node) -> Signature | None:
    return _int8(module, *(argument(node, name) for name in ("qw", "w_scale", "x_scale")))


def _int8(
    module: fx.GraphModule, weight_node: object, scale_node: object, x_scale: object
) -> Signature | None:
    weight, scale = _constant(module, weight_node), _constant(module, scale_node)
    if weight is None or scale is None or weight.dtype != torch.int8:
        return None
    static = not isinstance(x_scale, fx.Node)
    held = INT8_STATIC if static else INT8_DYNAMIC if scale.numel() == 1 else INT8_CHANNEL
    packed = torch_compat.is_packed(weight)
    k, n = weight.shape if packed else reversed(weight.shape)
    return held, int(k), int(n)


def _w8_channel(module: fx.GraphModule, node: fx.Node) -> Signature | None:
    weight = _constant(module, node.args[1])
    return None if weight is None else (W8_CHANNEL, int(weight.shape[1]), int(weight.shape[0]))


def _w4(module: fx.GraphModule, node: fx.Node) -> Signature | None:
    weight, group = _constant(module, node.args[1]), node.args[2]  # two 4-bit values in a byte
    if weight is None or not isinstance(group, int):
        return None
    return W4.grouped_by(group), 2 * int(weight.shape[1]), int(weight.shape[0])


def _int8_token(module: fx.GraphModule, node: fx.Node, at: int = 1) -> Signature | None:
    """K as it is stored, to whole words of four codes; `at`: where the arguments of the linear begin."""
    codes, scales = _constant(module, node.args[at]), _constant(module, node.args[at + 1])
    return (
        None
        if codes is None or scales is None
        else (INT8_TOKEN, 4 * int(codes.shape[1]), int(scales.shape[0]))
    )


def _int13_token(module: fx.GraphModule, node: fx.Node) -> Signature | None:
    """K as it is stored, to whole pairs of codes."""
    codes, scales = _constant(module, node.args[1]), _constant(module, node.args[2])
    if codes is None or scales is None:
        return None
    return INT13_TOKEN, 2 * int(codes.shape[1]), int(scales.shape[0])


def _panels(module: fx.GraphModule, node: fx.Node) -> Signature | None:
    """N as it is told: a packed weight is whole panels."""
    weight, n = _constant(module, node.args[1]), node.args[2]
    return None if weight is None or not isinstance(n, int) else (FP32, int(weight.shape[1]), n)


def _halves(module: fx.GraphModule, node: fx.Node, at: int = 1) -> Signature | None:
    """K as it is stored, to whole pairs; `at`: where the arguments of the linear begin."""
    weight, n = _constant(module, node.args[at]), node.args[at + 1]
    return None if weight is None or not isinstance(n, int) else (BF16, 2 * int(weight.shape[1]), n)


def _groups(module: fx.GraphModule, node: fx.Node) -> Signature | None:
    """K as it is stored, to whole groups."""
    weight, n = _constant(module, node.args[1]), node.args[2]
    if weight is None or not isinstance(n, int):
        return None
    return (
        {4: INT4_GROUPS, 8: INT8_GROUPS}[group_codes.bits_of(weight)],
        group_codes.GROUP * int(weight.shape[1]),
        n,
    )


def _coded(module: fx.GraphModule, node: fx.Node) -> Signature | None:
    """Our own products with codes: with those of x, or of the weight alone, a byte or half of one each."""
    codes, scales = _constant(module, node.args[1]), _constant(module, node.args[2])
    if codes is None or scales is None:
        return None
    halves = codes.dtype == torch.uint8
    n, k = int(codes.shape[0]), int(codes.shape[1]) * (2 if halves else 1)
    return (
        INT8_CHANNEL
        if node.args[3] is not None
        else (W4 if halves else W8).grouped_by(k // int(scales.shape[1])),
        k,
        n,
    )


def _sparse(module: fx.GraphModule, node: fx.Node) -> Signature | None:
    values, crow, col, ccol = (_constant(module, argument) for argument in node.args[1:5])
    if values is None or crow is None or col is None or ccol is None:
        return None
    block = values.shape[1]
    n, k = (len(crow) - 1) * block, (len(ccol) - 1) * block
    return pattern_format(BlockPattern.from_indices(n, k, block, crow, col).blocks(), block), k, n


def _sparse_bytes(module: fx.GraphModule, node: fx.Node) -> Signature | None:
    """Columns are those of x: the weight tells up to which it is not 0. None where it has more blocks than
    the operator says: one that is kept may be all 0, but nothing else is held.
    """
    held, scales = [_constant(module, each) for each in node.args[1:5]], _constant(module, node.args[5])
    block, kept = node.args[6:8]
    whole = scales is not None and all(each is not None for each in held)
    if not whole or not isinstance(block, int) or not isinstance(kept, int):
        return None
    assert scales is not None
    k, n = shape_of(node.args[0])[-1], int(scales.shape[0])  # type: ignore[arg-type]
    _, values = BlockPattern.from_dense(SparseCodes(*held).dense(n, k), block)  # type: ignore[arg-type]
    if len(values) > kept:
        return None
    return in_bytes(sparse_format(kept, (n // block) * (k // block), block)), k, n


def _two_of_four(module: fx.GraphModule, node: fx.Node) -> Signature | None:
    """By what is held: half of the values, beside their places (CUTLASS) or before them (cuSPARSELt, in
    16ths).
    """
    packed, meta, n = _constant(module, node.args[1]), _constant(module, node.args[2]), node.args[4]
    if packed is None or not isinstance(n, int):
        return None
    weights = 2 * packed.numel() if meta is not None else packed.numel() * 16 // 9
    return replace(TWO_OF_FOUR, bits=16), weights // n, n


def _embedding(module: fx.GraphModule, node: fx.Node) -> Signature | None:
    table = _constant(module, node.args[0])
    if table is None:
        return None
    held = _of_bytes(module, node) if table.dtype == torch.int8 else _FLOAT.get(table.dtype)
    return None if held is None else (held, int(table.shape[0]), int(table.shape[1]))


def _of_bytes(module: fx.GraphModule, node: fx.Node) -> WeightFormat | None:
    """By the scales that its rows are multiplied with: bf16 ones are of groups."""
    found: fx.Node = next(iter(next(iter(node.users)).users))
    while found.target is not aten.embedding.default:
        found = found.args[-1 if found.target is aten.mul.Tensor else 0]  # type: ignore[assignment]
    scales = _constant(module, found.args[0])
    if scales is None:
        return None
    return TABLE_INT8_GROUPS if scales.dtype == torch.bfloat16 else TABLE_INT8_ROWS


_READERS: dict[object, Callable[[fx.GraphModule, fx.Node], Signature | None]] = {
    aten.linear: _float_linear(1),
    aten.addmm: _float_linear(2, transposed=True),
    aten.mm: _float_linear(1, transposed=True),
    aten.matmul: _float_linear(1, transposed=True),
    torch.ops.mkldnn._linear_pointwise: _packed_float,
    torch.ops.onednn.qlinear_pointwise: _qlinear,
    aten._weight_int8pack_mm: _w8_channel,
    aten._weight_int4pack_mm_for_cpu: _w4,
    aten.embedding: _embedding,
    torch.ops.effcompile.block_sparse_linear: _sparse,
    torch.ops.effcompile.two_of_four_linear: _two_of_four,
    torch.ops.effcompile.quantized_linear: _coded,
    int8_linear: _int8_token,
    int13_linear: _int13_token,
    fp32_linear: _panels,
    int8_linear_residual: _int8_token,
    int8_mlp: functools.partial(_int8_token, at=5),
    bf16_linear: _halves,
    bf16_linear_residual: _halves,
    bf16_mlp: functools.partial(_halves, at=5),
    int8_sparse_linear: _sparse_bytes,
    group_linear: _groups,
}


#: The readers of the first linear of two.
_FIRST: dict[object, Callable[[fx.GraphModule, fx.Node], Signature | None]] = {
    int8_mlp: _int8_token,
    bf16_mlp: _halves,
}

#: Chains between the products as one operator each.
_ROWS = tuple(
    getattr(torch.ops.effcompile, name) for name in ("rms_norm", "rms_norm_alone", "swiglu", "rotary")
)


#: Operators that may have taken in what follows them.
_FOLLOWED = (
    fp32_linear, bf16_linear, bf16_mlp, int8_linear, int13_linear, int8_mlp, int8_sparse_linear, group_linear
)  # fmt: skip


def _gelus(module: fx.GraphModule) -> dict[str, Form]:
    taken: Counter[str] = Counter()
    found = {}
    for node in module.graph.nodes:
        fused = packet(node) in _FOLLOWED and str(argument(node, "after")).startswith("gelu")
        if fused or node.target is aten.gelu.default:
            name = f"{node.meta[FOLLOWED] if fused else module_path(node) or node.name}:gelu"
            taken[name] += 1
            name = name if taken[name] == 1 else f"{name}#{taken[name]}"
            tanh = "tanh" in str(argument(node, "after" if fused else "approximate"))
            found[name] = Form(word="tanh" if tanh else "erf")
    return found


def _structure(program: Program, found: Mapping[str, Form]) -> dict[str, Form]:
    """Sites that are a shape of the graph: norms after sums, and rows of the logits, with the format of the
    head.
    """
    result = {site.site: Form(word="split") for site in add_norms(program)}
    for node in program.graph.nodes:
        if (key := SITE if node.target is add_layer_norm.default else NORM) in node.meta:
            split = node.target is aten.layer_norm.default
            result[node.meta[key]] = Form(word="split" if split else "fused")
    for site in linears(program):
        if f"{site.site}:rows" in program.tags:
            last = site.x.target in _ROWS_LAST
            result[f"{site.site}:rows"] = (
                Form(word="last", weights=found[site.site].weights) if last else Form(word="all")
            )
    return result
