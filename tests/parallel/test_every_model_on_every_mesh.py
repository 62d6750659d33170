"""Seven models on every kind of mesh, by the user's way in, beside one process.

A quarter of an hour: run where EFFCOMPILE_EVERY_MESH is set. The suite has each kind and each model once.
"""

from __future__ import annotations

import copy
import functools
import os
from typing import NamedTuple

import pytest
import torch.distributed as dist
import transformers as hf
from captured_once import captured_once
from rank_helpers import (
    MODELS,
    STEPS,
    Inputs,
    Trained,
    batch_of,
    model_of,
    optimizer_of,
    part,
    trained,
    worst_error,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import effcompile
from effcompile.core.errors import UsageError
from effcompile.proof.parallel.processes import on_ranks

pytestmark = pytest.mark.skipif(
    not os.environ.get("EFFCOMPILE_EVERY_MESH"), reason="takes a quarter of an hour: EFFCOMPILE_EVERY_MESH=1"
)

RELATIVE, EXAMPLES = 1e-5, 4
INTERLEAVED = ("pipeline.schedule=interleaved", "pipeline.stages=2")


class Kind(NamedTuple):
    """A mesh and how it is used."""

    axes: dict[str, int]
    passes: tuple[str, ...] = ()
    layers: int = 2


KINDS = {
    "replicated": Kind({"dp": 2}, ("shard.forms=replicated",)),
    "ZeRO by block": Kind({"dp": 2}, ("shard.forms=block",)),
    "ZeRO by weight": Kind({"dp": 2}, ("shard.forms=weight",)),
    "tp": Kind({"tp": 2}),
    "1F1B": Kind({"pp": 2}),
    "interleaved": Kind({"pp": 2}, INTERLEAVED, layers=4),
    "dp x tp": Kind({"dp": 2, "tp": 2}),
    "dp x pp": Kind({"dp": 2, "pp": 2}, ("pipeline.micro_batches=2",)),
    "pp x tp": Kind({"pp": 2, "tp": 2}, ("pipeline.micro_batches=2",)),
}


class Found(NamedTuple):
    """What a rank has."""

    losses: list[float]
    errors: list[tuple[float, str]]
    names: list[str]
    replicas: bool
    refused: str = ""


def deep(name: str, layers: int) -> nn.Module:
    """A model of so many layers, in an encoder and in a decoder."""
    model = model_of(name)
    config = model.config
    assert isinstance(config, hf.PretrainedConfig)
    if layers == 2:
        return model
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * layers
    if hasattr(config, "num_decoder_layers"):
        config.num_layers = config.num_decoder_layers = layers
    return type(model)(config).train()


@functools.cache
def subject(name: str, layers: int, examples: int) -> tuple[nn.Module, Inputs, Trained]:
    model, inputs = deep(name, layers), batch_of(name, examples)
    return model, inputs, trained(model, inputs)


def run(rank: int, model: nn.Module, inputs: Inputs, wanted: Trained, kind: Kind) -> Found:
    """STEPS steps of this rank."""
    mesh = init_device_mesh("cpu", tuple(kind.axes.values()), mesh_dim_names=tuple(kind.axes))
    dp = kind.axes.get("dp", 1)
    mine = part(inputs, mesh["dp"].get_local_rank() if dp > 1 else 0, dp)
    try:
        planned = effcompile.optimize(
            copy.deepcopy(model), inputs=mine, mode="training", mesh=mesh, passes=["checkpoint", *kind.passes]
        )
    except UsageError as error:
        return Found([], [], [], True, str(error))
    optimizer = optimizer_of(planned)
    names = [name for name, _ in planned.named_parameters()]
    losses, errors = [], []
    for at in range(STEPS):
        loss = planned(**mine).loss
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / mesh.size())
        gradients = {name: parameter.grad for name, parameter in planned.named_parameters()}
        errors.append(worst_error(gradients, {name: wanted.gradients[at][name] for name in names}))
        optimizer.step()
        optimizer.zero_grad()
        made = dict(planned.named_parameters())
        errors.append(worst_error(made, {name: wanted.parameters[at][name] for name in names}))
    return Found(losses, errors, names, all(equal_everywhere(p) for p in planned.parameters()))


def equal_everywhere(parameter: nn.Parameter) -> bool:
    """Whether a replicated parameter is the same to the bit on all ranks that have it."""
    if not isinstance(parameter, DTensor) or parameter.placements != (Replicate(),):
        return True
    group, mine = parameter.device_mesh.get_group(), parameter.to_local().detach().contiguous()
    found = [mine.new_empty(mine.shape) for _ in range(group.size())]
    dist.all_gather(found, mine, group=group)
    return all(mine.equal(other) for other in found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "tied"])
def test_ranks_train_as_one_process(name: str, kind: str) -> None:
    """Losses, every gradient and every parameter over three steps. What a model has nothing for is said."""
    mesh = KINDS[kind]
    ranks = functools.reduce(int.__mul__, mesh.axes.values())
    model, inputs, wanted = subject(name, mesh.layers, EXAMPLES * mesh.axes.get("dp", 1))
    with captured_once():
        found = on_ranks(run, ranks, model, inputs, wanted, mesh)
    if refused := {rank.refused for rank in found} - {""}:
        pytest.skip("; ".join(refused))
    for rank in found:
        assert rank.losses == pytest.approx(wanted.losses, rel=RELATIVE)
        assert max(rank.errors)[0] < RELATIVE, max(rank.errors)
        assert rank.replicas
    assert {each for rank in found for each in rank.names} == set(wanted.gradients[0])
