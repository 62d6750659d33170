"""What enters and leaves a captured graph has a role; state that enters and is updated is found by it, in
steps and in programs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from effcompile.capture.inference import capture
from effcompile.capture.training import capture_training
from effcompile.ir.roles import Entering, Leaves, Leaving
from effcompile.passes.training.step_edit import copied


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.head(self.norm(x)) * y).sum()


class Cell(nn.Module):
    """One step of a recurrence: its state enters, and leaves updated."""

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        after = torch.tanh(state + x)
        return after.sum(-1), after


def test_a_step_carries_its_buffers_and_differentiates_parameters_and_inputs() -> None:
    step = capture_training(Normed(), (torch.randn(3, 4, requires_grad=True), torch.randn(3, 1)))
    roles = step.roles
    assert set(roles.named(Entering.PARAMETER).values()) == {
        "norm.weight",
        "norm.bias",
        "head.weight",
        "head.bias",
    }
    assert [entry.role for entry in roles.entering.values()].count(Entering.INPUT) == 2
    assert roles.leaves(Leaving.GRADIENT) == ("norm.weight", "norm.bias", "head.weight", "head.bias")
    assert roles.leaves(Leaving.INPUT_GRADIENT) == ("input_0",) and step.wanted == (step.inputs[0],)
    carried = {roles.entering[node].name: place for node, place in roles.carried.items()}
    assert set(carried) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert all(roles.leaving[place] == Leaves(Leaving.UPDATED, name) for name, place in carried.items())
    for name, place in carried.items():
        node = next(node for node, held in step.buffers.items() if held == name)
        result = step.results[place]
        assert result is not None and result.meta["val"].shape == node.meta["val"].shape


def test_roles_move_with_a_copy_of_the_graph() -> None:
    step = capture_training(Normed(), (torch.randn(3, 4), torch.randn(3, 1)))
    copy, nodes = copied(step)
    assert {nodes[node]: entry for node, entry in step.roles.entering.items()} == copy.roles.entering
    assert (
        all(node.graph is copy.graph for node in copy.roles.entering)
        and copy.roles.leaving == step.roles.leaving
    )


def test_a_program_with_state_says_where_its_next_value_is() -> None:
    program = capture(Cell(), (torch.randn(2, 3), torch.zeros(2, 3)))
    assert program.roles.carried == {} and len(program.roles.enters(Entering.INPUT)) == 2
    cell = replace(program, carried={program.inputs[1].name: program.outputs[1].name})
    (node,) = cell.roles.enters(Entering.STATE)
    assert cell.roles.carried == {node: 1}
    assert cell.roles.leaving == (
        Leaves(Leaving.OUTPUT, program.outputs[0].name),
        Leaves(Leaving.UPDATED, program.inputs[1].name),
    )
