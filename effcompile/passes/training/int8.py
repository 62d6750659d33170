"""Products of a step in 8 bits, weights and gradients in full: SwitchBack (Wortsman et al. 2023, arXiv
2304.13013, algorithm 1).

    y  = x Wᵀ     rows of x and the whole of W as codes of int8, each with its scale max |·| / 127
    dx = g W      rows of g, and the same codes of W
    dW = gᵀ x     as given: it sums over all tokens, and its rounding would be theirs together

The products that make the loss's own inputs stay as given: logits.

Codes are made by operators like any other, which `pointwise` runs as one kernel each, and which the planner
keeps or repeats; a weight is coded once a step. Sums are of 32 bits, exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from effcompile.core.reasons import Because, Unsupported
from effcompile.ir.plan import Declined
from effcompile.ir.step import Step
from effcompile.ops.wide import product_ratio
from effcompile.passes.training.base import Case, StepChoice, StepContext, StepOption
from effcompile.passes.training.frozen import is_between
from effcompile.passes.training.precision import narrow_dtype
from effcompile.passes.training.step_edit import call, copied

aten = torch.ops.aten

SITE, KIND = "step", "8-bit products"
BASELINE, INT8 = "as given", "int8"
_MOST = 127
#: A weight, or a row, without a larger value has codes of 0.
_LEAST = 1e-30
#: Products of two codes that a sum of 32 bits holds.
_DEEPEST = (2**31 - 1) // _MOST**2
#: Weights with fewer elements are of no weight.
_SMALLEST = 4096
#: On a GPU torch._int_mm takes depths and widths that are multiples of this, and more rows than that.
_MULTIPLE, _ROWS = 8, 16
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NOTE = "{} products; gradients of weights as given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Products:
    """Not exact: its error is measured against the step as given. Takes part only where it is named.

    `always`: also where it is predicted or measured to be slower.
    """

    always: bool = False

    name: ClassVar[str] = "int8"
    exact: ClassVar[bool] = False

    def propose(self, case: Case, context: StepContext) -> Iterator[StepChoice | Declined]:
        """The products as given, and those with a trained weight in int8."""
        step = case.step
        found = weight_products(step)
        if (reason := self._refusal(step, found, context)) is not None:
            yield Declined(site=SITE, kind=KIND, option=INT8, by=self.name, reason=reason)
            return
        option = StepOption(name=INT8, note=Because(_NOTE, (len(found),)))
        options = (option, *[StepOption(name=BASELINE)] * (not self.always))
        yield StepChoice(site=SITE, kind=KIND, baseline=BASELINE, options=options, settled=self.always)

    def _refusal(
        self, step: Step, found: dict[fx.Node, tuple[fx.Node, ...]], context: StepContext
    ) -> Unsupported | None:
        if not context.here:
            return Unsupported("for a machine that is not here its error and its time are not known")
        if step.spread is not None:
            return Unsupported("on ranks products stay as given")
        if not found:
            return Unsupported("no product has a trained weight as its second factor")
        device = step.loss.meta["val"].device.type
        given = narrow_dtype(step) or "fp32"
        ratio = product_ratio(torch.int8, device) / product_ratio(_DTYPES[given], device)
        if ratio >= 1 and not self.always:
            text = "products in int8 take {} × as long as in {} on this machine, measured"
            return Unsupported.of(text, f"{ratio:.1f}", given)
        return None

    def apply(self, case: Case, choice: StepChoice, option: StepOption) -> Case:
        """The step with those products in int8."""
        return replace(case, step=with_codes(case.step))


def weight_products(step: Step) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Product whose second factor is a trained weight → the weight's placeholder, and the views and casts of
    it in between.
    """
    trained = {*step.differentiated, *step.consumed}
    weights = {node for node, name in step.parameters.items() if name in trained}
    found = {}
    for node in step.graph.nodes:
        if node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs:
            path = _path(node.args[-1])
            if path[0] in weights and _fits(node, path[0]):
                found[node] = path
    heads = _heads(step, found)
    return {node: path for node, path in found.items() if path[0] not in heads}


def _heads(step: Step, found: Mapping[fx.Node, tuple[fx.Node, ...]]) -> set[fx.Node]:
    """The weights of products that lead to the loss through no other: its gradient, all but one number of a
    row of which is small, is not rounded by rows.
    """
    heads, seen, waiting = set[fx.Node](), set[fx.Node](), [step.loss]
    while waiting:
        node = waiting.pop()
        if node in found:
            heads.add(found[node][0])
        elif node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return heads


def _path(node: Any) -> tuple[fx.Node, ...]:
    """What a value is a view or cast of, and those on the way, it among them."""
    path = [node]
    while is_between(path[0]):
        path.insert(0, path[0].args[0])
    return tuple(path)


def _fits(product: fx.Node, weight: fx.Node) -> bool:
    a, b = (argument.meta["val"] for argument in product.args[-2:])  # type: ignore[union-attr]
    (m, k), n = map(int, a.shape), int(b.shape[1])
    if a.device.type != "cpu" and (m <= _ROWS or k % _MULTIPLE or n % _MULTIPLE):
        return False
    bias = product.args[0].meta["val"] if len(product.args) == 3 else None  # type: ignore[union-attr]
    return (
        0 < k <= _DEEPEST
        and m > 0
        and weight.meta["val"].dim() == 2
        and weight.meta["val"].numel() >= _SMALLEST
        and a.dtype.is_floating_point
        and a.dtype != torch.float64
        and (bias is None or bias.dim() == 1)
    )


def with_codes(step: Step) -> Step:
    """A copy of the step whose products with trained weights are of codes."""
    step, _ = copied(step)
    codes, rows = dict[fx.Node, tuple[fx.Node, fx.Node]](), dict[fx.Node, tuple[fx.Node, fx.Node]]()
    for product, path in weight_products(step).items():
        with step.graph.inserting_before(product):
            weight = path[0]
            if weight not in codes:
                codes[weight] = _coded(step.graph, product, weight, [])
            left = product.args[-2]
            if left not in rows:
                rows[left] = _coded(step.graph, product, left, [1])  # type: ignore[index, arg-type]
            made = _product(step.graph, product, path, codes[weight], rows[left])  # type: ignore[index]
        product.replace_all_uses_with(made)
        step.graph.erase_node(product)
    step.graph.eliminate_dead_code()
    step.graph.lint()
    step.module.recompile()
    return step


def _coded(graph: fx.Graph, product: fx.Node, value: fx.Node, dims: list[int]) -> tuple[fx.Node, fx.Node]:
    """(codes, scale in fp32): of each row, or of the whole."""
    # linalg_vector_norm takes 20 times as long on a CPU
    most = call(graph, product, aten.abs.default, value)
    most = call(graph, product, aten.amax.default, most, dims, bool(dims))
    if most.meta["val"].dtype != torch.float32:
        most = call(graph, product, aten._to_copy.default, most, dtype=torch.float32)
    most = call(graph, product, aten.clamp_min.default, most, _LEAST)
    scale = call(graph, product, aten.div.Scalar, most, _MOST)
    found = call(graph, product, aten.div.Tensor, value, scale)
    found = call(graph, product, aten.round.default, found)
    return call(graph, product, aten._to_copy.default, found, dtype=torch.int8), scale


def _product(
    graph: fx.Graph,
    product: fx.Node,
    path: tuple[fx.Node, ...],
    weight: tuple[fx.Node, fx.Node],
    rows: tuple[fx.Node, fx.Node],
) -> fx.Node:
    """The product of codes, scaled, with its bias, in the dtype of the one that was given."""
    right = weight[0]
    for node in path[1:]:
        if node.target is not aten._to_copy.default:
            right = call(graph, product, node.target, right, *node.args[1:])  # type: ignore[arg-type]
    sums = call(graph, product, aten._int_mm.default, rows[0], right)
    scale = call(graph, product, aten.mul.Tensor, rows[1], weight[1])
    made = call(graph, product, aten.mul.Tensor, sums, scale)
    if len(product.args) == 3:
        made = call(graph, product, aten.add.Tensor, made, product.args[0])
    if (dtype := product.meta["val"].dtype) != torch.float32:
        made = call(graph, product, aten._to_copy.default, made, dtype=dtype)
    return made
