"""What a loss is the mean over, read off its graph: with gradient accumulation, HuggingFace divides the sum
by another number.

Trainer counts the labels of all batches of an update and gives the model `num_items_in_batch`: each batch's
loss is then its labels' sum over that number, so that every label weighs the same. Of a planned mean over n
labels that is loss · n / num_items_in_batch.
"""

from __future__ import annotations

import operator

from torch import fx

from effcompile.ir.step import Step
from effcompile.passes.training import separation


def labels_counted(step: Step) -> fx.Graph | None:
    """A graph of the step's inputs, in their order → how many labels its loss is the mean over.

    None where the loss is not one cross entropy's mean, or what counts depends on more than inputs.
    """
    node = step.loss
    while node.target in separation._SAME and node.target is not operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in separation._NLL or node.args[3] != separation._MEAN or node.args[2] is not None:
        return None
    labels, ignored = node.args[1], node.args[4]
    assert isinstance(labels, fx.Node) and isinstance(ignored, int)
    wanted = {*separation.made_from(labels)}
    if not {labels, *separation._placeholders(labels)} - wanted <= set(step.inputs):
        return None
    graph = fx.Graph()
    made = {given: graph.placeholder(given.name) for given in step.inputs}
    for other in step.graph.nodes:
        if other in wanted:
            made[other] = graph.node_copy(other, made.__getitem__)
    graph.output((separation._counted(graph, made[labels], ignored, None),))
    return graph
