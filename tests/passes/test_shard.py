"""Where collectives stand in a step: what is gathered for whom, what is scattered when, and what
is refused.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, fx, nn

from effcompile.capture.source import Source
from effcompile.capture.training import capture_training
from effcompile.core.errors import FormatError, UsageError
from effcompile.ir.resident import storage_bytes
from effcompile.ir.step import Step
from effcompile.ops import collectives
from effcompile.passes import load_training_passes
from effcompile.passes.training.base import Case, StepChoice, StepOption
from effcompile.passes.training.places import neighbours
from effcompile.passes.training.shard import BY_BLOCK, BY_WEIGHT, KIND, REPLICATED, SITE, Shard, spread_over
from effcompile.passes.training.step_edit import Refusal


class Model(nn.Module):
    """Two blocks, a table that is tied to the head, a frozen scale without an axis; 7 rows do not divide by
    2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * self.scale
        for layer in self.layers:
            x = x + layer(x)
        return (x @ self.table.weight.t()).square().mean()


class Framed(nn.Module):
    """A block between a large table with small positions and a small norm with a large head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(40, 4), nn.Embedding(3, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 40, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.positions(torch.arange(3))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x)).square().mean()


@pytest.fixture(scope="module")
def subject() -> tuple[Model, Step]:
    model, ids = Model(), torch.arange(6).view(2, 3)
    return model, capture_training(model, (ids,))


def calls(step: Step, target: object) -> list[fx.Node]:
    return [node for node in step.graph.nodes if node.target is target]


def gathered(step: Step) -> list[list[str]]:
    """The parameters of every gather."""
    return [[step.parameters[shard] for shard in node.args[0]] for node in calls(step, collectives.GATHER)]


def test_a_block_is_one_launch_each_way(subject: tuple[Model, Step]) -> None:
    model, step = subject
    made = spread_over(step, model, 2, BY_BLOCK)
    blocks = [[f"layers.{i}.{j}.{name}" for j in (0, 2) for name in ("weight", "bias")] for i in range(2)]
    assert [sorted(names) for names in gathered(made)[1:3]] == [sorted(names) for names in blocks]
    assert Counter(len(node.args[0]) for node in calls(made, collectives.SCATTER_MEAN))[4] == 2
    assert len(calls(made, collectives.MEAN)) == 1  # of the scale, which has no axis


def test_what_is_small_outside_of_blocks_goes_with_its_neighbour() -> None:
    """Positions with the table, the norm with the head; of the gradients, too, the head's of which waits for
    nobody.
    """
    made = spread_over(capture_training(model := Framed(), (torch.arange(6).view(2, 3),)), model, 2, BY_BLOCK)
    norm = {"norm.weight", "norm.bias"}
    assert [set(names) for names in gathered(made)] == [
        {"table.weight", "positions.weight"},
        {"layers.0.weight", "layers.0.bias"},
        {*norm, "head.weight"},
    ]
    handed = {name: node.args[0] for name, node in made.gradients.items()}  # of the launch an item
    together = {frozenset(n for n in handed if handed[n] is launch) for launch in handed.values()}
    assert together == {
        frozenset({"table.weight", "positions.weight"}),
        frozenset({"layers.0.weight", "layers.0.bias"}),
        frozenset({*norm, "head.weight"}),
    }


@pytest.mark.parametrize(
    ("sizes", "together", "waiting"),
    [
        ({"a": 80, "b": 10, "c": 80}, [["a", "b"], ["c"]], None),
        ({"a": 10, "b": 80, "c": 10}, [["a", "b", "c"]], None),
        ({"a": 10, "b": 70}, [["a"], ["b"]], None),
        ({}, [], None),
        ({"a": 10, "l.0": 9, "b": 80}, [["a"], ["l.0"], ["b"]], [["l.0"], ["a", "b"]]),
        ({"a": 80, "l.0": 9, "b": 10}, [["a"], ["l.0"], ["b"]], None),  # the large one would wait
    ],
)
def test_neighbours(
    sizes: dict[str, int], together: list[list[str]], waiting: list[list[str]] | None
) -> None:
    assert neighbours(sizes) == together
    assert neighbours(sizes, waiting=True) == (together if waiting is None else waiting)


def test_a_tied_weight_is_gathered_for_each_of_its_readers(subject: tuple[Model, Step]) -> None:
    """Or its storage would be alive from the first to the last of them."""
    model, step = subject
    for form in (BY_BLOCK, BY_WEIGHT):
        assert (
            Counter(name for names in gathered(spread_over(step, model, 2, form)) for name in names)[
                "table.weight"
            ]
            == 2
        )


def test_one_by_one_is_a_launch_for_each(subject: tuple[Model, Step]) -> None:
    model, step = subject
    made = spread_over(step, model, 2, BY_WEIGHT)
    assert {len(names) for names in gathered(made)} == {1}
    assert {len(node.args[0]) for node in calls(made, collectives.SCATTER_MEAN)} == {1}


def test_shards_have_padded_rows_and_their_bytes(subject: tuple[Model, Step]) -> None:
    model, step = subject
    made = spread_over(step, model, 2, BY_BLOCK)
    shapes = {name: tuple(node.meta["val"].shape) for node, name in made.parameters.items()}
    assert shapes["table.weight"] == (4, 4)
    assert shapes["scale"] == ()
    assert {name: tuple(node.meta["val"].shape) for name, node in made.gradients.items()} == shapes
    assert made.spread is not None
    assert made.spread.shapes["table.weight"] == (7, 4)
    whole = storage_bytes(p for p in model.parameters() if p.dim())
    padded = 4 * sum(torch.Size(shape).numel() for name, shape in shapes.items() if name != "scale")
    assert step.resident_bytes is not None
    assert made.resident_bytes == step.resident_bytes - whole + padded


def test_replicated_only_averages(subject: tuple[Model, Step]) -> None:
    model, step = subject
    made = spread_over(step, model, 2, REPLICATED)
    assert not gathered(made)
    assert not calls(made, collectives.SCATTER_MEAN)
    assert sum(len(node.args[0]) for node in calls(made, collectives.MEAN)) == len(step.gradients)
    assert made.resident_bytes == step.resident_bytes


def test_the_given_step_stays_as_it_is(subject: tuple[Model, Step]) -> None:
    model, step = subject
    before = [
        (node.name, node.target, getattr(node.meta.get("val"), "shape", None)) for node in step.graph.nodes
    ]
    spread_over(step, model, 2, BY_BLOCK)
    assert [
        (node.name, node.target, getattr(node.meta.get("val"), "shape", None)) for node in step.graph.nodes
    ] == before
    assert step.spread is None


def test_narrow_numbers_cross_the_link() -> None:
    """A cast that is a parameter's reader stands before the gather."""
    model, ids = Model(), torch.arange(6).view(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        step = capture_training(model, (ids,))
    made = spread_over(step, model, 2, BY_WEIGHT)
    dtypes = {
        node.args[0][0].meta["val"].dtype for node in calls(made, collectives.GATHER) if node.args[1] == [6]
    }
    assert dtypes == {torch.bfloat16}
    assert all(node.meta["val"].dtype == torch.float32 for node in made.gradients.values())


# ------------------------------------------------------------------ as a pass


def case_of(subject: tuple[Model, Step], **more: object) -> Case:
    model, step = subject
    return Case(step=step, source=Source(model=model, args=(torch.arange(6).view(2, 3),), kwargs={}), **more)  # type: ignore[arg-type]


def choice_of(subject: tuple[Model, Step], each: Shard) -> StepChoice:
    (choice,) = each.propose(case_of(subject), None)  # type: ignore[arg-type]
    assert isinstance(choice, StepChoice)
    return choice


def test_it_proposes_nothing_for_one_rank(subject: tuple[Model, Step]) -> None:
    assert not list(Shard().propose(case_of(subject), None))  # type: ignore[arg-type]


def test_it_proposes_the_forms_that_are_asked_for(subject: tuple[Model, Step]) -> None:
    assert [o.name for o in choice_of(subject, Shard(ranks=2)).options] == [REPLICATED, BY_BLOCK, BY_WEIGHT]
    asked = choice_of(subject, Shard(ranks=4, forms=("weight",)))
    assert [(o.name, o.settings) for o in asked.options] == [(BY_WEIGHT, {"ranks": 4})]
    assert asked.baseline == BY_WEIGHT


def test_a_saved_choice_makes_the_same_step(subject: tuple[Model, Step]) -> None:
    option = StepOption(name=BY_BLOCK, settings={"ranks": 2})
    choice = StepChoice(site=SITE, kind=KIND, baseline=REPLICATED, options=(option,))
    made = Shard().apply(case_of(subject), choice, option)
    assert gathered(made.step) == gathered(spread_over(subject[1], subject[0], 2, BY_BLOCK))
    assert "2 data-parallel ranks" in str(made.notes[0])
    with pytest.raises(FormatError, match="'halved' on 2 ranks"):
        Shard().apply(case_of(subject), choice, StepOption(name="halved", settings={"ranks": 2}))


def test_a_scaled_loss_is_refused(subject: tuple[Model, Step]) -> None:
    option = choice_of(subject, Shard(ranks=2)).options[1]
    with pytest.raises(Refusal, match="an overflow is seen on the rank that holds the gradient alone"):
        Shard(ranks=2)._made(case_of(subject, scaled=True), option.name, 2)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("shard.ranks=0", "shard.ranks = 0: give the number"),
        ("shard.forms=half", "'half' is not known. Choose among: replicated, states, block, weight"),
        ("shard.forms=", "shard.forms is empty"),
    ],
)
def test_wrong_settings_are_told(spec: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_training_passes([spec])
