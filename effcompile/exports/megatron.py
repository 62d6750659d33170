"""Megatron-LM's command line, a flag a line."""

from __future__ import annotations

from collections.abc import Iterator

from effcompile.exports.common import Exporter, Subject
from effcompile.ir.strategy import Strategy


def _write(subject: Subject) -> str:
    return "\n".join([*(f"# {line}" for line in subject.header), *_flags(subject)]) + "\n"


def _flags(subject: Subject) -> Iterator[str]:
    s = subject.strategy
    yield f"--tensor-model-parallel-size {s.tp}"
    yield f"--pipeline-model-parallel-size {s.pp}"
    yield f"--context-parallel-size {s.cp}"
    yield f"--micro-batch-size {s.micro_batch}"
    yield f"--global-batch-size {subject.found.global_batch}"
    if s.sp:
        yield "--sequence-parallel"
    if s.zero:
        yield "--use-distributed-optimizer"
    if s.precision != "fp32":
        yield {"bf16": "--bf16", "fp16": "--fp16", "fp8": "--bf16\n--fp8-format hybrid"}[s.precision]
    if s.recompute == "full":
        yield "--recompute-granularity full\n--recompute-method uniform\n--recompute-num-layers 1"
    if s.recompute == "op":
        yield "--recompute-granularity selective"
    if s.offload == "optimizer":
        yield "--optimizer-cpu-offload"
    if s.vpp > 1:
        yield f"--num-layers-per-virtual-pipeline-stage {s.cuts[0]}"
    elif len(set(s.cuts)) > 1:
        yield (
            f"--decoder-first-pipeline-num-layers {s.cuts[0]}\n--decoder-last-pipeline-num-layers "
            f"{s.cuts[-1]}"
        )


def _uneven(s: Strategy) -> bool:
    """Cuts that first and last stage of another length do not say."""
    inner = s.cuts[1:-1] if s.vpp == 1 else s.cuts
    return len(set(inner)) > 1


MEGATRON = Exporter(
    judged="megatron",
    write=_write,
    recompute=("none", "op", "full"),
    cannot={
        "zero > 1": (
            lambda s: s.zero > 1,
            "its distributed optimizer shards states (zero=1). Plan with zero=0 or zero=1",
        ),
        "sp without tp": (lambda s: s.sp and s.tp == 1, "sequence parallelism divides over tp"),
        "offload=all": (
            lambda s: s.offload == "all",
            "it offloads states. Plan with offload=optimizer or none",
        ),
        "schedule": (
            lambda s: s.pp > 1 and s.schedule not in ("1f1b", "interleaved"),
            "it has 1f1b and interleaved",
        ),
        "cuts": (_uneven, "only the first and the last stage may have another number of layers"),
    },
)
