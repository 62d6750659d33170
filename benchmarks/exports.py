"""What stock engines make of our exports, where they are installed: their own configuration classes, and
DeepSpeed on two gloo ranks.

    python benchmarks/exports.py

Each line says an engine and what came out; an engine that is not installed says so. DeepSpeed trains a tiny
Llama from the JSON for three steps, beside one process; the share of the parameters that a rank holds is read
from the engine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import effcompile
from effcompile.exports import exported
from effcompile.proof.parallel.processes import on_ranks

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "parallel"))
from rank_helpers import STEPS, batch_of, model_of, optimizer_of, part, trained

COMMON: dict[str, Any] = {
    "dp": 2,
    "tp": 1,
    "pp": 1,
    "zero": 3,
    "recompute": "none",
    "precision": "fp32",
    "micro_batch": 2,
}


def plan_for(devices: int = 2, **strategy: Any) -> effcompile.Plan:
    """A judged strategy of the tiny Llama, on the meta device."""
    with torch.device("meta"):
        model = model_of("llama")
    inputs = {name: value.to("meta") for name, value in batch_of("llama", 2).items()}
    return effcompile.plan(
        model, inputs, mode="training", target="h100-sxm", devices=devices, strategy={**COMMON, **strategy}
    )


def megatron() -> str:
    from megatron.core.transformer.transformer_config import TransformerConfig

    said = []
    full = {"tp": 2, "pp": 2, "sp": True, "recompute": "full"}
    for strategy in (full, {"tp": 1, "pp": 2, "dp": 2}, {"tp": 2, "dp": 2, "recompute": "op"}):
        given = {"dp": 1, "zero": 0, "micro_batch": 1, **strategy}
        text = exported(plan_for(4, engine="megatron", **given), "megatron")
        flags = dict((f"{line} ".split(" ", 1)) for line in text.splitlines() if line.startswith("--"))
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=48,
            tensor_model_parallel_size=int(flags["--tensor-model-parallel-size"]),
            pipeline_dtype=torch.float32,
            pipeline_model_parallel_size=int(flags["--pipeline-model-parallel-size"]),
            sequence_parallel="--sequence-parallel" in flags,
            context_parallel_size=int(flags["--context-parallel-size"]),
            recompute_granularity=flags.get("--recompute-granularity", "").strip() or None,
            recompute_method=flags.get("--recompute-method", "").strip() or None,
            recompute_num_layers=int(flags["--recompute-num-layers"])
            if "--recompute-num-layers" in flags
            else None,
        )
        said.append(f"tp {config.tensor_model_parallel_size} pp {config.pipeline_model_parallel_size}")
    return "TransformerConfig takes " + "; ".join(said)


def torchtitan() -> str:
    names: dict[str, Any] = {}
    exec(exported(plan_for(4, engine="fsdp2", pp=2, zero=2, micro_batch=1), "torchtitan"), names)
    return f"ParallelismConfig takes it: {names['PARALLELISM'].module_fqns_per_model_part}"


def run(rank: int, text: str) -> tuple[list[float], int]:
    """Three steps of DeepSpeed."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533"
    )
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model, mine = model_of("llama"), part(batch_of("llama", 4), rank, 2)
    config = {name: value for name, value in json.loads(text).items() if not name.startswith("_")}
    config |= {"zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    losses = []
    for _ in range(STEPS):
        loss = engine(**mine).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / 2)
    return losses, sum(getattr(p, "ds_tensor", p).numel() for p in model.parameters())


def deepspeed() -> str:
    wanted = trained(model_of("llama"), batch_of("llama", 4)).losses
    whole = sum(p.numel() for p in model_of("llama").parameters())
    said = []
    for zero in (1, 2, 3):
        found = on_ranks(run, 2, exported(plan_for(engine="deepspeed", zero=zero), "deepspeed"))
        error = max(abs(a - b) / abs(b) for losses, _ in found for a, b in zip(losses, wanted, strict=True))
        said.append(
            f"zero {zero}: losses within {error:.1e}, {found[0][1] / whole:.2f} of the parameters on a rank"
        )
    return "; ".join(said)


ENGINES: dict[str, tuple[str, Callable[[], str]]] = {
    "megatron": ("megatron", megatron), "torchtitan": ("torchtitan", torchtitan),
    "deepspeed": ("deepspeed", deepspeed)
}  # fmt: skip


def main() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", "2")
    for name, (package, prove) in ENGINES.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name:<12}not installed")
            continue
        try:
            print(f"{name:<12}{prove()}", flush=True)
        except Exception as error:
            print(f"{name:<12}FAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)


if __name__ == "__main__":
    main()
