"""Is a loss a weighted sum over parts of its batch? Read off the step at two batch sizes, operator by operator.

Both graphs have the same operators. A value whose shape grows with the batch holds rows of examples; one that does not, but is
made from such rows, looks at the whole batch. Only the loss may: through sums and means over the batch, of which the weights
follow, and what is linear after them. The denominators of means over labels are recomputed from the inputs alone.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.core.torch_compat import is_fake
from effcompile.core.torch_compat_aot import is_random
from effcompile.ir.program import ancestors, module_path, shape_of
from effcompile.ir.step import DividedStep, Step
from effcompile.passes.training.regrouped import regrouped
from effcompile.passes.training.step_edit import Refusal, operator_name
from effcompile.schedules.blocks import split

aten = torch.ops.aten

_SAME = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default, aten.alias.default, aten.detach.default,
    aten.contiguous.default, aten._to_copy.default, aten.neg.default, aten.squeeze.default, aten.squeeze.dim, aten.unsqueeze.default,
    operator.getitem,
)  # fmt: skip
#: What capture leaves out where it does nothing, as it may where a micro-batch is one example.
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)  # of a copy, or of what needs none
_ELIDED = (*_VIEWS, aten.expand.default, aten.clone.default)
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
    for name in ("new_ones", "new_zeros", "new_full", "new_empty", "ones_like", "zeros_like", "full_like", "empty_like")
)
#: Operators with an axis over which they mix values, and where it stands among their arguments.
_MIXES = {
    aten._softmax.default: 1, aten._log_softmax.default: 1, aten.cumsum.default: 1, aten.cumprod.default: 1, aten.logcumsumexp.default: 1,
    aten.cummax.default: 1, aten.cummin.default: 1, aten.sort.default: 1, aten.sort.stable: 1, aten.flip.default: 1, aten.roll.default: 2,
}  # fmt: skip
_MEAN, _SUM = 1, 2  # of losses' `reduction`


class AnotherGraph(Refusal):
    """A micro-batch is captured as other operators than the batch, so that nothing can be read off the two."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a value of the whole batch follows from its micro-batches: Σ factor · part, or Σ (nᵢ / Σ n) · part with counts nᵢ.

    `counted`: what is counted: labels, the label that is left out (or None), classes' weights (or None).
    """

    factor: float = 1.0
    counted: tuple[fx.Node, int | None, fx.Node | None] | None = None


def divided(whole: Step, part: Step, count: int, examples: int) -> DividedStep:
    """The step as micro-batches.

    Args:
        whole: the step, captured over the batch.
        part: the same over one micro-batch.
        count: of micro-batches.
        examples: in each of them.

    Raises:
        AnotherGraph: the two cannot be compared. Refusal: its loss and gradients are not known to be a weighted sum over
            micro-batches. Says why.
    """
    _refuse_state(whole)
    pairs = _aligned(whole, part)
    found = _Separation(pairs, count)
    rule = found.rule(whole.loss)
    found.check_rest()
    rule = Rule(factor=1.0 / count) if rule is None else rule
    return DividedStep(
        whole=whole, part=part, count=count, examples=examples, factor=rule.factor,
        batched=tuple(shape_of(a) != shape_of(b) for a, b in zip(whole.inputs, part.inputs, strict=True)),
        counts=None if rule.counted is None else found.counts(rule, part),
        random=any(_draws(node) for node in pairs),
    )  # fmt: skip


def divided_into_single(whole: Step, part: Step, count: int, doubled: Step, pair: Step) -> DividedStep:
    """The step as micro-batches of one example, whose graph need not be that of several: axes of length 1 are specialised.

    It is read off two larger batches. That one example is treated as one of two has to be seen by running.

    Args:
        whole: the step, captured over the batch.
        part: the same over one example.
        count: of micro-batches.
        doubled: the step over the batch with every example given twice.
        pair: the same over one example, given twice.

    Raises:
        Refusal: the loss is not known to be a weighted sum over examples.
    """
    _aligned(doubled, whole)
    if set(whole.parameters.values()) != set(part.parameters.values()) or whole.gradients.keys() != part.gradients.keys():
        raise Refusal("one example reads other parameters than the batch does")
    found = divided(doubled, pair, count, 2)
    return replace(found, whole=whole, part=part, examples=1, pair=pair)


def _refuse_state(step: Step) -> None:
    for node in step.graph.nodes:
        if node.op == "call_function" and "batch_norm" in str(node.target) and any(arg is True for arg in node.args):
            raise Refusal("{} normalises by statistics of the whole batch (BatchNorm in training mode)", _place(node))
    if step.updated:
        raise Refusal("the buffer {} is updated in every forward, by the whole batch", step.updated[0])
    if step.wanted:
        raise Refusal("an input requires a gradient, which is that of the whole batch")
    if len(step.outputs) > 1:
        raise Refusal("outputs beside the loss are returned, for the whole batch at once")
    if any(v.dtype == torch.float16 for n in step.gradients.values() if isinstance(v := n.meta.get("val"), torch.Tensor)):
        raise Refusal("its gradients are fp16: they would vanish, for the loss's scale comes only after they are summed")
    ahead = set(split(step)[0])
    for name, node in step.gradients.items():
        if node in ahead or node.op == "placeholder":
            raise Refusal("the gradient of {} does not depend on the gradient that arrives at the loss", name)


def _aligned(whole: Step, part: Step) -> dict[fx.Node, fx.Node]:
    """Each placeholder and operator that the loss is made from → the same over a micro-batch, in order."""
    pairs: dict[fx.Node, fx.Node] = {}
    for all_of, of_part in ((whole.parameters, part.parameters), (whole.buffers, part.buffers)):
        here = {name: node for node, name in of_part.items()}
        if set(all_of.values()) != set(here):
            raise AnotherGraph("a micro-batch reads other parameters or buffers than the batch does")
        pairs.update({node: here[name] for node, name in all_of.items()})
    if len(whole.constants) != len(part.constants) or len(whole.inputs) != len(part.inputs):
        raise AnotherGraph("a micro-batch has other constants or inputs than the batch has")
    for mine, other in zip(whole.constants.values(), part.constants.values(), strict=True):
        if mine.shape == other.shape and not is_fake(mine) and not torch.equal(mine, other):
            raise AnotherGraph("a constant of shape {} is another for a micro-batch", tuple(mine.shape))
    pairs.update(zip(whole.constants, part.constants, strict=True))
    pairs.update(zip(whole.inputs, part.inputs, strict=True))
    theirs = _made_from(part.loss)
    for a in _made_from(whole.loss):
        if theirs and _alike(a, theirs[0]) and [pairs[n] for n in a.all_input_nodes] == theirs[0].all_input_nodes:
            pairs[a] = theirs.pop(0)
        elif a.target in _ELIDED:
            pairs[a] = pairs[a.args[0]]  # type: ignore[index]
        else:
            then = operator_name(theirs[0]) if theirs else "missing"
            raise AnotherGraph("the model does something else with a micro-batch: {} at {} is {} then", operator_name(a), _place(a), then)
    if theirs:
        raise AnotherGraph("the model does something else with a micro-batch: it also needs {}", operator_name(theirs[0]))
    return pairs


def _alike(a: fx.Node, b: fx.Node) -> bool:
    return a.target == b.target or (a.target in _VIEWS and b.target in _VIEWS)


def _made_from(loss: fx.Node) -> list[fx.Node]:
    """The operators that a value is made from, itself included, in graph order."""
    wanted = ancestors([loss])
    return [n for n in loss.graph.nodes if n in wanted and n.op == "call_function"]


class _Separation:
    """Follows the batch through the forward, and the loss back up to where it sums over the batch."""

    def __init__(self, pairs: Mapping[fx.Node, fx.Node], count: int) -> None:
        self.pairs, self.count = pairs, count
        grown = {a: self._grown(a, b) for a, b in pairs.items()}
        self.axes = {a: axes for a, axes in grown.items() if axes}  # of values that grow with the batch: where
        self.over: set[fx.Node] = set()  # values of the whole batch
        regroups = set(regrouped(list(pairs), self.axes))
        self.tail = set(regroups)  # those of them that the loss is known to be linear in, or not to follow
        for a, b in pairs.items():
            if a not in self.axes and a.target not in _BLANK and any(arg in self.axes or arg in self.over for arg in a.all_input_nodes):
                self.over.add(a)
            if a.target in _MIXES and a not in regroups and self._mixed(a) & grown[a]:
                raise Refusal("{} at {} goes over the examples of the batch", operator_name(a), _place(a))
            elided = a.target in _ELIDED and not _alike(a, b)  # b made what a is a copy or view of
            if not elided and not (a in self.over and a.target in (*_TIMES, *_OVER)) and repr(_numbers(a)) != repr(_numbers(b)):
                raise Refusal("{} at {} computes with the size of the batch", operator_name(a), _place(a))

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
                raise AnotherGraph("{} at {} has another number of axes for a micro-batch", operator_name(a), _place(a))
            grown = [i for i, (m, n) in enumerate(zip(x.shape, y.shape, strict=True)) if m != n]
            if len(grown) > 1:
                raise Refusal("{} at {} compares examples with each other: its shape is {}", operator_name(a), _place(a), tuple(x.shape))
            if grown and x.shape[grown[0]] != self.count * y.shape[grown[0]]:
                raise Refusal(
                    "{} at {} does not grow with the batch as it does: its shape is {}", operator_name(a), _place(a), tuple(x.shape)
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
            raise Refusal("{} at {} is not summed over the batch", operator_name(node), _place(node))
        self.tail.add(node)
        target, first = node.target, node.args[0] if node.args else None
        if target in _NLL or (target is operator.getitem and isinstance(first, fx.Node) and first.target in _NLL):
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
        raise Refusal("{} at {} works on values of the whole batch", operator_name(node), _place(node))

    def _labels(self, nll: fx.Node) -> Rule:
        """A cross entropy: its mean is over the labels that count."""
        self.tail.add(nll)
        _, target, weights, reduction, ignored = nll.args
        return Rule() if reduction == _SUM else Rule(counted=(target, ignored, weights))  # type: ignore[arg-type]

    def _merged(self, rules: list[Rule | None], node: fx.Node) -> Rule | None:
        """The rule of a sum: one for all its terms. What does not depend on the batch is there in every micro-batch: Σ w must be 1."""
        found = list(dict.fromkeys(rule for rule in rules if rule is not None))
        if len(found) > 1:
            raise Refusal("the terms of its loss that {} adds at {} are means over different counts", operator_name(node), _place(node))
        if None in rules and found and found[0].counted is None and abs(found[0].factor * self.count - 1) > 1e-9:
            raise Refusal("{} at {} adds something that is not summed over the batch to a sum over it", operator_name(node), _place(node))
        return found[0] if found else None

    def _scaled(self, node: fx.Node) -> Rule | None:
        """The rule of a product or quotient: with a number, with what has nothing to do with the batch, or over a sum over the inputs."""
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
                raise Refusal("{} at {} scales a mean over labels by the size of the batch", operator_name(node), _place(node))
            return Rule(factor=rule.factor * (ratio if node.target in _TIMES else 1.0 / ratio))
        if self.rule_less(b):
            return rule
        if node.target in _TIMES or rule != Rule():
            raise Refusal("{} at {} multiplies values of the whole batch with each other", operator_name(node), _place(node))
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
            raise Refusal("its loss is divided by {} at {}, which is no plain sum over the batch", operator_name(node), _place(node))
        self.tail.add(node)
        return node

    def check_rest(self) -> None:
        """Raises Refusal where anything but the loss's own sums looks at the whole batch."""
        for node in self.pairs:
            if node in self.over and node not in self.tail:
                raise Refusal("{} at {} looks at the whole batch", operator_name(node), _place(node))

    def counts(self, rule: Rule, part: Step) -> fx.Graph:
        """A graph of the part's inputs (in the order of its placeholders, tangent left out) → what its mean is over, as one number.

        Raises:
            Refusal: it depends on more than inputs.
        """
        assert rule.counted is not None
        target, ignored, weights = rule.counted
        sources = [self.pairs[n] for n in (target, weights) if n is not None]
        for node in dict.fromkeys(n for source in sources for n in [*_made_from(source), *_placeholders(source)]):
            if node in part.parameters or is_random(node.target):
                raise Refusal("what its mean is over depends on parameters or random numbers")
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in part.graph.nodes:
            if node.op == "placeholder" and node not in part.tangents:
                made[node] = graph.placeholder(node.name)
        wanted = {n for source in sources for n in _made_from(source)}
        for node in part.graph.nodes:
            if node in wanted:
                made[node] = graph.node_copy(node, made.__getitem__)
        labels = made[sources[0]]
        counted = labels if ignored is None else _counted(graph, labels, ignored, made[sources[1]] if weights is not None else None)
        graph.output((counted,))
        return graph


def _counted(graph: fx.Graph, labels: fx.Node, ignored: int, weights: fx.Node | None) -> fx.Node:
    """How many labels count, or the sum of their classes' weights."""
    mask = graph.call_function(aten.ne.Scalar, (labels, ignored))
    if weights is not None:
        classes = graph.call_function(aten.mul.Tensor, (labels, mask))  # the one left out may be no class
        mask = graph.call_function(aten.mul.Tensor, (graph.call_function(aten.take.default, (weights, classes)), mask))
    return graph.call_function(aten.sum.default, (mask,))


def _numbers(node: fx.Node) -> list[object]:
    """The numbers that it computes with; sizes are none."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name.startswith("aten::arange"):
        return []
    given = {**dict(zip((a.name for a in schema.arguments), node.args, strict=False)), **node.kwargs}
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}
    return [v for name, v in given.items() if kinds[name].removeprefix("Optional[").removesuffix("]") in ("number", "float", "Scalar")
            or isinstance(v, float)]  # fmt: skip


def _reduction(node: fx.Node) -> int | None:
    """What a loss operator does over its elements: 1 mean, 2 sum; None where it is none."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "reduction" not in names:
        return None
    at = names.index("reduction")
    value = node.args[at] if len(node.args) > at else node.kwargs.get("reduction", _MEAN)
    return value if value in (_MEAN, _SUM) else None  # type: ignore[return-value]


def _draws(node: fx.Node) -> bool:
    """Whether its result depends on random numbers: an operator with a probability of 0 is no such, though it may draw some."""
    if not is_random(node.target):
        return False
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    chances = [given.get(name, 0.0) for name in ("p", "dropout_p") if name in names]
    return not chances or any(chance != 0.0 for chance in chances)


def _placeholders(node: fx.Node) -> list[fx.Node]:
    return [a for n in _made_from(node) for a in n.all_input_nodes if a.op == "placeholder"] + [node] * (node.op == "placeholder")


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def _place(node: fx.Node) -> str:
    return module_path(node) or "the top of the model"
