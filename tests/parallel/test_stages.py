"""Stages that are cut out of a forward, run one after the other in this process, are the model: its loss and
every gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from rank_helpers import batch_of, model_of
from torch import Tensor, fx, nn

from effcompile.capture.source import Source
from effcompile.core.errors import UsageError
from effcompile.ir.step import Step
from effcompile.ir.strategy import Strategy
from effcompile.search.parallel.stages import PipelineStage, stages_of


def stages(
    model: nn.Module, inputs: dict[str, Tensor], strategy: Strategy
) -> tuple[list[PipelineStage], list[Tensor]]:
    step, front = Source(model=model, args=(), kwargs=inputs).capture_with_front()
    assert front is not None
    tensors = step.leaves((), inputs)
    return stages_of(front, step, model, tensors, strategy), [tensor.detach() for tensor in tensors]


def ran(step: Step, model: nn.Module, leaves: Sequence[Tensor], tangent: Tensor) -> list[Tensor]:
    """The results of a stage's graph, operator by operator."""
    given = dict(zip(step.inputs, leaves, strict=True)) | step.constants
    given |= {node: model.get_parameter(name).detach() for node, name in step.parameters.items()}
    given |= {node: model.get_buffer(name) for node, name in step.buffers.items()}
    values = [given.get(node, tangent) for node in step.graph.find_nodes(op="placeholder")]
    results: list[Tensor] = list(fx.Interpreter(fx.GraphModule(step.module, step.graph)).run(*values))
    return results


def check(model: nn.Module, inputs: dict[str, Tensor], strategy: Strategy) -> list[PipelineStage]:
    cut, tensors = stages(model, inputs, strategy)
    loss = model(**inputs)
    loss = loss if isinstance(loss, Tensor) else loss.loss
    loss.backward()
    arrives: list[Tensor] = []
    entered = []
    for stage in cut:
        entered.append([tensors[i] for i in stage.takes] + arrives)
        arrives = ran(stage.step, model, entered[-1], torch.zeros(stage.step.loss.meta["val"].shape))[:1]
    torch.testing.assert_close(arrives[0], loss.detach())
    tangent, found = torch.ones(()), dict[str, Tensor]()
    for stage, leaves in reversed(list(zip(cut, entered, strict=True))):
        results = ran(stage.step, model, leaves, tangent)
        gradients = results[1 : 1 + len(stage.step.differentiated)]
        for name, gradient in zip(stage.step.differentiated, gradients, strict=True):
            found[name] = found.get(name, torch.zeros_like(gradient)) + gradient
        tangent = results[-1]
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)
    return cut


def test_encoder_and_decoder_hand_on_several_values() -> None:
    """T5: tables of positions cross with what the encoder makes; its labels are copied into a slice, which no
    operand of a node says.
    """
    cut = check(model_of("t5"), dict(batch_of("t5", 1)), Strategy(pp=4, vpp=1, schedule="1f1b"))
    assert [stage.layers for stage in cut] == [
        ("encoder.block.0",),
        ("encoder.block.1",),
        ("decoder.block.0",),
        ("decoder.block.1",),
    ]
    assert [stage.step.loss.meta["val"].dim() for stage in cut] == [1, 3, 1, 0]


class Writes(nn.Module):
    """Two layers, and a write in place into what crosses between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        held = torch.zeros_like(x)
        held[:, 1:] = x[:, :-1]
        return (self.layers[1](held) + x).square().mean()


def test_a_write_in_place_goes_with_its_stage() -> None:
    x = torch.randn(2, 4)
    cut = check(Writes(), {"x": x}, Strategy(pp=2))
    assert [stage.layers for stage in cut] == [("layers.0",), ("layers.1",)]


def test_more_stages_than_layers_are_told() -> None:
    with pytest.raises(UsageError, match="3 stages are more than the model's 2 layers"):
        stages(Writes(), {"x": torch.randn(2, 4)}, Strategy(pp=3))
