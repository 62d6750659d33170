"""How a loss follows from those of its micro-batches, read off a step at two batch sizes, operator by
operator.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core.torch_compat_aot import is_random
from effcompile.ir.program import ancestors, module_path, shape_of
from effcompile.ir.step import Step
from effcompile.passes.training.regrouped import regrouped
from effcompile.passes.training.step_edit import Refusal, operator_name

aten = torch.ops.aten

_SAME = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default,
    aten.alias.default, aten.detach.default, aten.contiguous.default, aten._to_copy.default, aten.neg.default,
    aten.squeeze.default, aten.squeeze.dim, aten.unsqueeze.default, operator.getitem,
)  # fmt: skip
#: What capture leaves out where it does nothing, as it may where a micro-batch is one example.
# of a copy, or of what needs none
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
ELIDED = (*VIEWS, aten.expand.default, aten.clone.default)
_TIMES = (aten.mul.Tensor, aten.mul.Scalar)
_OVER = (aten.div.Tensor, aten.div.Scalar)
_ADDED = (aten.add.Tensor, aten.sub.Tensor)
_JOINED = (aten.stack.default, aten.cat.default)
_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_MEANS = (aten.mean.default, aten.mean.dim)
_NLL = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
#: Of their tensor they read the dtype and the device, at most the shape.
_BLANK = tuple(
    getattr(aten, name).default
    for name in (
        "new_ones",
        "new_zeros",
        "new_full",
        "new_empty",
        "ones_like",
        "zeros_like",
        "full_like",
        "empty_like",
    )
)
#: Operators with an axis over which they mix values, and where it stands among their arguments.
_MIXES = {
    aten._softmax.default: 1, aten._log_softmax.default: 1, aten.cumsum.default: 1, aten.cumprod.default: 1,
    aten.logcumsumexp.default: 1, aten.cummax.default: 1, aten.cummin.default: 1, aten.sort.default: 1,
    aten.sort.stable: 1, aten.flip.default: 1, aten.roll.default: 2,
}  # fmt: skip
_MEAN, _SUM = 1, 2  # of losses' `reduction`


class AnotherGraph(Refusal):
    """A micro-batch is captured as other operators than the batch, so that nothing can be read
    off the two.
    """


@dataclass(frozen=True, slots=True)
class Rule:
    """How a value of the whole batch follows from its micro-batches: Σ factor · part, or Σ (nᵢ / Σ n) · part
    with counts nᵢ.

    `counted`: what is counted: labels, the label that is left out (or None), classes' weights (or None).
    """

    factor: float = 1.0
    counted: tuple[fx.Node, int | None, fx.Node | None] | None = None


def alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether two operators are one to a batch and its part."""
    return a.target == b.target or (a.target in VIEWS and b.target in VIEWS)


def made_from(loss: fx.Node) -> list[fx.Node]:
    """The operators that a value is made from, itself included, in graph order."""
    wanted = ancestors([loss])
    return [n for n in loss.graph.nodes if n in wanted and n.op == "call_function"]


class Separation:
    """Follows the batch through the forward, and the loss back up to where it sums over the batch."""

    def __init__(self, pairs: Mapping[fx.Node, fx.Node], count: int) -> None:
        self.pairs, self.count = pairs, count
        grown = {a: self._grown(a, b) for a, b in pairs.items()}
        # of values that grow with the batch: where
        self.axes = {a: axes for a, axes in grown.items() if axes}
        self.over: set[fx.Node] = set()  # values of the whole batch
        regroups = set(regrouped(list(pairs), self.axes))
        self.tail = set(regroups)  # those of them that the loss is known to be linear in, or not to follow
        for a, b in pairs.items():
            if (
                a not in self.axes
                and a.target not in _BLANK
                and any(arg in self.axes or arg in self.over for arg in a.all_input_nodes)
            ):
                self.over.add(a)
            if a.target in _MIXES and a not in regroups and self._mixed(a) & grown[a]:
                raise Refusal("{} at {} goes over the examples of the batch", operator_name(a), place_of(a))
            elided = a.target in ELIDED and not alike(a, b)  # b made what a is a copy or view of
            if (
                not elided
                and not (a in self.over and a.target in (*_TIMES, *_OVER))
                and repr(_numbers(a)) != repr(_numbers(b))
            ):
                raise Refusal("{} at {} computes with the size of the batch", operator_name(a), place_of(a))

    def _mixed(self, node: fx.Node) -> set[int]:
        """The axes over which one of _MIXES mixes values."""
        place, rank = _MIXES[node.target], max(1, len(shape_of(node.all_input_nodes[0])))  # type: ignore[index]
        usual: Any = range(rank) if node.target is aten.roll.default else -1  # as rolled when flat, as sorted
        axes = node.args[place] if len(node.args) > place else node.kwargs.get("dim", usual)
        return {int(axis) % rank for axis in (axes if isinstance(axes, (list, tuple, range)) else (axes,))}

    def _grown(self, a: fx.Node, b: fx.Node) -> set[int]:
        axes: set[int] = set()
        for x, y in zip(_tensors(a), _tensors(b), strict=True):
            if x.dim() != y.dim():
                raise AnotherGraph(
                    "{} at {} has another number of axes for a micro-batch", operator_name(a), place_of(a)
                )
            grown = [i for i, (m, n) in enumerate(zip(x.shape, y.shape, strict=True)) if m != n]
            if len(grown) > 1:
                raise Refusal(
                    "{} at {} compares examples with each other: its shape is {}",
                    operator_name(a),
                    place_of(a),
                    tuple(x.shape),
                )
            if grown and x.shape[grown[0]] != self.count * y.shape[grown[0]]:
                raise Refusal(
                    "{} at {} does not grow with the batch as it does: its shape is {}",
                    operator_name(a),
                    place_of(a),
                    tuple(x.shape),
                )
            axes |= set(grown)
        return axes

    def rule(self, node: object) -> Rule | None:
        """How the value follows from the micro-batches'; None where it has nothing to do with the batch.

        Raises:
            Refusal: it is not known to be a weighted sum of theirs.
        """
        if not isinstance(node, fx.Node) or (node not in self.axes and node not in self.over):
            return None
        if node in self.axes:
            raise Refusal("{} at {} is not summed over the batch", operator_name(node), place_of(node))
        self.tail.add(node)
        target, first = node.target, node.args[0] if node.args else None
        if target in _NLL or (
            target is operator.getitem and isinstance(first, fx.Node) and first.target in _NLL
        ):
            return self._labels(first if target is operator.getitem else node)  # type: ignore[arg-type]
        if target in (*_SUMS, *_MEANS) and first in self.axes:
            return Rule(factor=1.0 / self.count if target in _MEANS else 1.0)
        if target in (*_SAME, *_SUMS, *_MEANS):
            return self.rule(first)
        if target in (*_ADDED, *_JOINED):
            terms: Any = first if target in _JOINED else node.args[:2]
            return self._merged([self.rule(term) for term in terms], node)
        if target in (*_TIMES, *_OVER):
            return self._scaled(node)
        if (reduction := _reduction(node)) is not None and first in self.axes:
            return Rule(factor=1.0 / self.count if reduction == _MEAN else 1.0)
        raise Refusal("{} at {} works on values of the whole batch", operator_name(node), place_of(node))

    def _labels(self, nll: fx.Node) -> Rule:
        """A cross entropy: its mean is over the labels that count."""
        self.tail.add(nll)
        _, target, weights, reduction, ignored = nll.args
        return Rule() if reduction == _SUM else Rule(counted=(target, ignored, weights))  # type: ignore[arg-type]

    def _merged(self, rules: list[Rule | None], node: fx.Node) -> Rule | None:
        """The rule of a sum: one for all its terms.

        What does not depend on the batch is there in every micro-batch: Σ w must be 1.
        """
        found = list(dict.fromkeys(rule for rule in rules if rule is not None))
        if len(found) > 1:
            raise Refusal(
                "the terms of its loss that {} adds at {} are means over different counts",
                operator_name(node),
                place_of(node),
            )
        if (
            None in rules
            and found
            and found[0].counted is None
            and abs(found[0].factor * self.count - 1) > 1e-9
        ):
            raise Refusal(
                "{} at {} adds something that is not summed over the batch to a sum over it",
                operator_name(node),
                place_of(node),
            )
        return found[0] if found else None

    def _scaled(self, node: fx.Node) -> Rule | None:
        """The rule of a product or quotient: with a number, with what has nothing to do with the batch, or
        over a sum over the inputs.
        """
        a, b = node.args[:2]
        if node.target in _TIMES and self.rule_less(a):
            a, b = b, a
        rule = self.rule(a)
        if rule is None or not isinstance(b, fx.Node):
            here, there = b, self.pairs[node].args[1]
            if rule is None or here == there:
                return rule
            ratio = float(here) / float(there)  # type: ignore[arg-type]
            if rule.counted is not None:
                raise Refusal(
                    "{} at {} scales a mean over labels by the size of the batch",
                    operator_name(node),
                    place_of(node),
                )
            return Rule(factor=rule.factor * (ratio if node.target in _TIMES else 1.0 / ratio))
        if self.rule_less(b):
            return rule
        if node.target in _TIMES or rule != Rule():
            raise Refusal(
                "{} at {} multiplies values of the whole batch with each other",
                operator_name(node),
                place_of(node),
            )
        return Rule(counted=(self._denominator(b), None, None))

    def rule_less(self, node: object) -> bool:
        """Whether a value has nothing to do with the batch."""
        return not isinstance(node, fx.Node) or (node not in self.axes and node not in self.over)

    def _denominator(self, node: fx.Node) -> fx.Node:
        """A sum over the batch, through casts."""
        while node.target in _SAME and node.target is not aten.neg.default and node in self.over:
            self.tail.add(node)
            node = node.args[0]  # type: ignore[assignment]
        if node.target not in _SUMS or node.args[0] not in self.axes:
            raise Refusal(
                "its loss is divided by {} at {}, which is no plain sum over the batch",
                operator_name(node),
                place_of(node),
            )
        self.tail.add(node)
        return node

    def check_rest(self) -> None:
        """Raises Refusal where anything but the loss's own sums looks at the whole batch."""
        for node in self.pairs:
            if node in self.over and node not in self.tail:
                raise Refusal("{} at {} looks at the whole batch", operator_name(node), place_of(node))

    def counts(self, rule: Rule, part: Step) -> fx.Graph:
        """A graph of the part's inputs (in the order of its placeholders, tangent left out) → what its mean
        is over, as one number.

        Raises:
            Refusal: it depends on more than inputs.
        """
        assert rule.counted is not None
        target, ignored, weights = rule.counted
        sources = [self.pairs[n] for n in (target, weights) if n is not None]
        for node in dict.fromkeys(
            n for source in sources for n in [*made_from(source), *_placeholders(source)]
        ):
            if node in part.parameters or is_random(node.target):
                raise Refusal("what its mean is over depends on parameters or random numbers")
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in part.graph.nodes:
            if node.op == "placeholder" and node not in part.tangents:
                made[node] = graph.placeholder(node.name)
        wanted = {n for source in sources for n in made_from(source)}
        for node in part.graph.nodes:
            if node in wanted:
                made[node] = graph.node_copy(node, made.__getitem__)
        labels = made[sources[0]]
        counted = (
            labels
            if ignored is None
            else _counted(graph, labels, ignored, made[sources[1]] if weights is not None else None)
        )
        graph.output((counted,))
        return graph


def _counted(graph: fx.Graph, labels: fx.Node, ignored: int, weights: fx.Node | None) -> fx.Node:
    """How many labels count, or the sum of their classes' weights."""
    mask = graph.call_function(aten.ne.Scalar, (labels, ignored))
    if weights is not None:
        classes = graph.call_function(aten.mul.Tensor, (labels, mask))  # the one left out may be no class
        mask = graph.call_function(
            aten.mul.Tensor, (graph.call_function(aten.take.default, (weights, classes)), mask)
        )
    return graph.call_function(aten.sum.default, (mask,))


def _numbers(node: fx.Node) -> list[object]:
    """The numbers that it computes with; sizes are none."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name.startswith("aten::arange"):
        return []
    given = {**dict(zip((a.name for a in schema.arguments), node.args, strict=False)), **node.kwargs}
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}
    return [
        v
        for name, v in given.items()
        if kinds[name].removeprefix("Optional[").removesuffix("]") in ("number", "float", "Scalar")
        or isinstance(v, float)
    ]


def _reduction(node: fx.Node) -> int | None:
    """What a loss operator does over its elements: 1 mean, 2 sum; None where it is none."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "reduction" not in names:
        return None
    at = names.index("reduction")
    value = node.args[at] if len(node.args) > at else node.kwargs.get("reduction", _MEAN)
    return value if value in (_MEAN, _SUM) else None  # type: ignore[return-value]


def _placeholders(node: fx.Node) -> list[fx.Node]:
    return [a for n in made_from(node) for a in n.all_input_nodes if a.op == "placeholder"] + [node] * (
        node.op == "placeholder"
    )


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def place_of(node: fx.Node) -> str:
    """The module that it is in, as it is told."""
    return module_path(node) or "the top of the model"
