"""Whose buffers, whose loss head, whose speed: what an engine does to a strategy, as data with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from effcompile.ir.strategy import Engine

GIGABYTE = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """What is counted of an engine.

    Attributes:
        logit_bytes: bytes beside each logit at the loss, all copies and the gradient.
        fused: share of the element-wise bytes that its kernels still move.
        products, attention: share of the peak that wide products and attention reach; `half_width`: the
            hidden width at which products reach half of that.
        beside: bytes outside of the allocator (context, NCCL's buffers).
        whole_again: whether full recomputation runs a layer's whole forward, its last product too (Megatron's
            and DeepSpeed's do; torch stops early, and so do we).
        overlaps: whether collectives of data parallelism run beside the compute.
        error: how far the true peak may be from the predicted one, as a share of it.
        seconds_error: the same of the step's seconds.
        sources: attribute → where it was read.
    """

    logit_bytes: float
    fused: float
    products: float
    attention: float
    half_width: float
    beside: float = 1.5 * GIGABYTE
    whole_again: bool = False
    overlaps: bool = True
    error: float = 0.10
    seconds_error: float = 0.15
    sources: Mapping[str, str]


_BESIDE = (
    "context and NCCL's buffers: 1.5 GB, facts of this project's survey; reserved bytes are above "
    "allocated ones"
)
_SPEED = {
    "products": "assumed between Megatron's and FSDP2's fitted rates (benchmarks/parallel.py published)",
    "attention": "assumed: attention runs at its own rate, well below that of products; FlashAttention-2 "
    "(arXiv 2307.08691), table 1",
    "half_width": "assumed as Megatron's",
}
_MEGATRON = (
    "fitted: Korthikanti et al. 2022 (arXiv 2205.05198), tables 3 and 5, 22B to 1T on A100; all "
    "eight within 11 %"
)
# From cp 2 to cp 4 those steps take 2.37 times as long, though none of their parts more than doubles: no
# rates are nearer to both.
_TITAN = (
    "fitted: torchtitan docs/performance.md, Llama 3.1 8B on 8 H100 at 500 W, tables 1 and 2 (8192 tokens, "
    "and 32768 to 262144 over 1 to 8 context-parallel ranks); all five within 14 %"
)

ENGINES: Mapping[Engine, EngineFigures] = {
    "ours": EngineFigures(
        logit_bytes=14.0 / 8,
        fused=0.6,
        products=0.7,
        attention=0.3,
        half_width=500,
        sources={
            **_SPEED,
            "logit_bytes": "14 bytes as FSDP2's, in 8 chunks (passes/training/loss_head.py)",
            "fused": "assumed as FSDP2 under torch.compile",
            "beside": _BESIDE,
            "error": "as plans for one machine that is not here (search/training/fit.py)",
        },
    ),
    "fsdp2": EngineFigures(
        logit_bytes=14.0,
        fused=0.4,
        products=0.65,
        attention=0.21,
        half_width=700,
        error=0.10,
        sources={
            **_SPEED,
            "logit_bytes": "bf16 logits 2, fp32 copy 4, log-softmax 4, its gradient 4; torchtitan's cross "
            "entropy, compiled or not",
            "products": _TITAN,
            "attention": _TITAN,
            "fused": _TITAN,
            "beside": _BESIDE,
            "error": "the distance to torchtitan docs/performance.md, tables 1 and 2; benchmarks/parallel.py",
        },
    ),
    "megatron": EngineFigures(
        logit_bytes=6.0,
        fused=0.45,
        products=0.86,
        attention=0.45,
        half_width=500,
        overlaps=False,
        whole_again=True,
        sources={
            **_SPEED,
            "logit_bytes": "vocabulary-parallel cross entropy in place: bf16 logits 2, fp32 4",
            "products": _MEGATRON,
            "half_width": _MEGATRON,
            "fused": _MEGATRON,
            "beside": _BESIDE,
            "error": "taken as FSDP2's; not compared with a published peak",
        },
    ),
    "deepspeed": EngineFigures(
        logit_bytes=14.0,
        fused=1.0,
        products=0.62,
        attention=0.24,
        half_width=500,
        error=0.15,
        whole_again=True,
        sources={
            **_SPEED,
            "logit_bytes": "the model's own loss, as FSDP2's",
            "fused": "eager: nothing is fused",
            "beside": _BESIDE,
            "error": "assumed wider than FSDP2's: buckets are options of its configuration; not compared "
            "with a published peak",
        },
    ),
}
