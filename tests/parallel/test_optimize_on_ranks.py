"""The user's way in, on forked gloo ranks: what they see of their model, and what is said where ranks do not
agree.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import effcompile
from effcompile.backends.torch.ranks import Ranks, made_alike
from effcompile.compiler.parallel.axes import ranks_of
from effcompile.compiler.parallel.verify import verify_plan
from effcompile.core.errors import EffcompileError, InfeasibleError, UsageError
from effcompile.ir.plan import Plan
from effcompile.ir.step import Spread
from effcompile.passes.training.shard import BY_BLOCK, STATES_DIVIDED
from effcompile.proof.parallel.processes import on_ranks

ROWS, WIDTH = 21, 16
PASSES = ["checkpoint", "shard.ranks=2", "shard.forms=block"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Tiny(nn.Module):
    """A table that is tied to the head, and two blocks."""

    def __init__(self, width: int = WIDTH, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.table = nn.Embedding(ROWS, width)
        self.layers = nn.ModuleList(Block() for _ in range(2)) if width == WIDTH else nn.ModuleList()
        self.head = nn.Linear(width, ROWS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(
            self.head(x[:, :-1] * self.scale).flatten(0, 1), ids[:, 1:].flatten()
        )


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny().train()


def batch(ranks: int = 2) -> Tensor:
    return torch.randint(0, ROWS, (4 * ranks, 9), generator=torch.Generator().manual_seed(1))


def mine(rank: int, ranks: int = 2) -> Tensor:
    return batch(ranks).chunk(ranks)[rank].clone()


def mesh_of(ranks: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))


@pytest.fixture(scope="module")
def free() -> Plan:
    """For two ranks with all kept: gathers too."""
    return effcompile.plan(tiny(), (mine(0),), mode="training", passes=PASSES)


@pytest.fixture(scope="module")
def plan(free: Plan) -> Plan:
    """The same with little more than the least memory: a gather is dear on a CPU."""
    with pytest.raises(InfeasibleError) as error:
        effcompile.plan(tiny(), (mine(0),), mode="training", passes=PASSES, memory=1000)
    least, most = error.value.needed, free.predicted.peak_bytes
    assert most is not None
    return effcompile.plan(tiny(), (mine(0),), mode="training", passes=PASSES, memory=(7 * least + most) // 8)


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, steps: int = 3) -> list[float]:
    """Losses, averaged over ranks where there are any."""
    losses = []
    for _ in range(steps):
        loss = model(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(float(total))
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def as_one_process(steps: int = 3) -> list[float]:
    model = tiny()
    return steps_of(model, adam(model), batch(), steps)


def train(rank: int, plan: Plan, folder: Path) -> Mapping[str, Any]:
    torch.manual_seed(rank)  # the ranks' own values differ: the first one's count
    model = Tiny().train() if rank else tiny()
    planned = effcompile.optimize(model, inputs=(mine(rank),), plan=plan, mesh=mesh_of())
    optimizer = adam(planned)
    placed = [isinstance(p, DTensor) and p.placements == (Shard(0),) for p in planned.parameters()]
    tied = planned.head.weight is planned.table.weight
    losses = steps_of(planned, optimizer, mine(rank), 2)
    names = list(planned.state_dict())
    state = dict(zip(("model", "optimizer"), get_state_dict(planned, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)
    losses += steps_of(planned, optimizer, mine(rank), 1)
    with torch.no_grad():
        planned.eval()
        evaluated = planned(batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = refused(lambda: planned.train()(mine(rank)))
    return {
        "placed": placed,
        "tied": tied,
        "losses": losses,
        "names": names,
        "plan": planned.plan,
        "evaluated": float(evaluated),
        "autocast": autocast,
    }


def resumed(rank: int, plan: Plan, folder: Path) -> list[float]:
    planned = effcompile.optimize(tiny(), inputs=(mine(rank),), plan=plan, mesh=mesh_of())
    optimizer = adam(planned)
    state = dict(zip(("model", "optimizer"), get_state_dict(planned, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(planned, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return steps_of(planned, optimizer, mine(rank), 1)


def test_ranks_train_clip_save_and_go_on(plan: Plan, tmp_path: Path) -> None:
    """DTensors with stock AdamW, clipping and DCP; a run that is taken up again goes on as the one that was
    not interrupted.
    """
    assert ranks_of(plan) == 2
    found = on_ranks(train, 2, plan, tmp_path / "step")
    wanted = as_one_process()
    for rank in found:
        assert all(rank["placed"])
        assert rank["tied"]
        assert rank["losses"] == pytest.approx(wanted, rel=1e-5)
        assert rank["autocast"].startswith("AutocastError: ")
        assert rank["names"] == list(tiny().state_dict())
        made = rank["plan"]
        assert [check.passed for check in made.checks] == [True]
        assert made.measured.peak_bytes <= made.goal.memory
        assert made.measured.peak_bytes == pytest.approx(made.predicted.peak_bytes, rel=0.02)
        assert any(str(note).startswith("measured peak of each rank") for note in made.notes)
    model = tiny()
    steps_of(model, adam(model), batch(), 3)
    assert found[0]["evaluated"] == pytest.approx(float(model.eval()(batch())), rel=1e-5)
    for losses in on_ranks(resumed, 2, plan, tmp_path / "step"):
        assert losses == pytest.approx(wanted[2:], rel=1e-5)
    alone = tiny()  # fewer ranks take the checkpoint, too
    dcp.load({"model": alone.state_dict()}, checkpoint_id=tmp_path / "step")
    assert float(alone(batch()).detach()) == pytest.approx(wanted[2], rel=1e-5)


def plan_there(rank: int) -> Plan:
    return effcompile.optimize(
        tiny(),
        inputs=(mine(rank),),
        mode="training",
        mesh=mesh_of(),
        passes=["checkpoint", "shard.forms=block"],
    ).plan


def test_the_first_rank_plans_for_all() -> None:
    first, second = on_ranks(plan_there, 2)
    assert first.decisions == second.decisions
    assert [d.option for d in first.decisions if d.kind == "data parallel"] == [BY_BLOCK]


def test_less_memory_gathers_again(free: Plan, plan: Plan) -> None:
    """What is kept with much memory is gathered again with less: ZeRO-2 and ZeRO-3, block by block."""
    again = [
        d.option
        for d in plan.decisions
        if d.option == "recompute all" or ("gather" in d.option and "recompute" in d.option)
    ]
    assert again
    assert not [d for d in free.decisions if "recompute" in d.option]


# ------------------------------------------------------------------ what is wrong is said


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except EffcompileError as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def others(rank: int, plan: Plan) -> dict[str, str]:
    """What each way to disagree says."""
    mesh, ids = mesh_of(), mine(rank)
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))

    def asked(
        model: nn.Module | None = None, inputs: Tensor = ids, mesh: DeviceMesh = mesh, **more: Any
    ) -> str:
        return refused(
            lambda: effcompile.optimize(model or tiny(), inputs=(inputs,), mode="training", mesh=mesh, **more)
        )

    frozen, evaluated = tiny(), tiny()
    frozen.layers[1].up.bias.requires_grad_(not rank)
    evaluated.layers[0].train(not rank)
    counting = tiny()
    if rank:
        counting.register_buffer("seen", torch.zeros(2))
    along = {axis: init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)) for axis in ("tp", "cp")}
    found = {
        "models": asked(Tiny(width=8 if rank else WIDTH)),
        "frozen": asked(frozen),
        "evaluated": asked(evaluated),
        "buffers": asked(counting),
        "inputs": asked(inputs=ids[: 4 - rank]),
        "requests": asked(memory=f"{rank + 1}GiB"),
        "optimizers": asked(optimizer=[adamw, torch.optim.AdamW][rank]),
        "forwards": asked(Tiny(scale=1.0 + rank).train(), plan=plan),
        "plans": refused(
            lambda: effcompile.optimize(
                tiny(), inputs=(ids,), mesh=mesh, plan=[plan, plan.with_changes(model="b")][rank]
            )
        ),
        "mesh": asked(mesh=square),
        "no states": asked(passes=["checkpoint", "shard.forms=states"]),
        "optimizer": asked(optimizer=torch.optim.SGD(tiny().parameters(), lr=0.1)),
        "infeasible": asked(memory=1000, passes=["checkpoint"]),
        "context": asked(mesh=along["cp"]),
        "another axis": refused(
            lambda: effcompile.optimize(tiny(), inputs=(mine(0),), mesh=along["tp"], plan=plan)
        ),
    }
    dist.destroy_process_group()
    return {**found, "parted": asked()}


#: In which the states are divided: with the parameters, and alone.
STATES_FORMS = ("block", "states")


@dataclass(frozen=True, kw_only=True)
class WithStates:
    losses: list[float]
    plan: Plan
    held: int
    again: list[float]


def with_states(rank: int, folder: Path) -> tuple[list[WithStates], Plan]:
    """In each form; and the plan of a model whose peak is that of its optimizer's update."""
    asked = {"passes": ["checkpoint", "states", "shard.forms=replicated"], "optimizer": torch.optim.AdamW}
    table = nn.Sequential(nn.Embedding(1000, WIDTH), nn.Linear(WIDTH, 2)).train()
    updating = effcompile.optimize(
        table,
        inputs=(mine(rank),),
        mode="training",
        mesh=mesh_of(),
        loss=lambda out, _: out.square().mean(),
        **asked,
    )
    return [trained_with_states(rank, form, folder / form) for form in STATES_FORMS], updating.plan


def trained_with_states(rank: int, form: str, folder: Path) -> WithStates:
    """Three steps; then, with a copy of the weights and a checkpoint of the second step, the third again."""
    asked = {"passes": ["checkpoint", "states", f"shard.forms={form}"], "optimizer": adamw}
    planned = effcompile.optimize(tiny(), inputs=(mine(rank),), mode="training", mesh=mesh_of(), **asked)
    optimizer = planned.optimizer
    assert optimizer is not None
    losses = steps_of(planned, optimizer, mine(rank), 2)
    state = dict(zip(("model", "optimizer"), get_state_dict(planned, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)
    losses += steps_of(planned, optimizer, mine(rank), 1)
    held = [v for each in optimizer.state.values() for v in each.values() if isinstance(v, DTensor)]
    state = dict(zip(("model", "optimizer"), get_state_dict(planned, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(planned, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return WithStates(
        losses=losses,
        plan=planned.plan,
        held=sum(v.to_local().numel() * v.element_size() for v in held),
        again=steps_of(planned, optimizer, mine(rank), 1),
    )


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def test_states_are_divided_and_counted(tmp_path: Path) -> None:
    """AdamW's, of half of the parameters or rows each; the peak with updates is the predicted one, and a
    checkpoint of the states is taken up.
    """
    wanted = as_one_process()
    decided = {"block": BY_BLOCK, "states": STATES_DIVIDED}
    for of_forms, updating in on_ranks(with_states, 2, tmp_path):
        assert updating.measured is not None
        assert updating.measured.peak_bytes == pytest.approx(updating.predicted.peak_bytes, rel=0.02)
        for form, found in zip(STATES_FORMS, of_forms, strict=True):
            assert found.losses == pytest.approx(wanted, rel=1e-5)
            assert found.again == pytest.approx(wanted[2:], rel=1e-5)
            (states,) = [d for d in found.plan.decisions if d.kind == "optimizer states"]
            # counters, and the rows that are padding on one rank
            assert states.cost.bytes_kept == pytest.approx(found.held, rel=0.08), form
            assert found.plan.measured is not None
            measured, predicted = found.plan.measured.peak_bytes, found.plan.predicted.peak_bytes
            assert measured == pytest.approx(predicted, rel=0.02), form
            assert [d.option for d in found.plan.decisions if d.kind == "data parallel"] == [decided[form]]


def test_ranks_that_do_not_agree_are_told(plan: Plan) -> None:
    for rank, said in enumerate(on_ranks(others, 2, plan)):
        for thing in ("models", "inputs", "requests", "optimizers", "forwards", "plans"):
            assert said[thing].startswith(f"UsageError: The ranks have different {thing}: Rank 0: "), said[
                thing
            ]
            assert "Rank 1: " in said[thing]
        different = "UsageError: The ranks have different models: Rank 0: "
        assert said["models"].startswith(different + "table.weight is float32[21, 16]; Rank 1: ")
        assert said["frozen"].startswith(different + "layers.1.up.bias is float32[48]; Rank 1: ")
        assert "layers.1.up.bias is float32[48], frozen. Start" in said["frozen"]
        assert said["evaluated"].startswith(
            different + "layers.0 is not there, or as usual; Rank 1: layers.0 is in"
        )
        assert said["buffers"].startswith(
            different + "seen is not there, or as usual; Rank 1: seen is float32[2]"
        )
        assert "zero=1) divides an optimizer's states, and no optimizer is planned" in said["no states"]
        assert re.search(r"UsageError: mesh has the axes .*'dp', 'ep'", said["mesh"])
        assert "make it of the returned model's parameters()" in said["optimizer"]
        assert "UsageError: mesh has the axes ('cp',) of (2,)" in said["context"]
        assert "2 data-parallel ranks, and the mesh has 2 tensor-parallel ranks" in said["another axis"]
        assert "UsageError: The processes of this mesh have parted" in said["parted"]
        assert "InfeasibleError" in said["infeasible"]
        assert ("Rank 0, which makes the plan for all" in said["infeasible"]) == bool(rank)


def with_plan(rank: int, plan: Plan, ranks: int) -> str:
    return refused(
        lambda: effcompile.optimize(tiny(), inputs=(mine(rank, ranks),), plan=plan, mesh=mesh_of(ranks))
    )


def test_another_world_size_is_told(plan: Plan) -> None:
    for said in on_ranks(with_plan, 3, plan, 3):
        assert (
            "The plan is for 2 data-parallel ranks, and the mesh has 3 data-parallel ranks. Start 2 with"
            in said
        )


def test_a_plan_for_ranks_without_a_mesh_is_told(plan: Plan) -> None:
    with pytest.raises(
        UsageError, match=r"for 2 data-parallel ranks\. Run it under torchrun --nproc-per-node 2"
    ):
        effcompile.optimize(tiny(), inputs=(mine(0),), plan=plan)


def raises_alone(rank: int, plan: Plan) -> tuple[str, float, str]:
    """What a call says of which one rank raises an error before the ranks meet, how long it takes, and what
    the next one says.
    """
    mesh = mesh_of()
    model = tiny()
    if rank:
        fully_shard(model)
    start = time.monotonic()
    said = refused(lambda: effcompile.optimize(model, inputs=(mine(rank),), plan=plan, mesh=mesh))
    spent = time.monotonic() - start
    again = refused(lambda: effcompile.optimize(tiny(), inputs=(mine(rank),), plan=plan, mesh=mesh))
    return said, spent, again


def test_a_rank_that_raises_alone_ends_the_others_waiting(plan: Plan) -> None:
    """Well before the ten minutes that a rank may take to come; and they meet in the next call."""
    (first, spent, again), (second, _, other) = on_ranks(raises_alone, 2, plan)
    assert first.startswith("RankError: Rank 1 left effcompile.optimize before 'agreeing' with an error: ")
    assert "is a DTensor already" in first and second.startswith("UsageError: ")
    assert second.removeprefix("UsageError: ") in first
    assert spent < 300.0
    assert (again, other) == ("went on", "went on")


def dies(rank: int, plan: Plan) -> str:
    planned = effcompile.optimize(tiny(), inputs=(mine(rank),), plan=plan, mesh=mesh_of())
    loss = planned(mine(rank))
    if rank == 1:
        os._exit(7)
    return refused(loss.backward)


def test_a_rank_that_dies_in_a_step_is_named(plan: Plan) -> None:
    with pytest.raises(EffcompileError, match="Rank 1 ended with status 7"):
        on_ranks(dies, 2, plan, silence=5.0)


def is_late(rank: int) -> str:
    mesh = mesh_of()
    if rank == 1:
        time.sleep(2.0)
        return ""
    return refused(lambda: made_alike(tiny(), Ranks(mesh=mesh, spread=Spread())))


def test_a_rank_that_is_late_for_the_first_collective_is_named() -> None:
    assert on_ranks(is_late, 2, silence=0.5)[0].startswith("RankError: Rank 1 fell out of the step")


# ------------------------------------------------------- a step for one process, and what users put around it


def around(rank: int, plan: Plan) -> dict[str, Any]:
    """DDP around a planned step; fully_shard on one as a whole, and on its layers too."""
    planned = effcompile.optimize(tiny(), inputs=(mine(rank),), plan=plan)
    ddp = DistributedDataParallel(planned)
    losses = steps_of(ddp, adam(ddp), mine(rank))
    whole = fully_shard(effcompile.optimize(tiny(), inputs=(mine(rank),), plan=plan))
    layered = effcompile.optimize(tiny(), inputs=(mine(rank),), plan=plan)
    for layer in layered.layers:
        fully_shard(layer)
    fully_shard(layered)
    said = refused(lambda: layered(mine(rank)))
    return {"ddp": losses, "whole": steps_of(whole, adam(whole), mine(rank)), "layers": said}


def test_ddp_and_fully_shard_are_right_or_refused() -> None:
    """FSDP gathers the whole model around one graph: right, if nothing is saved.

    Its layers are gathered in calls that nobody makes.
    """
    alone = effcompile.plan(tiny(), (mine(0),), mode="training", passes=["checkpoint"])
    wanted = as_one_process()
    for found in on_ranks(around, 2, alone):
        assert found["ddp"] == pytest.approx(wanted, rel=1e-5)
        assert found["whole"] == pytest.approx(wanted, rel=1e-5)
        assert found["layers"].startswith("GuardError: ")
        assert "FSDPBlock" in found["layers"]


def test_verify_trains_a_copy_on_ranks(plan: Plan) -> None:
    proof = verify_plan(plan, tiny(), (mine(0),), {}, ranks=2)
    assert proof.passed
    assert [max(rank.peaks) <= 1.02 * rank.predicted for rank in proof.ranks] == [True, True]
    assert all(rank.gradient[1] in dict(tiny().named_parameters()) for rank in proof.ranks)


def test_verify_compares_a_model_with_dropout_with_nothing_dropped() -> None:
    """Ranks drop other elements than one process does of the whole batch."""
    model = tiny()
    model.layers.append(nn.Dropout(0.3))
    plan = effcompile.plan(model, (mine(0),), mode="training", passes=["checkpoint", "shard.ranks=2"])
    proof = verify_plan(plan, model, (mine(0),), {}, ranks=2)
    assert proof.passed
    assert "nothing drawn at random" in proof.form


def test_verify_trains_a_copy_whose_states_are_divided() -> None:
    passes = ["checkpoint", "states", "shard.ranks=2", "shard.forms=states"]
    plan = effcompile.plan(tiny(), (mine(0),), mode="training", passes=passes, optimizer=adamw)
    proof = verify_plan(plan, tiny(), (mine(0),), {}, ranks=2)
    assert proof.passed
    assert STATES_DIVIDED in proof.form


def test_a_plan_for_one_process_has_nothing_to_verify() -> None:
    alone = effcompile.plan(tiny(), (mine(0),), mode="training", passes=["checkpoint"])
    with pytest.raises(UsageError, match="for one process"):
        verify_plan(alone, tiny(), (mine(0),), {}, ranks=2)
