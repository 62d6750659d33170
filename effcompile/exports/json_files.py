"""DeepSpeed's JSON, the fields of Hugging Face's DistributedConfig, and of Accelerate's FSDP2 plugin, with
what else has to be set.
"""

from __future__ import annotations

import json

from effcompile.exports.common import Exporter, Subject, no_axis
from effcompile.ir.strategy import Strategy

_NO_PIPELINE = (
    "its pipeline is inference only, or a module of its own that the model would have to be written for"
)
_DERIVED = (
    "it divides by a list of modules that this model may not have. effcompile optimize --strategy "
    "tp=... finds them in the graph"
)


def _text(subject: Subject, content: dict[str, object]) -> str:
    return json.dumps({"_effcompile": list(subject.header), **content}, indent=2) + "\n"


def _deepspeed(subject: Subject) -> str:
    s = subject.strategy
    zero: dict[str, object] = {"stage": s.zero}
    if s.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if s.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    content: dict[str, object] = {
        "train_micro_batch_size_per_gpu": s.micro_batch,
        "gradient_accumulation_steps": subject.found.micro_batches,
        "gradient_clipping": 0.0,  # without this line it clips at 1.0
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    if s.precision in ("bf16", "fp16"):
        content[s.precision] = {"enabled": True}
    return _text(subject, content)


def _huggingface(subject: Subject) -> str:
    s = subject.strategy
    config = {
        "fsdp_size": s.dp,
        "fsdp_cpu_offload": s.offload == "all",
        "fsdp_mixed_precision": s.precision == "bf16",
    }
    return _text(
        subject, {"distributed_config": config, "gradient_checkpointing_enable": s.recompute == "full"}
    )


def _accelerate(subject: Subject) -> str:
    s = subject.strategy
    plugin: dict[str, object] = {
        "fsdp_version": 2, "reshard_after_forward": s.zero == 3, "auto_wrap_policy": "transformer_based_wrap",
        "cpu_offload": s.offload == "all", "activation_checkpointing": s.recompute == "full",
        "state_dict_type": "SHARDED_STATE_DICT",
    }  # fmt: skip
    mixed = {"bf16": "bf16", "fp16": "fp16"}.get(s.precision, "no")
    return _text(
        subject,
        {
            "fsdp_plugin": plugin,
            "mixed_precision": mixed,
            "gradient_accumulation_steps": subject.found.micro_batches,
        },
    )


def _fp8(s: Strategy) -> bool:
    return s.precision == "fp8"


_FP8 = {"precision=fp8": (_fp8, "that is another library's conversion of the model")}
_OFFLOAD = {
    "offload=optimizer": (
        lambda s: s.offload == "optimizer",
        "its offload takes parameters, too. Plan with offload=all",
    )
}

DEEPSPEED = Exporter(
    judged="deepspeed",
    write=_deepspeed,
    recompute=("none", "full"),
    cannot={
        **no_axis("tp", _DERIVED),
        **no_axis("pp", _NO_PIPELINE),
        **no_axis("cp", "its sequence parallelism has its own attention"),
        **_FP8,
        "offload=all below zero=3": (
            lambda s: s.offload == "all" and s.zero < 3,
            "parameters are only offloaded where they are sharded",
        ),
    },
)
HUGGINGFACE = Exporter(
    judged="fsdp2",
    write=_huggingface,
    recompute=("none", "full"),
    cannot={
        **no_axis("tp", _DERIVED),
        **no_axis("pp", _NO_PIPELINE),
        **no_axis("cp", "it has no such axis"),
        **_FP8,
        **_OFFLOAD,
        "zero < 3": (lambda s: s.zero < 3, "it gathers again in the backward. Plan with zero=3"),
        "precision=fp16": (
            lambda s: s.precision == "fp16",
            "its mixed precision is bf16. Plan with precision=bf16",
        ),
    },
)
ACCELERATE = Exporter(
    judged="fsdp2",
    write=_accelerate,
    recompute=("none", "full"),
    cannot={
        **no_axis("tp", _DERIVED),
        **no_axis("pp", _NO_PIPELINE),
        **no_axis("cp", "its context parallelism is a plugin of its own"),
        **_FP8,
        **_OFFLOAD,
        "zero < 2": (
            lambda s: s.zero < 2,
            "it shards gradients and states with the parameters. Plan with zero=2 or zero=3",
        ),
    },
)
