"""Whether a loss is a weighted sum over parts of its batch.

Read off the step at two batch sizes, operator by operator.

Both graphs have the same operators. A value whose shape grows with the batch holds rows of examples; one that
does not, but is made from such rows, looks at the whole batch. Only the loss may: through sums and means over
the batch, of which the weights follow, and what is linear after them. The denominators of means over labels
are recomputed from the inputs alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from effcompile.core.torch_compat import is_fake
from effcompile.core.torch_compat_aot import is_random
from effcompile.ir.program import shape_of
from effcompile.ir.step import DividedStep, Step
from effcompile.passes.training.separation import (
    ELIDED,
    AnotherGraph,
    Rule,
    Separation,
    alike,
    made_from,
    place_of,
)
from effcompile.passes.training.step_edit import Refusal, operator_name
from effcompile.schedules.blocks import split


def divided(whole: Step, part: Step, count: int, examples: int) -> DividedStep:
    """The step as micro-batches.

    Args:
        whole: the step, captured over the batch.
        part: the same over one micro-batch.
        count: of micro-batches.
        examples: in each of them.

    Raises:
        AnotherGraph: the two cannot be compared. Refusal: its loss and gradients are not known to be a
            weighted sum over micro-batches. Says why.
    """
    _refuse_state(whole)
    pairs = _aligned(whole, part)
    found = Separation(pairs, count)
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
    """The step as micro-batches of one example, whose graph need not be that of several: axes of length 1 are
    specialised.

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
    if (
        set(whole.parameters.values()) != set(part.parameters.values())
        or whole.gradients.keys() != part.gradients.keys()
    ):
        raise Refusal("one example reads other parameters than the batch does")
    found = divided(doubled, pair, count, 2)
    return replace(found, whole=whole, part=part, examples=1, pair=pair)


def _refuse_state(step: Step) -> None:
    for node in step.graph.nodes:
        if (
            node.op == "call_function"
            and "batch_norm" in str(node.target)
            and any(arg is True for arg in node.args)
        ):
            raise Refusal(
                "{} normalises by statistics of the whole batch (BatchNorm in training mode)", place_of(node)
            )
    if step.updated:
        raise Refusal("the buffer {} is updated in every forward, by the whole batch", step.updated[0])
    if step.wanted:
        raise Refusal("an input requires a gradient, which is that of the whole batch")
    if len(step.outputs) > 1:
        raise Refusal("outputs beside the loss are returned, for the whole batch at once")
    if any(
        v.dtype == torch.float16
        for n in step.gradients.values()
        if isinstance(v := n.meta.get("val"), torch.Tensor)
    ):
        raise Refusal(
            "its gradients are fp16: they would vanish, for the loss's scale comes only after they are summed"
        )
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
    theirs = made_from(part.loss)
    for a in made_from(whole.loss):
        if (
            theirs
            and alike(a, theirs[0])
            and [pairs[n] for n in a.all_input_nodes] == theirs[0].all_input_nodes
        ):
            pairs[a] = theirs.pop(0)
        elif a.target in ELIDED:
            pairs[a] = pairs[a.args[0]]  # type: ignore[index]
        else:
            then = operator_name(theirs[0]) if theirs else "missing"
            raise AnotherGraph(
                "the model does something else with a micro-batch: {} at {} is {} then",
                operator_name(a),
                place_of(a),
                then,
            )
    if theirs:
        raise AnotherGraph(
            "the model does something else with a micro-batch: it also needs {}", operator_name(theirs[0])
        )
    return pairs


def _draws(node: fx.Node) -> bool:
    """Whether its result depends on random numbers: an operator with a probability of 0 is no such, though it
    may draw some.
    """
    if not is_random(node.target):
        return False
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    chances = [given.get(name, 0.0) for name in ("p", "dropout_p") if name in names]
    return not chances or any(chance != 0.0 for chance in chances)
