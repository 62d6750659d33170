"""Carries out the tags on the graph: each tagged site becomes the operators of its option, nothing else
changes.

The result is plain torch.fx with plain weights (s8, bf16, …) and explicit packing operators: it can be
exported and saved. `pack.py` folds the packing for eager execution, Inductor's freezing for compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from effcompile.backends.torch import numerics
from effcompile.backends.torch.calibrate import Codings, Range, activation_ranges
from effcompile.backends.torch.chains import fuse_chains, narrow_projections
from effcompile.backends.torch.edit_attentions import SITE, edit_attentions, inlined
from effcompile.backends.torch.followers import FOLLOWS, fuse_followers
from effcompile.backends.torch.packed_before import packed_as
from effcompile.backends.torch.packing import packing
from effcompile.backends.torch.tidy import tidy, without_flattening
from effcompile.core import torch_compat
from effcompile.core.errors import LoweringError
from effcompile.ir.formats import FP32, INT8_GROUPS, INT8_STATIC, INT13_TOKEN, TWO_OF_FOUR, WeightFormat
from effcompile.ir.program import Program, dtype_of, shape_of
from effcompile.ops import bf16_linear, group_codes, int13_codes, two_of_four
from effcompile.ops.add_norm import add_layer_norm
from effcompile.ops.block_sparse import block_sparse_linear as _registers  # noqa: F401 - the operator that is emitted
from effcompile.ops.byte_codings import Coding
from effcompile.ops.fp32_linear import fp32_linear, fp32_pack
from effcompile.ops.group_linear import group_linear
from effcompile.ops.int8_codes import pack
from effcompile.ops.int8_linear import int8_linear
from effcompile.ops.int8_sparse import int8_sparse_linear
from effcompile.ops.int13_linear import int13_linear
from effcompile.ops.sparse_codes import SparseCodes
from effcompile.sites.parts import LinearSite, add_norms, argument, embeddings, linears
from effcompile.sparse.pattern import BlockPattern

aten = torch.ops.aten
#: Arguments of a oneDNN linear without a fused element-wise function. (The list may not be empty:
#: torch.export cannot save it.)
_NO_POST_OP = ("none", [None], "")


def edit(
    program: Program, calibration: Sequence[Sequence[torch.Tensor]], *, compiled: bool = False
) -> Program:
    """The program with its tags carried out on linears, embeddings and attentions.

    Args:
        program: captured, edited by passes, with tags.
        calibration: flat inputs; read only where a linear is `int8_static`.
        compiled: Inductor generates code for it.

    Raises:
        LoweringError: an option that this torch cannot run at that site, or no calibration inputs for
            `int8_static`.
    """
    torch_compat.allow_tracing_packing()
    edited = program.editable("torch")
    tidy(edited.module)
    sites = linears(edited)
    static = {s.x for s in sites if program.format_at(s.site) == INT8_STATIC}
    codings = Codings(program, calibration)
    editor = _Editor(edited, activation_ranges(edited, static, calibration), codings, compiled=compiled)
    for site in sites:
        editor.linear(site, program.format_at(site.site))
    without_flattening(edited.graph, FOLLOWS)
    fuse_followers(edited)
    _edit_embeddings(edited, editor)
    edit_attentions(edited)
    _edit_norms(edited)
    edited.graph.eliminate_dead_code()
    fuse_chains(edited)
    narrow_projections(edited)
    edited.graph.lint()
    # only what the graph reads
    lean = fx.GraphModule(edited.module, edited.graph, class_name=type(edited.module).__name__)
    lean.meta = edited.module.meta
    return replace(edited, module=lean)


def _edit_norms(program: Program) -> None:
    """`fused`: a residual sum and its LayerNorm as one operator; the sum stays where others read it."""
    for site in add_norms(program):
        if program.word_at(site.site) == "fused":
            settings = tuple(argument(site.node, name) for name in ("weight", "bias", "eps"))
            site.node.target, site.node.kwargs = add_layer_norm.default, {}
            site.node.args = (*site.add.args[:2], *settings)  # type: ignore[arg-type]
            site.node.meta[SITE] = site.site


class _Editor:
    """Replaces linears one by one; an input that several of them read is quantised once."""

    def __init__(
        self, program: Program, ranges: Mapping[fx.Node, Range], codings: Codings, *, compiled: bool
    ) -> None:
        self.program, self.graph, self.ranges = program, program.graph, dict(ranges)
        self.codings, self.compiled = codings, compiled
        # what a linear was → what it is now, which further linears read
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._quantized: dict[tuple[fx.Node, str], tuple[object, ...]] = {}
        self._zeros: dict[int, fx.Node] = {}
        self._count = 0

    def linear(self, site: LinearSite, held: WeightFormat) -> None:
        site = replace(site, x=self._replaced.get(site.x, site.x))
        stored = self.program.tensor(site.weight)
        assert stored is not None
        refusal = _refusal(site, stored, held)
        if refusal is not None:
            raise LoweringError(
                f"Cannot run {site.site} as {held.name}: {refusal}. Plan again on this "
                "machine, or with another backend."
            )
        weight = (stored.t() if site.transposed else stored).detach()  # (N, K)
        dtype = dtype_of(site.node)
        wide = dtype == torch.float64 and held != FP32 and not held.block
        cores = held.family == TWO_OF_FOUR.family and two_of_four.no_cores(stored.device) is None
        with self.graph.inserting_before(site.node):
            if wide and site.bias is not None:
                site = replace(site, bias=self.call(None, aten.to.dtype, site.bias, torch.float32))
            if cores:
                result = _two_of_four(self, site, weight)
            else:
                result = (
                    _sparse(self, site, weight, held)
                    if held.block
                    else _EMITTERS[held.family](self, site, weight, held)
                )
            rounded = result is not site.node and held != FP32 and not held.block  # such products make fp32
            if rounded and dtype is not None and dtype != torch.float32:
                result = self.call(None, aten.to.dtype, result, dtype)
        if result is not site.node:
            result.meta = {**site.node.meta, **result.meta}
            site.node.replace_all_uses_with(result)
            self.graph.erase_node(site.node)
            self._replaced[site.node] = result
            if site.node in self.ranges:
                self.ranges[result] = self.ranges[site.node]

    def constant(self, value: torch.Tensor) -> fx.Node:
        """A new buffer of the program's module, and the node that reads it."""
        name = f"_constant_{self._count}"
        self._count += 1
        self.program.module.register_buffer(name, value)
        return self.graph.get_attr(name)

    def zeros(self, count: int) -> fx.Node:
        """So many zero points, held once."""
        if count not in self._zeros:
            self._zeros[count] = self.constant(torch.zeros(count, dtype=torch.int32))
        return self.graph.get_attr(str(self._zeros[count].target))

    def call(self, site: LinearSite | None, target: Callable[..., object], *args: object) -> fx.Node:
        node = self.graph.call_function(target, args)  # type: ignore[arg-type]
        if site is not None:
            node.meta[SITE] = site.site
        return node

    def inline(self, function: Callable[..., object], *args: object) -> tuple[object, ...]:
        result = inlined(self.graph, function, *args)
        return result if isinstance(result, tuple) else (result,)

    def quantized(self, x: fx.Node, kind: str) -> tuple[object, ...]:
        """(u8 node, scale, zero) of an activation, shared by all its readers."""
        if (x, kind) not in self._quantized:
            if kind == INT8_STATIC.activation:
                scale, zero = self.ranges[x]
                # numbers would stand in the code, which is compiled once for each layer then, and not for all
                apart = self.compiled and dtype_of(x) == torch.float32
                held = [
                    self.constant(torch.full(shape_of(x)[-1:], value, dtype=dtype_of(x))) if apart else value
                    for value in (1.0 / scale, float(zero))
                ]
                self._quantized[x, kind] = (*self.inline(numerics.quantize_with, x, *held), scale, zero)
            else:
                self._quantized[x, kind] = self.inline(numerics.quantize_dynamic, x)
        return self._quantized[x, kind]

    def bf16(self, x: fx.Node) -> fx.Node:
        if (x, "bf16") not in self._quantized:
            self._quantized[x, "bf16"] = (self.call(None, aten.to.dtype, x, torch.bfloat16),)
        node = self._quantized[x, "bf16"][0]
        assert isinstance(node, fx.Node)
        return node


def _refusal(site: LinearSite, weight: torch.Tensor, held: WeightFormat) -> str | None:
    """None, or why a linear cannot be carried out so, where its weight lies."""
    cores = two_of_four.no_cores(weight.device) if held.family == TWO_OF_FOUR.family else ""
    if cores is None:
        misfit = two_of_four.misfit(_half(weight), site.n, site.k)
        return None if misfit is None else str(misfit)
    if weight.device.type == "cpu":
        reason = None if held.block else numerics.why_not(held, *site.dims) or numerics.not_here(held)
        return None if reason is None else str(reason)
    ours = held.activation == INT13_TOKEN.activation
    if (held.bits < 16 or held.block or ours) and held.activation != INT8_GROUPS.activation:
        return cores or f"the weight is on {weight.device}, and this form is implemented for CPU"
    return None


def _half(weight: torch.Tensor) -> torch.dtype:
    """The 16-bit dtype that a weight is multiplied in."""
    return weight.dtype if weight.dtype in two_of_four.DTYPES else torch.bfloat16


def _fp32(editor: _Editor, site: LinearSite, weight: torch.Tensor, held: WeightFormat) -> fx.Node:
    site.node.meta[SITE] = site.site
    fits = weight.dtype == torch.float32 == dtype_of(site.x) and weight.device.type == "cpu"
    way = packing(*site.dims, ours=not editor.compiled) if fits else "none"
    if way == "none":
        return site.node
    plain = site.weight if not site.transposed else editor.constant(weight.contiguous())
    if way == "oneDNN":
        return _packed_float(editor, site, site.x, plain, site.bias)
    return _ours(editor, site, fp32_linear.default, editor.call(None, fp32_pack.default, plain), site.n)


def _bf16(editor: _Editor, site: LinearSite, weight: torch.Tensor, held: WeightFormat) -> fx.Node:
    on_cpu = weight.device.type == "cpu"
    if not on_cpu and weight.dtype in two_of_four.DTYPES:
        # a model in 16 bits is there already; its graph wants results in its own
        site.node.meta[SITE] = site.site
        return site.node
    ours = on_cpu and not editor.compiled and bf16_linear.multiplies(site.m)
    if ours and dtype_of(site.x) == torch.float32:
        held_as = packed_as(site.site, held, weight, lambda: (bf16_linear.pack(weight),))
        return _ours(editor, site, bf16_linear.bf16_linear.default, *map(editor.constant, held_as), site.n)
    narrow = editor.constant(weight.to(torch.bfloat16).contiguous())
    x = editor.bf16(site.x)
    y = (
        _packed_float(editor, site, x, narrow, None)
        if on_cpu and torch_compat.has_onednn_bf16()
        else editor.call(site, aten.linear.default, x, narrow)
    )
    return _in_fp32(editor, y, site.bias)


def _in_fp32(editor: _Editor, y: fx.Node, bias: fx.Node | None) -> fx.Node:
    """The bias is added in fp32: it is not rounded to bf16, and Inductor fuses the sum with what follows."""
    y = editor.call(None, aten.to.dtype, y, torch.float32)
    return y if bias is None else editor.call(None, aten.add.Tensor, y, bias)


def _packed_float(
    editor: _Editor, site: LinearSite, x: fx.Node, weight: fx.Node, bias: fx.Node | None
) -> fx.Node:
    packed = editor.call(None, torch.ops.mkldnn._reorder_linear_weight.default, weight, site.m)
    product = torch.ops.mkldnn._linear_pointwise.default
    return _on_rows(
        editor, site, x, lambda rows: editor.call(site, product, rows, packed, bias, *_NO_POST_OP)
    )


def _on_rows(editor: _Editor, site: LinearSite, x: fx.Node, product: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """The product of x as a matrix, in x's leading shape.

    Weight-only products take matrices only. For oneDNN's the reshape matters to Inductor (2.11-2.13): it
    takes a sum right after the product for a bias and then asserts that the weight was packed by itself.
    """
    axes = len(shape_of(site.x)) - 1
    if axes == 1:
        return product(x)
    rows = editor.call(None, aten.reshape.default, x, [-1, site.k])
    leading = [editor.call(None, aten.sym_size.int, site.x, axis) for axis in range(axes)]
    return editor.call(None, aten.reshape.default, product(rows), [*leading, site.n])


def _int8(editor: _Editor, site: LinearSite, weight: torch.Tensor, held: WeightFormat) -> fx.Node:
    x = editor.quantized(site.x, held.activation)
    q, scale = numerics.quantize_weight(weight, per_channel=held.scale == "channel")
    packed = editor.call(None, torch.ops.onednn.qlinear_prepack.default, editor.constant(q), None)
    zeros = editor.zeros(scale.numel())
    qlinear = torch.ops.onednn.qlinear_pointwise
    target = qlinear.default if isinstance(x[1], float) else qlinear.tensor
    tail: tuple[object, ...] = (site.bias, 1.0, 0, torch.float32, *_NO_POST_OP)
    return editor.call(site, target, *x, packed, editor.constant(scale), zeros, *tail)


def _int8_token(editor: _Editor, site: LinearSite, weight: torch.Tensor, held: WeightFormat) -> fx.Node:
    """Ours, which quantises x itself; nothing but fp32 goes in."""
    made = packed_as(site.site, held, weight, lambda: _in_bytes(weight, editor.codings(site.site)))
    packed, scales, *correction = made
    constants = editor.constant(packed), editor.constant(scales)
    return _ours(editor, site, int8_linear.default, *constants, correction=correction)


def _in_bytes(weight: torch.Tensor, how: Coding | None) -> tuple[torch.Tensor, ...]:
    """Packed codes, scales (N) and, if it is known how x is, what the bias has more (N)."""
    wide = weight.float()
    codes, scales = numerics.quantize_rows(wide if how is None else how.weight(wide))
    if how is None:
        return pack(codes), scales.flatten()
    return pack(codes, how.columns), scales.flatten(), how.correction(wide, codes * scales)


def _int13_token(editor: _Editor, site: LinearSite, weight: torch.Tensor, held: WeightFormat) -> fx.Node:
    """The same in words."""
    codes, scales = int13_codes.quantize(weight)
    held_as = editor.constant(int13_codes.pack(codes)), editor.constant(scales)
    return _ours(editor, site, int13_linear.default, *held_as)


def _groups(editor: _Editor, site: LinearSite, weight: torch.Tensor, held: WeightFormat) -> fx.Node:
    """The same with a scale for each group of both."""
    bits = held.bits
    made = packed_as(
        site.site, held, weight, lambda: (group_codes.pack(*group_codes.quantize(weight, bits), bits),)
    )
    return _ours(editor, site, group_linear.default, *map(editor.constant, made), site.n)


def _ours(
    editor: _Editor, site: LinearSite, product: Callable[..., object], *weight: object,
    correction: Sequence[torch.Tensor] = (),
) -> fx.Node:  # fmt: skip
    """`correction`: what its bias has more, if anything."""
    x = (
        site.x
        if dtype_of(site.x) == torch.float32
        else editor.call(None, aten.to.dtype, site.x, torch.float32)
    )
    whole = site.bias is None or (shape_of(site.bias), dtype_of(site.bias)) == ((site.n,), torch.float32)
    bias = site.bias if whole else None
    for more in correction:
        known = None if bias is None else editor.program.tensor(bias)
        whole = whole and (bias is None or known is not None)
        bias = editor.constant(more if known is None else more + known.detach())
    y = editor.call(site, product, x, *weight, bias)
    return y if whole else editor.call(None, aten.add.Tensor, y, site.bias)


def _w8_channel(editor: _Editor, site: LinearSite, weight: torch.Tensor, held: WeightFormat) -> fx.Node:
    q, scale = numerics.quantize_w8(weight)
    return _weight_only(
        editor, site, aten._weight_int8pack_mm.default, editor.constant(q), editor.constant(scale)
    )


def _w4(editor: _Editor, site: LinearSite, weight: torch.Tensor, held: WeightFormat) -> fx.Node:
    nibbles, scales = numerics.quantize_w4(weight, held.group)
    return _weight_only(
        editor,
        site,
        aten._weight_int4pack_mm_for_cpu.default,
        editor.constant(nibbles),
        held.group,
        editor.constant(scales),
    )


def _weight_only(
    editor: _Editor, site: LinearSite, product: Callable[..., object], *operands: object
) -> fx.Node:
    """In bf16, of rows that lie one after the other: torch's kernels take no others, and neither x nor a cast
    or view of it need be so.
    """

    def of_rows(x: fx.Node) -> fx.Node:
        return editor.call(site, product, editor.call(None, aten.contiguous.default, x), *operands)

    return _in_fp32(editor, _on_rows(editor, site, editor.bf16(site.x), of_rows), site.bias)


def _sparse(editor: _Editor, site: LinearSite, weight: torch.Tensor, held: WeightFormat) -> fx.Node:
    """The blocks of the weight that are not all 0, and where they are, as constants."""
    if held.bits == 8:
        return _sparse_bytes(editor, site, weight, held)
    pattern, values = BlockPattern.from_dense(weight, held.block)
    constants = [editor.constant(tensor) for tensor in (values, *pattern.indices)]
    whole = site.bias is None or shape_of(site.bias) == (site.n,)
    y = editor.call(
        site,
        torch.ops.effcompile.block_sparse_linear.default,
        site.x,
        *constants,
        site.bias if whole else None,
    )
    return y if whole else editor.call(None, aten.add.Tensor, y, site.bias)


def _sparse_bytes(editor: _Editor, site: LinearSite, weight: torch.Tensor, held: WeightFormat) -> fx.Node:
    codes, scales = numerics.quantize_rows(weight)
    tensors = (*SparseCodes.of(codes).tensors, scales.flatten())
    blocks = (site.n // held.block) * (site.k // held.block)
    pattern = (held.block, round(held.density * blocks))
    return _ours(editor, site, int8_sparse_linear.default, *map(editor.constant, tensors), *pattern)


def _two_of_four(editor: _Editor, site: LinearSite, weight: torch.Tensor) -> fx.Node:
    """On sparse tensor cores, in the weight's 16-bit dtype, or in bf16 for a model in fp32."""
    packed, meta = two_of_four.compress(weight.to(_half(weight)))
    constants = editor.constant(packed), None if meta is None else editor.constant(meta)
    target = torch.ops.effcompile.two_of_four_linear.default
    if weight.dtype not in two_of_four.DTYPES:
        return _in_fp32(
            editor, editor.call(site, target, editor.bf16(site.x), *constants, None, site.n), site.bias
        )
    whole = site.bias is None or shape_of(site.bias) == (site.n,)
    y = editor.call(site, target, site.x, *constants, site.bias if whole else None, site.n)
    return y if whole else editor.call(None, aten.add.Tensor, y, site.bias)


_EMITTERS: dict[str, Callable[[_Editor, LinearSite, torch.Tensor, WeightFormat], fx.Node]] = {
    "fp32": _fp32,
    "bf16": _bf16,
    "int8_dynamic": _int8,
    "int8_channel": _int8,
    "int8_token": _int8_token,
    "int13_token": _int13_token,
    "int8_static": _int8,
    "w8_channel": _w8_channel,
    "w4": _w4,
    "int8_groups": _groups,
    "int4_groups": _groups,
}


def _edit_embeddings(program: Program, editor: _Editor) -> None:
    for site in embeddings(program):
        site.node.meta[SITE] = site.site
        table = program.tensor(site.weight)
        if table is None or (coded := numerics.coded_table(table, program.format_at(site.site))) is None:
            continue
        weight, scale, look_up = coded
        with program.graph.inserting_before(site.node):
            nodes = editor.constant(weight), editor.constant(scale)
            (rows,) = editor.inline(look_up, *nodes, site.node.args[1])
            if table.dtype != torch.float32:
                rows = editor.call(None, aten.to.dtype, rows, table.dtype)
        assert isinstance(rows, fx.Node)
        next(u for u in nodes[0].users).meta[SITE] = site.site
        rows.meta = {**site.node.meta, **rows.meta}
        del rows.meta[SITE]
        site.node.replace_all_uses_with(rows)
        program.graph.erase_node(site.node)
