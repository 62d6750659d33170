"""Steps cut into blocks: a partition in a runnable order, by the user's modules, with equal problems for
equal layers.
"""

from itertools import pairwise

import pytest
import torch
from torch import nn
from train_helpers import MODELS, cut_model, cut_step, gpt2

from effcompile.capture import capture_training
from effcompile.schedules import cuts
from effcompile.schedules.blocks import reads_of, split


@pytest.mark.parametrize("name", MODELS)
def test_each_node_lies_in_one_block_and_never_before_what_it_reads(name: str) -> None:
    cut = cut_model(name)[2]
    forward, backward = split(cut.step)
    placed = [node for block in cut.blocks for node in (*block.forward, *block.backward)]
    assert len(placed) == len(set(placed)) and set(placed) == {*forward, *backward}
    order = [n for block in cut.blocks for n in block.forward] + [
        n for block in reversed(cut.blocks) for n in block.backward
    ]
    position = {node: i for i, node in enumerate(order)}
    for node, at in position.items():
        assert all(position[arg] < at for arg in node.all_input_nodes if arg in position), node
    assert not any(set(node.all_input_nodes) & {*backward, *cut.step.tangents} for node in forward)


@pytest.mark.parametrize("name", MODELS)
def test_the_problems_name_every_storage_once_and_only_known_ones(name: str) -> None:
    cut = cut_model(name)[2]
    owned: list[int] = []
    for block in cut.blocks:
        problem = block.problem
        assert {*problem.entering, *problem.leaving} <= set(problem.nbytes) == set(block.values)
        assert all({*op.reads, *op.makes} <= set(problem.nbytes) and op.seconds > 0 for op in problem.forward)
        assert all(set(step.reads) <= set(problem.nbytes) for step in problem.backward)
        assert problem.nbytes == {value: cut.held.nbytes[s] for value, s in block.values.items()}
        assert [block.values[value] for value in problem.entering] == list(block.entering)
        assert block.stage.entering_bytes == sum(cut.held.nbytes[s] for s in block.entering)
        owned += [s for value, s in block.values.items() if value not in problem.entering]
    assert len(owned) == len(set(owned)) and not cut.shared & set(owned)
    made = {s for block in cut.blocks for node in block.forward for s in cut.held.made[node]}
    assert made == set(owned) | cut.shared


class Unbound(nn.Module):
    """Layers of which some rows are used: their backward stacks gradients with zeros, which nothing of the
    forward makes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x) + x.unbind(1)[0].unsqueeze(1))
        return x.mean()


@pytest.mark.parametrize("name", [*MODELS, "unbound"])
def test_what_a_blocks_backward_reads_is_its_own_or_kept_in_any_case(name: str) -> None:
    made = Unbound().train() if name == "unbound" else None
    cut = (
        cut_model(name)[2] if made is None else cut_step(capture_training(made, (torch.randn(3, 5, 4),), {}))
    )
    in_forward = {s for block in cut.blocks for node in block.forward for s in cut.held.made[node]}
    for block in cut.blocks:
        read = {s for node in block.backward for s in reads_of(node, cut.held)} & in_forward
        assert read <= set(block.values.values()) | cut.shared, block.name


class Gated(nn.Module):
    """Layers that all read one table, made before the first, and compute in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, hidden = torch.sigmoid(x), x
        for layer in self.layers:
            hidden = torch.sin(hidden + layer(hidden.bfloat16()).float() * gate)
        return hidden.mean()


def test_the_backward_runs_as_autograd_has_it() -> None:
    """Gradients that read no value do not run ahead of their block, and nobody waits for what is kept in any
    case.
    """
    cut = cut_step(capture_training(Gated().train(), (torch.randn(3, 5, 4),), {}), measure=False)
    order = [node for block in reversed(cut.blocks) for node in block.backward]
    graph = {node: at for at, node in enumerate(cut.step.graph.nodes)}
    assert order == sorted(order, key=graph.__getitem__)
    assert all(len(block.backward) > 5 for block in cut.blocks if block.name.startswith("layers"))
    gate = {
        s
        for node in cut.step.graph.nodes
        if node.target is torch.ops.aten.sigmoid.default
        for s in cut.held.made[node]
    }
    assert {s for s in cut.shared if cut.held.nbytes[s] > 4} == gate


def test_equal_layers_are_of_one_kind_and_unequal_ones_are_not() -> None:
    model, batch = gpt2(layers=4)
    blocks = cut_step(capture_training(model, (), batch), measure=False).blocks
    assert [block.name for block in blocks] == ["start", *(f"transformer.h.{i}" for i in range(4)), "end"]
    assert (
        len({block.stage.kind for block in blocks[1:5]}) == 1
        and len({block.stage.kind for block in blocks}) == 3
    )

    model.transformer.h[2].mlp.act = nn.ReLU()
    kinds = [
        block.stage.kind for block in cut_step(capture_training(model, (), batch), measure=False).blocks[1:5]
    ]
    assert kinds[0] == kinds[1] == kinds[3] != kinds[2]


def test_the_residual_stream_enters_each_layer_and_leaves_the_one_before() -> None:
    blocks = cut_model("gpt2")[2].blocks
    for before, after in pairwise(blocks):
        assert len(after.entering) == 1 and after.entering[0] in before.leaving
    skipping = cut_model("skips")[2]
    assert {*skipping.blocks[0].leaving} & skipping.shared, (
        "what layers 1 and 2 both read is kept in any case"
    )


def test_the_bases_count_parameters_buffers_inputs_and_the_tangent() -> None:
    model, batch, cut = cut_model("gpt2")
    given = [*model.parameters(), *batch.values()]
    buffers = [model.get_buffer(name) for name in cut.step.buffers.values()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*given, *buffers)}
    assert cut.given_bytes == sum(storages.values()) and cut.base_bytes == cut.given_bytes + 4


def test_blocks_that_are_too_large_are_cut_where_little_crosses() -> None:
    blocks = cut_model("albert")[2].blocks
    sizes = [sum(bool(cut_model("albert")[2].held.made[n]) for n in block.forward) for block in blocks]
    assert max(sizes) <= 1.25 * cuts.LARGEST  # what is made for the backward alone joins after the cut
    assert len({block.name for block in blocks}) == len(blocks)
    assert any("#" in block.name for block in blocks), (
        "one shared layer, run three times: no module tells its runs apart"
    )


def test_a_model_without_numbered_modules_is_one_block() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x).relu()).mean()

    (block,) = cut_step(capture_training(Plain(), (torch.randn(3, 4),), {})).blocks
    assert block.name == "model" and not block.entering and not block.leaving
