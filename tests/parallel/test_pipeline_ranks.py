"""A pipeline on gloo ranks, alone and beside the other axes, is training in one process; its peak is the one
simulated task by task.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from captured_once import captured_once
from rank_helpers import (
    STEPS,
    WIDTH,
    Inputs,
    Tied,
    Trained,
    batch_of,
    model_of,
    optimizer_of,
    part,
    trained,
    worst_error,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import effcompile
from effcompile.compiler.parallel.lower_stages import stages_asked
from effcompile.core import torch_compat_memory
from effcompile.core.errors import EffcompileError, FormatError, GuardError, InfeasibleError, UsageError
from effcompile.core.goal import Goal
from effcompile.proof.parallel.processes import on_ranks
from effcompile.proof.training.alive import alive_bytes
from effcompile.search.request import Asked, Task

RELATIVE, EXAMPLES = 1e-5, 4
#: Bytes within which the small model below cannot be replicated.
ROOM = 115_000
CHECKPOINT = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Found:
    losses: list[float]
    errors: list[tuple[float, str]]
    names: list[str]
    peaks: list[int]
    predicted: int
    placements: set[str]
    decided: dict[str, str]
    frozen: str


def deep(name: str, layers: int) -> nn.Module:
    """A model of so many layers."""
    model = model_of(name)
    if name == "tied":
        return Tied(layers).train()
    config = model.config
    assert isinstance(config, hf.PretrainedConfig)
    config.num_hidden_layers = layers
    return type(model)(config).train() if layers != 2 else model


@functools.cache
def subject(name: str, layers: int) -> tuple[nn.Module, Inputs, Trained]:
    model, inputs = deep(name, layers), batch_of(name, EXAMPLES)
    return model, inputs, trained(model, inputs)


def model_and_wanted(name: str, examples: int) -> tuple[nn.Module, Inputs, Trained]:
    model, inputs = model_of(name), batch_of(name, examples)
    return model, inputs, trained(model, inputs)


Axes = dict[str, int]


def run(
    rank: int,
    model: nn.Module,
    inputs: Inputs,
    wanted: Trained,
    axes: Axes,
    passes: list[str],
    memory: int | None,
) -> Found:
    """STEPS steps of this rank's stages, by the user's way in."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    ranks, dp = mesh.size(), axes.get("dp", 1)
    mine = part(inputs, mesh["dp"].get_local_rank() if dp > 1 else 0, dp)
    planned = effcompile.optimize(
        model, inputs=mine, mode="training", mesh=mesh, passes=[CHECKPOINT, *passes], memory=memory
    )
    optimizer = optimizer_of(planned)
    base = alive_bytes(
        "cpu",
        planned,
        mine,
        [c for chunk in planned.runner.chunks.values() for c in chunk.runner.step.constants.values()],
    )
    losses, errors, peaks = [], [], []
    for at in range(STEPS):
        with torch_compat_memory.watched_memory("cpu") as peak:
            loss = planned.runner.loss((), mine)
            loss.backward()
        peaks.append(base + peak())
        total = loss.detach().clone()
        del loss
        dist.all_reduce(total)
        losses.append(float(total) / ranks)
        names = [n for n, _ in planned.named_parameters()]
        errors.append(
            worst_error(
                {n: p.grad for n, p in planned.named_parameters()},
                {n: wanted.gradients[at][n] for n in names},
            )
        )
        optimizer.step()
        optimizer.zero_grad()
        errors.append(
            worst_error(dict(planned.named_parameters()), {n: wanted.parameters[at][n] for n in names})
        )
    predicted = planned.plan.predicted.peak_bytes
    assert predicted is not None
    placements = {str(p.placements) for p in planned.parameters() if isinstance(p, DTensor)}
    decided = {d.kind: d.option for d in planned.plan.decisions}
    if axes.get("tp", 1) > 1:
        for name, parameter in planned.named_parameters():
            assert parameter.placements != (Replicate(),) or equal_everywhere(
                parameter.to_local().detach(), mesh["tp"].get_group()
            ), name
    return Found(
        losses=losses, errors=errors, names=names, peaks=peaks, predicted=predicted, placements=placements,
        decided=decided, frozen=frozen_on_the_last(planned, mine) if ranks > 2 else ""
    )  # fmt: skip


def frozen_on_the_last(planned: nn.Module, mine: Inputs) -> str:
    """What each rank says once a parameter is frozen on the last one alone."""
    if dist.get_rank() == dist.get_world_size() - 1:
        planned.head.weight.requires_grad_(False)
    with pytest.raises(GuardError) as refused:
        planned(**mine).loss.backward()
    return str(refused.value)


def equal_everywhere(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return all(torch.equal(tensor, other) for other in found)


def check(found: list[Found], wanted: Trained, budget: int | None = None) -> None:
    for rank in found:
        assert rank.losses == pytest.approx(wanted.losses, rel=RELATIVE)
        assert max(rank.errors)[0] < RELATIVE, max(rank.errors)
        assert max(rank.peaks) <= 1.02 * rank.predicted, (rank.peaks, rank.predicted)
        assert max(rank.peaks) >= 0.98 * rank.predicted, (rank.peaks, rank.predicted)
        assert budget is None or max(rank.peaks) <= budget
    assert {name for rank in found for name in rank.names} == set(wanted.gradients[0])


#: 1F1B, of a mixture, whose tokens are sorted by expert; two stages a rank, a tied table on the first and the
#: last.
CASES: list[tuple[str, int, list[str]]] = [
    ("mixtral", 2, []),
    ("tied", 4, ["pipeline.schedule=interleaved", "pipeline.stages=2"]),
]


@pytest.mark.parametrize(("name", "layers", "passes"), CASES)
def test_stages_train_as_one_process(name: str, layers: int, passes: list[str]) -> None:
    """Losses, every gradient and every parameter over three steps; the first alone hides tied weights that
    are not summed.

    What each rank would capture is captured here once and forked with the ranks; in the tests below each
    captures it itself.
    """
    model, inputs, wanted = subject(name, layers)
    asked: Asked = {"goal": Goal(mode="training"), "passes": [CHECKPOINT, *passes, "pipeline.ranks=2"]}
    with captured_once():
        stages_asked(Task.of(model, (), inputs, asked))
        found = on_ranks(run, 2, model, inputs, wanted, {"pp": 2}, passes, None)
    check(found, wanted)
    assert bool(tied(found)) == (name != "mixtral"), tied(found)


#: Two ranks along each of two axes: what is decided beside the stages, and how parameters lie.
HALVES, SHARDS = {"(Shard(dim=0),)", "(Shard(dim=1),)", "(Replicate(),)"}, {"(Shard(dim=0),)"}
UNEVEN = ["pipeline.micro_batches=2", "pipeline.cuts=2,1"]
PAIRS: list[tuple[str, Axes, list[str], int | None, str, set[str]]] = [
    ("tied", {"dp": 2, "pp": 2}, UNEVEN, None, "pipeline", set()),
    ("tied", {"dp": 2, "pp": 2}, UNEVEN, ROOM, "data parallel", SHARDS),
    ("tied", {"pp": 2, "tp": 2}, UNEVEN, None, "tensor parallelism", HALVES),
]


#: What all four say where the last one freezes its head: the table that it is tied to is on both stages.
FROZEN = "{} gets no gradient on Rank 3 and gets one on Ranks 0, 1, 2"
TABLE = "table.weight"


def pairs(rank: int, given: list[tuple[nn.Module, Inputs, Trained]]) -> list[Found]:
    asked = [(axes, passes, memory) for _, axes, passes, memory, *_ in PAIRS]
    with captured_once():  # of one batch, and neither with an edit
        found = [
            run(rank, copy.deepcopy(model), *rest, *asked[at]) for at, (model, *rest) in enumerate(given[:2])
        ]
    (model, *rest) = given[2]
    return [*found, run(rank, copy.deepcopy(model), *rest, *asked[2])]


def test_stages_beside_another_axis_train_as_one_process() -> None:
    """Replicated beside other examples; sharded where that is too much, in the form that fits; with half of
    the neurons. Seven models on each of these meshes: test_every_model_on_every_mesh.py.
    """
    given = [model_and_wanted(name, EXAMPLES * axes.get("dp", 1)) for name, axes, *_ in PAIRS]
    found = on_ranks(pairs, 4, given)
    for at, (name, _, _, memory, kind, placements) in enumerate(PAIRS):
        of_one = [rank[at] for rank in found]
        assert all(rank.frozen.startswith(FROZEN.format(TABLE)) for rank in of_one), of_one[0].frozen
        check(of_one, given[at][2], memory)
        for rank in of_one:
            assert (rank.placements, rank.decided.keys() >= {"pipeline", kind}) == (placements, True), (
                name,
                rank.decided,
            )
    assert any("gather" in option for rank in found for option in rank[1].decided.values())


def tied(found: list[Found]) -> list[str]:
    """What the first two ranks both have."""
    return [name for name in found[0].names if name in found[1].names]


def refusals(rank: int, model: nn.Module, inputs: Inputs) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    found = {}
    for name, passes, memory in (
        ("stages", ["pipeline.schedule=interleaved", "pipeline.stages=2"], None),
        ("memory", [], 1000),
    ):
        with captured_once(), pytest.raises(EffcompileError) as refused:
            effcompile.optimize(
                model, inputs=inputs, mode="training", mesh=mesh, passes=[CHECKPOINT, *passes], memory=memory
            )
        needed = refused.value.needed if isinstance(refused.value, InfeasibleError) else 0
        found[name] = f"{type(refused.value).__name__} {needed}: {refused.value}"
    return found


def test_what_no_pipeline_can_be_is_told_and_the_least_budget_is_held() -> None:
    model, inputs, wanted = subject("tied", 3)
    found = on_ranks(refusals, 2, model, inputs)
    for rank in found:
        assert "4 stages are more than the model's 3 layers" in rank["stages"]
        assert rank["memory"].startswith("InfeasibleError")
    budget = max(int(rank["memory"].split(":")[0].split()[1]) for rank in found)
    within = on_ranks(run, 2, model, inputs, wanted, {"pp": 2}, [], budget)
    check(within, wanted, budget)
    assert tied(within) == [TABLE]


@dataclass(frozen=True, kw_only=True)
class Updated:
    losses: list[float]
    norms: list[float]
    plan: effcompile.Plan
    states: int
    without: str


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def updated(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs, clip: Callable[..., Tensor]
) -> tuple[list[float], list[float]]:
    """(losses, norms of all gradients before they are clipped) of STEPS steps."""
    losses, norms = [], []
    for _ in range(STEPS):
        loss = model(**inputs).loss
        loss.backward()
        norms.append(float(clip(0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def with_states(rank: int, model: nn.Module, inputs: Inputs) -> Updated:
    """AdamW made by the plan, gradients clipped by the norm of all stages; what is said where the plan is
    applied without an optimizer.
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    asked = {"inputs": dict(inputs), "mode": "training", "mesh": mesh, "passes": [CHECKPOINT, *UNEVEN]}
    again = copy.deepcopy(model)
    planned = effcompile.optimize(model, optimizer=adamw, **asked)
    whole = {name: value + 1 for name, value in again.state_dict().items()}
    twin = copy.deepcopy(planned)
    twin.load_state_dict(whole)
    assert all(torch.equal(value, whole[name]) for name, value in twin.state_dict().items())
    for put in (fully_shard, DistributedDataParallel):
        with pytest.raises(UsageError, match="planned for a mesh cannot be sharded or replicated once more"):
            put(planned)
    twin = copy.deepcopy(planned)
    optimizer = planned.optimizer
    assert optimizer is not None
    losses, norms = updated(planned, optimizer, inputs, planned.clip_grad_norm_)
    assert updated(twin, adamw(list(twin.parameters())), inputs, twin.clip_grad_norm_) == (losses, norms)
    states = sum(v.numel() * v.element_size() for state in optimizer.state.values() for v in state.values())
    # a plan says what its rank has: one of them is for all
    (plan,) = dist.broadcast_object_list(given := [planned.plan]) or given
    with pytest.raises(FormatError) as refused:
        effcompile.optimize(again, inputs=dict(inputs), mesh=mesh, plan=plan)
    return Updated(losses=losses, norms=norms, plan=planned.plan, states=states, without=str(refused.value))


def test_states_of_stages_count_and_all_stages_are_clipped_together() -> None:
    """A table that two stages have counts once in the norm, and its states on both ranks."""
    model, inputs = model_of("tied"), batch_of("tied", EXAMPLES)
    eager = copy.deepcopy(model)
    wanted = updated(
        eager,
        adamw(list(eager.parameters())),
        inputs,
        partial(nn.utils.clip_grad_norm_, list(eager.parameters())),
    )
    with captured_once():
        found = on_ranks(with_states, 2, model, inputs)
    for rank in found:
        assert rank.losses == pytest.approx(wanted[0], rel=RELATIVE)
        assert rank.norms == pytest.approx(wanted[1], rel=RELATIVE)
        (states,) = [d for d in rank.plan.decisions if d.kind == "optimizer states"]
        assert states.cost.bytes_kept == pytest.approx(rank.states, rel=0.02)
        assert "The plan holds optimizer states: give the optimizer, too" in rank.without
    measured, predicted = found[0].plan.measured, [rank.plan.predicted.peak_bytes or 0 for rank in found]
    assert measured is not None
    assert measured.peak_bytes == pytest.approx(max(predicted), rel=0.02)  # of the rank with two layers
    assert predicted[1] < predicted[0]


def test_what_no_pipeline_can_be_is_told_without_ranks() -> None:
    model, inputs, _ = subject("tied", 3)
    refused = {
        r"A batch of 4 does not divide into 3 micro-batches": (model, inputs, ["pipeline.micro_batches=3"]),
        r"hold 4 layers; the model has 3": (model, inputs, ["pipeline.cuts=2,2"]),
    }
    with captured_once():
        for said, (given, batch, passes) in refused.items():
            with pytest.raises(EffcompileError, match=said):
                effcompile.plan(
                    given, batch, mode="training", passes=[CHECKPOINT, "pipeline.ranks=2", *passes]
                )


class Dropping(nn.Module):
    """Three layers that drop, and, before them, an input that does: what no parameter made crosses a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        first = y = self.drop(x)
        for layer in self.layers:
            y = self.drop(layer(y).tanh())
        return (y + first).square().mean()


def dropping() -> Dropping:
    torch.manual_seed(0)
    return Dropping().train()


def seeded_as_stages(model: Dropping, x: Tensor, parts: int, cut: int) -> list[float]:
    """The losses of micro-batches whose two stages are seeded one by one, in one process."""
    optimizer, losses, seed = optimizer_of(model), [], [0]
    model.layers[cut - 1].register_forward_hook(lambda *_: torch.manual_seed(seed[0] + 1) and None)
    torch.manual_seed(5)
    for _ in range(STEPS):
        base, total = int(torch.randint(2**62, ())), 0.0
        with torch.random.fork_rng():
            for i, part_of_x in enumerate(x.chunk(parts)):
                seed[0] = base + 2 * i
                torch.manual_seed(seed[0])
                loss = model(part_of_x) / parts
                loss.backward()
                total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def with_dropout(rank: int, x: Tensor) -> tuple[list[float], effcompile.Plan]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    planned = effcompile.optimize(
        dropping(), inputs=(x,), mode="training", mesh=mesh, passes=[CHECKPOINT, *UNEVEN]
    )
    optimizer, losses = optimizer_of(planned), []
    torch.manual_seed(5)
    for _ in range(STEPS):
        loss = planned(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, planned.plan


def test_dropout_in_stages_is_that_of_micro_batches_with_seeds() -> None:
    x = torch.randn(EXAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    wanted = seeded_as_stages(dropping(), x, 2, 2)
    found = on_ranks(with_dropout, 2, x)
    most = max(plan.predicted.peak_bytes or 0 for _, plan in found)
    for losses, plan in found:
        assert losses == pytest.approx(wanted, rel=RELATIVE)
        assert [check.passed for check in plan.checks] == [True]
        assert plan.measured is not None
        assert plan.measured.peak_bytes == pytest.approx(most, rel=0.02)
