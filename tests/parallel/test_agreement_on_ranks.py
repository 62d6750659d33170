"""What one rank alone does to a planned model is told on all of them; and what users put around a model on a
mesh.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from test_optimize_on_ranks import mesh_of, mine, refused, tiny
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import effcompile
from effcompile.core.errors import GuardError
from effcompile.proof.parallel.processes import on_ranks
from effcompile.runtime.training import TrainingExecutable
from effcompile.runtime.treatment import HeldPart, RankState, Treatment, differing

#: What one rank does before a step; where it returns words, these are left out.
Deed = Callable[[TrainingExecutable, torch.optim.Optimizer], str | None]
OTHER = 1


def freezes(model: TrainingExecutable, optimizer: torch.optim.Optimizer) -> None:
    model.layers[0].up.weight.requires_grad_(False)


def slows_down(model: TrainingExecutable, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.05


def writes(model: TrainingExecutable, optimizer: torch.optim.Optimizer) -> None:
    bias = model.layers[1].down.bias.data
    (bias.to_local() if isinstance(bias, DTensor) else bias)[3] += 1


def hooks(model: TrainingExecutable, optimizer: torch.optim.Optimizer) -> None:
    model.layers[0].down.bias.register_hook(lambda gradient: 2 * gradient)


def loads(model: TrainingExecutable, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.head.weight.mul_(0.5)


def leaves_out_the_step(model: TrainingExecutable, optimizer: torch.optim.Optimizer) -> str:
    return "step"


def leaves_the_gradients(model: TrainingExecutable, optimizer: torch.optim.Optimizer) -> str:
    return "zero_grad"


def writes_the_same(model: TrainingExecutable, optimizer: torch.optim.Optimizer) -> None:
    """An average of the weights that is swapped in for an evaluation, and out again: not a fault."""
    with torch.no_grad():
        model.head.weight.mul_(1.0)


#: What is said on all ranks where the second does it, parameters replicated and sharded; None: nothing.
SAID: dict[Deed, tuple[str | None, str | None]] = {
    freezes: ("layers.0.up.weight gets no gradient on Rank 1 and gets one on Rank 0",) * 2,
    slows_down: ("lr of the optimizer's group 0 is 0.1 on rank 0 and 0.05 on rank 1",) * 2,
    writes: ("layers.1.down.bias has other values on rank 1 than on rank 0", None),
    hooks: ("layers.0.down.bias has other values on rank 1 than on rank 0", None),
    loads: ("table.weight was updated since the last step on Rank 1, and not on Rank 0",) * 2,
    leaves_out_the_step: ("table.weight was updated since the last step on Rank 0, and not on Rank 1",) * 2,
    leaves_the_gradients: ("table.weight has no gradient on Rank 0 and has one on Rank 1",) * 2,
    writes_the_same: (None, None),
}


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def planned_on(rank: int, form: str) -> TrainingExecutable:
    made = effcompile.optimize(
        tiny(),
        inputs=(mine(rank),),
        mode="training",
        mesh=mesh_of(),
        passes=["checkpoint", "states", f"shard.forms={form}"],
        optimizer=sgd,
    )
    assert isinstance(made, TrainingExecutable)
    return made


def after(model: TrainingExecutable, ids: Tensor, deed: Deed | None) -> str:
    """What is said in the steps after something was done to the model, or not: before the second step, of
    weights that are loaded before the first.
    """
    optimizer = sgd(list(model.parameters())) if model.optimizer is None else model.optimizer
    for step in range(4):
        left_out = deed(model, optimizer) if deed is not None and step == (deed is not loads) else ""
        given = {name: p.grad for name, p in model.named_parameters()}
        try:
            model(ids).backward()
        except GuardError as error:
            assert all(p.grad is given[name] for name, p in model.named_parameters())
            return str(error)
        if left_out != "step":
            optimizer.step()
        if left_out != "zero_grad":
            optimizer.zero_grad()
    return ""


def deeds(rank: int) -> tuple[dict[str, list[str]], list[str], bool]:
    """What each of them says, in each form; each is done to a copy of the model, which has not the planned
    optimizer.
    """
    found: dict[str, list[str]] = {}
    for form in ("replicated", "block"):
        made = planned_on(rank, form)
        for deed in SAID:
            model = made if deed is slows_down else copy.deepcopy(made)
            found.setdefault(deed.__name__, []).append(
                after(model, mine(rank), deed if rank == OTHER else None)
            )
    whole = {name: torch.randn_like(value) for name, value in tiny().state_dict().items()}
    whole["head.weight"] = whole["table.weight"]
    made.load_state_dict(whole)
    loaded = all(torch.equal(value.full_tensor(), whole[name]) for name, value in made.state_dict().items())
    return found, [refused(partial(put, made)) for put in AROUND], loaded


AROUND: tuple[Callable[[TrainingExecutable], object], ...] = (
    fully_shard,
    lambda model: fully_shard(model.layers[1]),
    replicate,
    DistributedDataParallel,
)


def test_what_one_rank_does_is_told_on_all() -> None:
    """And nothing is handed out of that step. Beside it: what would shard the model again is refused, and
    whole weights are loaded.
    """
    for said, around, loaded in on_ranks(deeds, 2):
        for deed, wanted in SAID.items():
            for found, words in zip(said[deed.__name__], wanted, strict=True):
                assert (words or "") in found, (deed, found)
                assert bool(found) == bool(words), (deed, found)
        for words in around:
            assert words.startswith("UsageError: A model whose step was planned for a mesh cannot be sharded")
        assert loaded


def treated(rank: int, stage: int = 0, number: int = 1, generator: int = 0, **how: bool) -> RankState:
    """What a rank says of one parameter."""
    usual = {"trained": True, "has_gradient": False, "written": True}
    return RankState(
        rank=rank,
        stage=stage,
        row=0,
        generator=generator,
        groups=[{"lr": 0.1}] * (1 + stage),
        treated={"w": Treatment(**(usual | how))},
        held={"w": HeldPart(part=(0, 0), number=number)},
    )


def test_what_differs_is_named_with_its_ranks() -> None:
    assert differing([treated(0), treated(1), treated(2, stage=1)]) is None
    place, words = differing([treated(0), treated(1, trained=False), treated(2)]) or ("", "")
    assert (place, words.split(" (")[0]) == (
        "model.w",
        "w gets no gradient on Rank 1 and gets one on Ranks 0, 2",
    )
    _, words = differing([treated(0), treated(1, written=False), treated(2, number=2)]) or ("", "")
    assert words.startswith("w was updated since the last step on Ranks 0, 2, and not on Rank 1")
    assert differing([treated(0), treated(1, written=False)]) is None  # they hold the same
    _, words = differing([treated(0), treated(1, generator=1)]) or ("", "")
    assert words.startswith("Ranks 0 and 1 stand in one place along 'dp', and drew other random numbers")
    _, words = differing([treated(0), treated(3, number=2)]) or ("", "")
    assert words.startswith("w has other values on rank 3 than on rank 0")
