"""The conditions of a mask, put in their places by the axes along which they vary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from effcompile.core.mask import Edge
from effcompile.ir.program import Program
from effcompile.ops.visibility import recover
from effcompile.sites.attention.mask.evaluate import ancestors, evaluate, reads, sized_variants
from effcompile.sites.attention.mask.fit_bands import Sample, UnfittedError, fitted
from effcompile.sites.attention.mask.graph_mask import GraphMask, MaskGuard
from effcompile.sites.attention.mask.mask_guards import fills_only, no_longer_than, only_zero_one
from effcompile.sites.attention.mask.mask_terms import MaskLeaf, MaskTerms, is_flag
from effcompile.sites.attention.mask.node_expressions import (
    KEY,
    QUERY,
    Expression,
    along,
    tested,
    varies,
    whole,
)

aten = torch.ops.aten
#: No mask longer than this is computed to fit a closed form to it.
_LONGEST = 4096
Shapes = Mapping[fx.Node, Sequence[Sequence[int]]]
_BATCH = -4


def assembled(program: Program, terms: MaskTerms) -> GraphMask:
    """The mask that the terms make; its counts and texts are still to be filled in.

    Raises:
        UnfittedError: nothing tells which axes are broadcast, or the terms are not to be had in one form.
    """
    parts = _Parts(program=program, shapes=_shapes(program, terms))
    parts.edges += [(_fixed(band.lo), _fixed(band.hi)) for band in terms.bands]
    parts.chunks |= set(terms.chunks)
    for left, right, leaf in terms.pairs:
        if not parts.identified(left, right):
            parts.place(leaf)
    for leaf in terms.leaves:
        parts.place(leaf)
    parts.place_hidden_queries()
    if len(parts.chunks) > 1:
        raise UnfittedError("chunks of {} at once", sorted(parts.chunks))
    parts.guards += [only_zero_one(program, node) for node in terms.zero_one if not is_flag(node)]
    kept = [leaf.node for leaf in terms.leaves if leaf.test == "kept" and leaf.node not in terms.biases]
    parts.guards += [fills_only(program, node) for node in kept if reads(node)]
    return GraphMask(
        lo=_tightest([lo for lo, _ in parts.edges], max),
        hi=_tightest([hi for _, hi in parts.edges], min),
        chunk=max(parts.chunks, default=0),
        valid=tuple(parts.valid) or None,
        q_ids=parts.q_ids,
        k_ids=parts.k_ids,
        mask=tuple(parts.dense) or None,
        biases=tuple(terms.biases),
        guards=tuple(parts.guards),
        counts={},
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Parts:
    """The fields of a GraphMask in the making."""

    program: Program
    shapes: Shapes
    edges: list[tuple[Edge | None, Edge | None]] = field(default_factory=list)
    chunks: set[int] = field(default_factory=set)
    valid: list[Expression] = field(default_factory=list)
    queries: list[MaskLeaf] = field(default_factory=list)
    dense: list[Expression] = field(default_factory=list)
    guards: list[MaskGuard] = field(default_factory=list)
    q_ids: Expression | None = None
    k_ids: Expression | None = None

    def identified(self, left: fx.Node, right: fx.Node) -> bool:
        """Documents: one side varies with the query, the other with the key.

        Only one pair of ids has a place.
        """
        for q, k in ((left, right), (right, left)):
            by_query, by_key = (
                varies(self.shapes[n]) - {_BATCH} == {axis} for n, axis in ((q, QUERY), (k, KEY))
            )
            if self.q_ids is None and by_query and by_key:
                self.q_ids, self.k_ids = (
                    self._along(Expression(node=q), QUERY),
                    self._along(Expression(node=k), KEY),
                )
                return True
        return False

    def place(self, leaf: MaskLeaf) -> None:
        """Padding, hidden queries, a closed form of sizes alone, or dense."""
        axes = varies(self.shapes[leaf.node])
        if axes - {_BATCH} == {KEY}:
            self.valid.append(self._along(tested(leaf), KEY))
        elif axes - {_BATCH} == {QUERY}:
            self.queries.append(leaf)
        elif reads(leaf.node) or not self._fitted(leaf):
            self._place_densely(leaf)

    def place_hidden_queries(self) -> None:
        """valid[i] ∧ valid[j] as documents: hidden keys have id 1, hidden queries 2, all others 0.

        Else dense.
        """
        if len(self.queries) == 1 and len(self.valid) == 1 and self.q_ids is None:
            self.k_ids = _hidden(self.valid.pop(), 1)
            self.q_ids = _hidden(self._along(tested(self.queries.pop()), QUERY), 2)
        for leaf in self.queries:
            self._place_densely(leaf)

    def _place_densely(self, leaf: MaskLeaf) -> None:
        if leaf.test == "kept":
            raise UnfittedError("it is dense already, and of numbers: adding it costs what testing it would")
        self.dense.append(whole(tested(leaf), len(self.shapes[leaf.node][0])))

    def _along(self, expression: Expression, axis: int) -> Expression:
        return along(expression, axis, len(self.shapes[expression.node][0]))

    def _fitted(self, leaf: MaskLeaf) -> bool:
        """Evaluate what depends on sizes alone, beyond the largest number in its computation; a guard keeps
        to what was seen.

        False where no closed form holds at these sizes.
        """
        largest = max(
            (abs(a) for n in ancestors(leaf.node) for a in n.args if isinstance(a, int) and abs(a) < 1 << 31),
            default=0,
        )
        samples: list[Sample] = []
        seen: dict[str, int] = {}
        for variant in sized_variants(self.program, min(largest + largest // 2 + 2, _LONGEST)):
            mask = tested(leaf).of(evaluate(self.program, [leaf.node], variant.values)[leaf.node])
            q_len, k_len = mask.shape[-2:]
            samples.append(Sample(q_len=q_len, k_len=k_len, form=recover(mask)))
            inputs = (t for t in variant.values.values() if isinstance(t, Tensor))
            for spec, tensor in zip(self.program.inputs, inputs, strict=True):
                for dim, size in zip(spec.shape, tensor.shape, strict=True):
                    if isinstance(dim, str) and dim != "batch":
                        seen[dim] = max(seen.get(dim, 0), size)
        try:
            lo, hi, chunk = fitted(samples)
        except UnfittedError:
            return False
        self.edges.append((lo, hi))
        self.chunks |= {chunk} - {0}
        self.guards += [no_longer_than(self.program, seen)] if seen else []
        return True


def _shapes(program: Program, terms: MaskTerms) -> Shapes:
    """The shape of every node in the terms, at each size."""
    sized = sized_variants(program)
    if len(sized) == 1 and any(isinstance(dim, str) for spec in program.inputs for dim in spec.shape):
        raise UnfittedError(
            "no second size could be made of the example: a broadcast axis looks like one of length 1"
        )
    nodes = [leaf.node for leaf in terms.leaves] + [
        n for left, right, leaf in terms.pairs for n in (left, right, leaf.node)
    ]
    found: dict[fx.Node, list[Sequence[int]]] = {node: [] for node in nodes}
    for variant in sized if nodes else ():
        values = evaluate(program, nodes, variant.values)
        for node, shapes in found.items():
            shapes.append(tuple(values[node].shape))
    return found


def _hidden(seen: Expression, label: int) -> Expression:
    """0 where it is seen, else the label."""
    return seen.then(aten.logical_not.default).then(aten.mul.Tensor, label)


def _fixed(limit: int | None) -> Edge | None:
    return None if limit is None else Edge(offset=limit)


def _tightest(edges: Sequence[Edge | None], pick: Callable[[Iterable[int]], int]) -> Edge | None:
    """The limit that implies the others.

    Raises:
        UnfittedError: which one that is depends on the sizes.
    """
    limits = {edge for edge in edges if edge is not None}
    if len({edge.aligned for edge in limits}) > 1:
        raise UnfittedError("limits that count from the first key, and others that count from the last")
    return Edge(offset=pick(e.offset for e in limits), aligned=next(iter(limits)).aligned) if limits else None
