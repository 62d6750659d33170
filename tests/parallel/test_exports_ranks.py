"""Exports of a plan: each file is what its engine takes, says the peak under it, and refuses what the engine
cannot say; FSDP2's and transformers' are run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from rank_helpers import STEPS, batch_of, model_of, optimizer_of, part, trained
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import effcompile
from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.core.units import format_bytes
from effcompile.exports import ENGINES, exported
from effcompile.ir.strategy import StrategyFields
from effcompile.planner.parallel.model import Model
from effcompile.proof.parallel.processes import on_ranks
from effcompile.search.parallel import plan as planning

_COMMON: StrategyFields = {
    "dp": 2,
    "tp": 1,
    "pp": 1,
    "zero": 3,
    "recompute": "full",
    "precision": "fp32",
    "micro_batch": 2,
}


@pytest.fixture(scope="module")
def plan_for() -> Callable[..., effcompile.Plan]:
    """A judged strategy of a tiny Llama on the meta device, which is described once: that knows the precision
    alone of a strategy.
    """
    with torch.device("meta"):
        model = model_of("llama")
    describe, known = planning.describe, dict[str, Model]()

    def described(given: nn.Module, *args: Any, precision: str = "bf16", **others: Any) -> Model:
        assert given is model
        if precision not in known:
            known[precision] = describe(given, *args, precision=precision, **others)
        return known[precision]

    def plan(devices: int = 2, **strategy: Any) -> effcompile.Plan:
        inputs = {name: value.to("meta") for name, value in batch_of("llama", 2).items()}
        given = {**_COMMON, **strategy}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planning, "describe", described)
            return effcompile.plan(
                model, inputs, mode="training", target="h100-sxm", devices=devices, strategy=given
            )

    return plan


def run(rank: int, script: str) -> tuple[list[float], int, int]:
    """STEPS steps of stock FSDP2 as the file makes it: losses, and the elements that are here of those that
    there are.
    """
    names: dict[str, Any] = {}
    exec(compile(script, "parallelize.py", "exec"), names)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = names["parallelize"](model_of("llama"), mesh)
    return steps_of(model, rank)


def steps_of(model: nn.Module, rank: int) -> tuple[list[float], int, int]:
    """STEPS steps on a rank's part of the batch: losses, elements here, elements in all."""
    optimizer, mine, losses = optimizer_of(model), part(batch_of("llama", 4), rank, 2), []
    for _ in range(STEPS):
        loss = model(**mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / 2)
    parameters = list(model.parameters())
    assert all(isinstance(p, DTensor) for p in parameters)
    return losses, sum(p.to_local().numel() for p in parameters), sum(p.numel() for p in parameters)


def test_the_script_for_fsdp2_trains_as_one_process_and_holds_half(
    plan_for: Callable[..., effcompile.Plan],
) -> None:
    plan = plan_for(engine="fsdp2")
    script = exported(plan, "fsdp2")
    assert plan.distributed is not None
    assert format_bytes(plan.distributed.peak_bytes) in script
    wanted = trained(model_of("llama"), batch_of("llama", 4))
    found = on_ranks(run, 2, script)
    for losses, here, whole in found:
        assert losses == pytest.approx(wanted.losses, rel=1e-5)
        assert here < 0.56 * whole
    assert sum(here for _, here, _ in found) == found[0][2]


def huggingface(rank: int, folder: Path, said: dict[str, Any]) -> tuple[list[float], int, int]:
    """The same by transformers' own engine, of the saved model."""
    from transformers.distributed import DistributedConfig

    # which transformers reads, as under torchrun; the processes have met
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(**said["distributed_config"])
    ).train()
    if said["gradient_checkpointing_enable"]:
        model.gradient_checkpointing_enable()
    return steps_of(model, rank)


def test_transformers_trains_from_its_json_as_one_process_and_holds_half(
    plan_for: Callable[..., effcompile.Plan], tmp_path: Path
) -> None:
    pytest.importorskip("transformers.distributed")
    said = json.loads(exported(plan_for(engine="fsdp2"), "hf"))
    assert said["gradient_checkpointing_enable"]
    model_of("llama").save_pretrained(tmp_path)
    wanted = trained(model_of("llama"), batch_of("llama", 4))
    found = on_ranks(huggingface, 2, tmp_path, said)
    for losses, here, whole in found:
        assert losses == pytest.approx(wanted.losses, rel=1e-5)
        assert here < 0.56 * whole
    assert sum(here for _, here, _ in found) == found[0][2]


def test_json_is_what_the_engines_own_classes_take(plan_for: Callable[..., effcompile.Plan]) -> None:
    configuration = pytest.importorskip("transformers.distributed")
    accelerate = pytest.importorskip("accelerate")
    plan = plan_for(engine="fsdp2")
    said = json.loads(exported(plan, "hf"))
    config = configuration.DistributedConfig(**said["distributed_config"])
    assert (config.fsdp_size, said["gradient_checkpointing_enable"]) == (2, True)
    plugin = accelerate.FullyShardedDataParallelPlugin(
        **json.loads(exported(plan, "accelerate"))["fsdp_plugin"]
    )
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing) == (
        2,
        True,
        True,
    )
    deepspeed = json.loads(exported(plan_for(engine="deepspeed"), "deepspeed"))
    assert deepspeed["zero_optimization"] == {"stage": 3}
    assert deepspeed["gradient_clipping"] == 0.0
    assert deepspeed["train_micro_batch_size_per_gpu"] * deepspeed["gradient_accumulation_steps"] == 2


def test_megatron_and_torchtitan_say_tensor_and_pipeline_parallelism(
    plan_for: Callable[..., effcompile.Plan],
) -> None:
    flags = exported(
        plan_for(4, engine="megatron", dp=1, tp=2, pp=2, zero=0, sp=True, micro_batch=1), "megatron"
    )
    given = dict(line.split(" ", 1) for line in flags.splitlines() if line.startswith("--") and " " in line)
    assert given["--tensor-model-parallel-size"] == given["--pipeline-model-parallel-size"] == "2"
    assert given["--recompute-granularity"] == "full"
    assert "--sequence-parallel" in flags.splitlines()
    text = exported(plan_for(4, engine="fsdp2", dp=2, pp=2, zero=2, micro_batch=1), "torchtitan")
    names: dict[str, Any] = {}
    exec(text.replace("from torchtitan.config import ParallelismConfig", "ParallelismConfig = dict"), names)
    assert (
        names["PARALLELISM"]["pipeline_parallel_degree"]
        == names["PARALLELISM"]["data_parallel_shard_degree"]
        == 2
    )
    assert names["PARALLELISM"]["module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "norm", "output"],
    ]


@pytest.mark.parametrize(
    ("engine", "strategy", "said"),
    [
        ("fsdp2", {"engine": "fsdp2", "recompute": "planned"}, "our solver's choice"),
        ("fsdp2", {"engine": "fsdp2", "dp": 1, "tp": 2, "zero": 0}, "sums no gradient of a weight"),
        ("hf", {"engine": "fsdp2", "zero": 2}, "zero < 3"),
        ("deepspeed", {"engine": "fsdp2"}, "Plan again with --strategy"),
        ("megatron", {"engine": "megatron", "zero": 3}, "zero=0 or zero=1"),
        ("torchtitan", {"engine": "fsdp2", "dp": 1, "tp": 2, "zero": 0, "sp": False}, "Plan with sp=1"),
        ("accelerate", {"engine": "fsdp2", "dp": 1, "pp": 2, "zero": 0, "micro_batch": 1}, "pipeline"),
    ],
)
def test_what_an_engine_cannot_say_is_refused(
    engine: str, strategy: dict[str, Any], said: str, plan_for: Callable[..., effcompile.Plan]
) -> None:
    with pytest.raises(UsageError, match=said):
        exported(plan_for(**strategy), engine)


def test_a_plan_of_ours_and_an_unknown_engine_are_refused(plan_for: Callable[..., effcompile.Plan]) -> None:
    alone = effcompile.plan(
        torch.nn.Linear(4, 4), (torch.randn(2, 4),), mode="training", loss=lambda out, _: out.sum()
    )
    for engine in ENGINES:
        with pytest.raises(UsageError, match="for one device, or for our own lowering"):
            exported(alone, engine)
    with pytest.raises(UnknownNameError, match="fsdp2"):
        exported(plan_for(engine="fsdp2"), "fsdp3")
