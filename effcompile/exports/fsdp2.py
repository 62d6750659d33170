"""`parallelize.py` for stock FSDP2: what a user would write by hand, with the plan's choices as its
constants.
"""

from __future__ import annotations

from effcompile.exports.common import Exporter, Subject, no_axis

_STOCK = (
    "stock parallelize_module sums no gradient of a weight that is read between divided products (a "
    "norm of each head), and takes no "
)
_TENSOR = f"{_STOCK}fused weight; effcompile optimize --strategy tp=... divides the graph itself"
_STAGES = (
    "its stages would have to be written for the model's own code; effcompile optimize --strategy "
    "pp=... cuts the graph itself"
)


def _write(subject: Subject) -> str:
    s = subject.strategy
    return _SCRIPT.format(
        header="\n".join(subject.header), layers=subject.layers, reshard=s.zero == 3,
        every={"none": 0, "full": 1, "layer": 2}[s.recompute],
        precision={"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(s.precision),
        offload=s.offload == "all", dp=s.dp,
    )  # fmt: skip


FSDP2 = Exporter(
    judged="fsdp2",
    write=_write,
    recompute=("none", "layer", "full"),
    cannot={
        **no_axis("tp", _TENSOR),
        **no_axis("pp", _STAGES),
        **no_axis(
            "cp", "stock context parallelism is a context of the training loop, which this file has not"
        ),
        "precision=fp8": (
            lambda s: s.precision == "fp8",
            "that is torchao's conversion of the model, before it is sharded",
        ),
        "zero < 2": (
            lambda s: s.zero < 2,
            "fully_shard shards gradients and states with the parameters. Plan with zero=2 or zero=3",
        ),
        "offload=optimizer": (
            lambda s: s.offload == "optimizer",
            "its offload takes parameters and states together. Plan with offload=all",
        ),
    },
)

_SCRIPT = '''"""{header}"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

RANKS = {dp}
LAYERS = {layers}
RESHARD_AFTER_FORWARD = {reshard}  # gathered again in the backward (ZeRO-3), or kept until then (ZeRO-2)
CHECKPOINT_EVERY = {every}  # of so many layers one is computed again from its input; 0: none
PRECISION: torch.dtype | None = {precision}
OFFLOAD = {offload}


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard a model in place, every layer by itself. Make the optimizer of its parameters afterwards."""
    if mesh.size() != RANKS:
        raise ValueError(f"The plan is for {{RANKS}} data-parallel ranks, and the mesh has {{mesh.size()}}.")
    policy = MixedPrecisionPolicy()
    if PRECISION:
        policy = MixedPrecisionPolicy(param_dtype=PRECISION, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if OFFLOAD else OffloadPolicy()
    options = {{"mesh": mesh, "reshard_after_forward": RESHARD_AFTER_FORWARD,
               "mp_policy": policy, "offload_policy": offload}}
    for number, layer in enumerate(layers_of(model)):
        if CHECKPOINT_EVERY and number % CHECKPOINT_EVERY == 0:
            layer.forward = checkpointed(layer.forward)
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The model's layers: its lists of modules have as many as were planned."""
    found = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList)]
    if (whole := next((part for part in found if len(part) == LAYERS), None)) is not None:
        return whole
    outer = [layer for part in found for layer in part]
    if len(outer) != LAYERS:
        held = [len(part) for part in found]
        raise ValueError(f"The plan is for {{LAYERS}} layers, and this model's lists have {{held}}.")
    return outer


def checkpointed(forward):
    """The forward of a layer, computed again in the backward from what entered it."""
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)
'''
