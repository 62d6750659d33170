"""Finds the places in a captured graph where there is something to decide.

Passes propose there and backends act there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from effcompile.ir.formats import BF16, FP32, WeightFormat
from effcompile.ir.program import Program, module_path, shape_of
from effcompile.sites.attention.normalise import EAGER, OUR_ATTENTIONS

aten = torch.ops.aten
#: In the name of an attention that stands in no submodule: its node is called otherwise once another form
#: stands there.
ROOT = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSite:
    """`y = x @ Wᵀ + b` with a constant weight.

    `transposed` means that the weight is stored (K, N), as HF's Conv1D and `x @ W` do; else (N, K).
    `m` = rows of x at the example inputs; `shared` = the weight has readers other than this node (tied
    embeddings).
    """

    site: str
    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool
    m: int
    k: int
    n: int
    shared: bool

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.m, self.k, self.n


def weight_of(program: Program, site: LinearSite) -> torch.Tensor:
    """(N, K), however it is stored."""
    value = program.tensor(site.weight)
    assert value is not None
    return value.detach().T if site.transposed else value.detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSite:
    """A table lookup. `rows` = looked-up rows at the example inputs."""

    site: str
    node: fx.Node
    weight: fx.Node
    rows: int
    count: int
    width: int
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSite:
    """One attention on q_BHSD, k_BHSD, v_BHSD: aten's `scaled_dot_product_attention`, or our operator for
    what that cannot say.

    Attributes:
        dims: (B, H, Sq, Sk, D).
        key_heads: of k and v.
        mask: what the node reads of a mask or bias, dense. causal: it hides later keys by itself.
        ours: the node is (the first result of) `effcompile::attention`, for softcap, sinks or a mask in
            closed form.
        eager: the model writes it as separate operators.
        sink: every row has one more logit, without a value.
    """

    site: str
    node: fx.Node
    dims: tuple[int, int, int, int, int]
    key_heads: int
    mask: fx.Node | None
    causal: bool
    ours: bool = False
    eager: bool = False
    sink: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AddNormSite:
    """A LayerNorm whose input is a residual sum."""

    site: str
    node: fx.Node
    add: fx.Node
    rows: int
    cols: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GeluSite:
    """An exact (erf) GELU over `elements`."""

    site: str
    node: fx.Node
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSite:
    """Linears that read the same input and can be computed as one with their weights stacked along N."""

    site: str
    members: tuple[LinearSite, ...]

    @property
    def merged_site(self) -> str:
        """Name of the linear that the merge makes: `attn.query_key_value`."""
        parent = self.site.removesuffix(":merge")
        leaves = "_".join(member.site.rpartition(".")[2] for member in self.members)
        return f"{parent}.{leaves}" if parent else leaves


#: A site that is one node of the graph.
Site = LinearSite | EmbeddingSite | AttentionSite | AddNormSite | GeluSite


def linears(program: Program) -> list[LinearSite]:
    """All linears with a constant weight, in graph order, uniquely named after their modules."""
    names = _Names()
    found = []
    for node in program.calls(aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default):
        site = _linear(program, node, names)
        if site is not None:
            found.append(site)
    return found


def stored_format(program: Program) -> WeightFormat:
    """What the model's own linears are held in: BF16 stands for 16 bits of either kind."""
    weights = [program.tensor(site.weight) for site in linears(program)]
    return BF16 if weights and all(w is not None and w.element_size() == 2 for w in weights) else FP32


def embeddings(program: Program) -> list[EmbeddingSite]:
    """All `aten.embedding` lookups in a constant table of floats."""
    names, found = _Names(), []
    for node in program.calls(aten.embedding.default):
        weight = _node(node.args[0])
        table = program.tensor(weight)
        if weight is None or table is None:
            continue
        found.append(
            EmbeddingSite(
                site=names.take(_name_of(node, weight)),
                node=node,
                weight=weight,
                rows=math.prod(shape_of(node)[:-1]),
                count=table.shape[0],
                width=table.shape[1],
                shared=len(weight.users) > 1,
            )
        )
    return found


def attentions(program: Program) -> list[AttentionSite]:
    """All attentions that are one node, `aten.scaled_dot_product_attention` without dropout or one of ours,
    on 4-D tensors.
    """
    names, found = _Names(), []
    sdpa, ours = aten.scaled_dot_product_attention.default, OUR_ATTENTIONS[0]
    for node in program.calls(sdpa, *OUR_ATTENTIONS):
        q, k = _node(node.args[0]), _node(node.args[1])
        assert q is not None and k is not None
        q_shape, k_shape = shape_of(q), shape_of(k)
        if len(q_shape) != 4 or len(k_shape) != 4 or (node.target is sdpa and argument(node, "dropout_p")):
            continue
        b, h, sq, d = q_shape
        found.append(
            AttentionSite(
                site=names.take(f"{module_path(node) or ROOT}:attention"),
                node=node,
                dims=(b, h, sq, k_shape[2], d),
                key_heads=k_shape[1],
                mask=_mask_of(node),
                causal=node.target is sdpa and bool(argument(node, "is_causal")),
                ours=node.target is not sdpa,
                eager=bool(node.meta.get(EAGER)),
                sink=node.target is ours and argument(node, "sink") is not None,
            )
        )
    return found


def _mask_of(node: fx.Node) -> fx.Node | None:
    """The dense mask, or the bias, that an attention reads."""
    names = {p.name for p in node.target._schema.arguments} & {"attn_mask", "mask", "bias"}  # type: ignore[union-attr]
    read = [
        value for name in sorted(names, reverse=True) if (value := _node(argument(node, name))) is not None
    ]
    return read[0] if read else None


def add_norms(program: Program) -> list[AddNormSite]:
    """LayerNorms over the last axis that follow a sum of two equally shaped tensors."""
    names, found = _Names(), []
    for node in program.calls(aten.layer_norm.default):
        add = _node(node.args[0])
        if add is None or add.target is not aten.add.Tensor or not _same_shapes(add) or add.kwargs:
            continue
        *rows, cols = shape_of(node)
        found.append(
            AddNormSite(
                site=names.take(f"{module_path(node) or node.name}:add_norm"),
                node=node,
                add=add,
                rows=math.prod(rows),
                cols=cols,
            )
        )
    return found


def gelus(program: Program) -> list[GeluSite]:
    """Exact GELUs (`approximate="none"`)."""
    names, found = _Names(), []
    for node in program.calls(aten.gelu.default):
        if argument(node, "approximate") == "none":
            site = names.take(f"{module_path(node) or node.name}:gelu")
            found.append(GeluSite(site=site, node=node, elements=math.prod(shape_of(node))))
    return found


def merges(program: Program, sites: Iterable[LinearSite] | None = None) -> list[MergeSite]:
    """Groups of two or more linears that read the same input, have the same storage order and unshared
    weights.
    """
    groups: dict[tuple[fx.Node, bool], list[LinearSite]] = defaultdict(list)
    for site in linears(program) if sites is None else sites:
        if not site.shared and "#" not in site.site:
            groups[site.x, site.transposed].append(site)
    names = _Names()
    return [
        MergeSite(
            site=names.take(f"{common_parent([m.site for m in members])}:merge"), members=tuple(members)
        )
        for members in groups.values()
        if len(members) > 1
    ]


def logits(program: Program) -> LinearSite | None:
    """The linear that makes per-position logits: (B, S, N) straight to the output with N larger than K."""
    outputs = next(n for n in program.graph.nodes if n.op == "output").all_input_nodes
    for site in linears(program):
        if (
            site.node in outputs
            and len(shape_of(site.node)) == 3
            and site.n > site.k
            and len(site.node.users) == 1
        ):
            return site
    return None


def argument(node: fx.Node, name: str) -> object:
    """An operator's argument by schema name, wherever it was passed, or its default.

    Raises:
        KeyError: the operator has no such argument.
    """
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    for position, parameter in enumerate(schema):
        if parameter.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            return node.args[position] if position < len(node.args) else parameter.default_value
    raise KeyError(name)


class _Names:
    """Hands out unique names: the second taker of `a` gets `a#2`."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = defaultdict(int)

    def take(self, name: str) -> str:
        self._taken[name] += 1
        return name if self._taken[name] == 1 else f"{name}#{self._taken[name]}"


def _linear(program: Program, node: fx.Node, names: _Names) -> LinearSite | None:
    operands = _operands(node)
    if operands is None:
        return None
    x, weight, bias, transposed = operands
    value = program.tensor(weight)
    if value is None or value.dim() != 2 or not value.is_floating_point() or program.tensor(x) is not None:
        return None
    n, k = value.shape[::-1] if transposed else value.shape
    rows = shape_of(x)[:-1]
    return LinearSite(
        site=names.take(_name_of(node, weight)),
        node=node,
        x=x,
        weight=weight,
        bias=bias,
        transposed=transposed,
        m=math.prod(rows),
        k=k,
        n=n,
        shared=len(weight.users) > 1,
    )


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, bool] | None:
    """(x, weight, bias, weight stored (K, N)); None for a product that is no linear."""
    args = [_node(a) for a in node.args]
    if node.target is aten.linear.default and args[0] is not None and args[1] is not None:
        return args[0], args[1], args[2] if len(args) > 2 else None, False
    if node.target is aten.addmm.default and not node.kwargs:
        bias, x, weight = args
        plain_bias = bias is not None and len(shape_of(bias)) <= 1
        return (x, weight, bias, True) if x is not None and weight is not None and plain_bias else None
    if node.target in (aten.mm.default, aten.matmul.default):
        return (args[0], args[1], None, True) if args[0] is not None and args[1] is not None else None
    return None


def _name_of(node: fx.Node, weight: fx.Node) -> str:
    """The module that runs the node where it owns or ties the weight, else the weight's own name."""
    owner = str(weight.target).rpartition(".")[0]
    path = module_path(node)
    leaf_is_linear = path and (owner == path or not owner.startswith(f"{path}."))
    return path if leaf_is_linear else (owner or str(weight.target))


def common_parent(names: Sequence[str]) -> str:
    """The innermost module that all of these are in; "" for the model."""
    split = [name.split(".")[:-1] for name in names]
    parent = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        parent.append(parts[0])
    return ".".join(parent)


def _same_shapes(add: fx.Node) -> bool:
    operands = [_node(a) for a in add.args[:2]]
    shapes = {shape_of(o) for o in operands if o is not None}
    return None not in operands and len(shapes) == 1 and not add.kwargs


def _node(value: object) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None
