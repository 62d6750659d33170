"""The graphs of an encoder-decoder as one, from what its encoder is given to logits of a text: there errors
of all places are measured, in whichever of the graphs they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from effcompile.capture.generation import GenerationStep
from effcompile.core.types import Inputs
from effcompile.ir.cache import Growth
from effcompile.ir.export import refresh_shapes
from effcompile.ir.program import Program
from effcompile.runtime.generation.eye import fits
from effcompile.search.generation.cases import scored
from effcompile.search.generation.text import CalibrationText, as_inputs

#: Positions of the encoder, of all rows of a text together, that errors are measured on; one row at least.
_POSITIONS = 2048


def joined(step: GenerationStep, text: CalibrationText) -> Program:
    """Encoder, source and step; those of a text as its example."""
    assert step.encoder is not None
    assert step.source is not None
    graph, held = fx.Graph(), dict[str, torch.Tensor]()
    _, kwargs = joined_inputs(step, text)
    inputs = {name: graph.placeholder(name) for name in kwargs if name != "past"}
    past = [graph.placeholder(f"past_{at}") for at in range(len(kwargs["past"]))]
    (hidden,) = _copied(graph, held, step.encoder, [inputs[name] for name in text.source])
    cross = iter(_copied(graph, held, step.source, [hidden, inputs["tokens"]]))
    own = iter(past)
    leaves = [next(cross) if leaf.growth is Growth.SOURCE else next(own) for leaf in step.layout]
    taken = [inputs[name] for name in step.program.kwargs if name != "past"]
    (logits,) = _copied(graph, held, scored(step.program), [*taken, *leaves])
    graph.output((logits,))
    module = fx.GraphModule(held, graph, class_name="Joined")
    refresh_shapes(module, (), kwargs)
    specs = (*step.encoder.inputs, *(s for s in step.program.inputs if s.name != "past"))
    return Program(
        name=step.program.name, module=module, kwargs=kwargs, inputs=specs, outputs=step.program.outputs[:1]
    )


def joined_with_eye(step: GenerationStep, text: CalibrationText) -> Program:
    """The graph of an image and step; those of a text as its example, which begins with such an image."""
    assert step.eye is not None
    graph, held = fx.Graph(), dict[str, torch.Tensor]()
    _, kwargs = inputs_with_eye(step, text)
    specs = (*step.eye.inputs, *step.program.inputs)
    inputs = [graph.placeholder(spec.name) for spec in specs]
    count = len(step.eye.inputs)
    rows = iter(_copied(graph, held, step.eye, inputs[:count]))
    taken = [
        graph.call_function(torch.ops.aten.cat.default, ([next(rows), node],))
        if spec.name.startswith("images")
        else node
        for spec, node in zip(specs[count:], inputs[count:], strict=True)
    ]
    (logits,) = _copied(graph, held, scored(step.program), taken)
    graph.output((logits,))
    module = fx.GraphModule(held, graph, class_name="Joined")
    refresh_shapes(module, (), kwargs)
    return Program(
        name=step.program.name, module=module, kwargs=kwargs, inputs=specs, outputs=step.program.outputs[:1]
    )


def inputs_with_eye(step: GenerationStep, text: CalibrationText) -> Inputs:
    """A text as the inputs of `joined_with_eye`: its first image, and what was made of the others."""
    assert step.eye is not None
    _, given = as_inputs(text, step.layout, step.program.kwargs)
    own = int(step.eye.outputs[0].shape[0])
    return (), {**text.first, **given, "images": [each[own:] for each in given["images"]]}


def begins_with_image(step: GenerationStep, text: CalibrationText) -> bool:
    """Whether a text has an image that is of the sizes of the graph of one, first and whole."""
    if step.eye is None or not text.images:
        return False
    there = (text.tokens[0] == text.image_token).sum()
    return fits(text.first, step.eye.inputs) and int(there) >= int(step.eye.outputs[0].shape[0])


def joined_inputs(step: GenerationStep, text: CalibrationText) -> Inputs:
    """A text as the inputs of `joined`: first what the encoder is given."""
    rows = max(1, _POSITIONS // max(1, text.extra["encoder_outputs"][0].shape[1]))
    few = replace(
        text,
        tokens=text.tokens[:rows],
        source={name: value[:rows] for name, value in text.source.items()},
        cross=tuple(leaf[:rows] for leaf in text.cross),
        extra={name: value[:rows] for name, value in text.extra.items() if isinstance(value, torch.Tensor)},
    )
    _, given = as_inputs(few, step.layout, step.program.kwargs)
    kept: dict[str, Any] = dict(given)
    kept["past"] = [
        leaf
        for leaf, what in zip(given["past"], step.layout, strict=True)
        if what.growth is not Growth.SOURCE
    ]
    return (), {**few.source, **kept}


def _copied(
    graph: fx.Graph, held: dict[str, torch.Tensor], program: Program, inputs: list[fx.Node]
) -> list[fx.Node]:
    """A program's nodes behind these inputs; its results. `held`: tensors by name, its own are added."""
    known = dict(zip(program.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in program.graph.nodes:
        if node.op == "output":
            return [known[result] for result in pytree.tree_leaves(node.args[0])]
        if node in known:
            continue
        known[node] = graph.node_copy(node, known.__getitem__)
        if (tensor := program.tensor(node)) is not None:
            known[node].target = _held(held, str(node.target), tensor)
    raise AssertionError("a graph ends with its output")


def _held(held: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> str:
    """The name of a tensor; constants of two graphs may have the same."""
    while held.setdefault(name, tensor) is not tensor:
        name += "_"
    return name
