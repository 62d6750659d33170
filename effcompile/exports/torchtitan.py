"""torchtitan's fields, as Python: its configurations are functions (0.3), no files."""

from __future__ import annotations

from pprint import pformat

from effcompile.exports.common import Exporter, Subject

_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "gpipe": "GPipe"}
#: Modules beside the layers, of its own models.
_FIRST, _LAST = "tok_embeddings", ("norm", "output")


def _write(subject: Subject) -> str:
    s, header = subject.strategy, "\n".join(f"# {line}" for line in subject.header)
    fields: dict[str, object] = {
        "data_parallel_replicate_degree": s.dp if s.zero == 0 else 1,
        "data_parallel_shard_degree": 1 if s.zero == 0 else s.dp,
        "fsdp_reshard_after_forward": "always" if s.zero == 3 else "never",
        "tensor_parallel_degree": s.tp,
        "enable_sequence_parallel": s.sp,
        "pipeline_parallel_degree": s.pp,
        "context_parallel_degree": s.cp,
    }
    if s.pp > 1:
        fields |= {
            "pipeline_parallel_schedule": _SCHEDULES[s.schedule],
            "pipeline_parallel_microbatch_size": s.micro_batch,
            "module_fqns_per_model_part": _parts(s.cuts),
        }
    mode = {"none": "none", "op": "selective", "layer": "selective", "full": "full"}[s.recompute]
    training = {
        "local_batch_size": s.micro_batch * subject.found.micro_batches,
        "global_batch_size": subject.found.global_batch,
    }
    return (
        f"{header}\nfrom torchtitan.config import ParallelismConfig\n\n"
        f"PARALLELISM = ParallelismConfig(**{pformat(fields, sort_dicts=False)})\n"
        f"ACTIVATION_CHECKPOINT = {mode!r}  # its policy for the layers\nTRAINING = {training!r}\n"
    )


def _parts(cuts: tuple[int, ...]) -> list[list[str]]:
    """The modules of each stage."""
    parts, at = list[list[str]](), 0
    for count in cuts:
        parts.append([f"layers.{i}" for i in range(at, at + count)])
        at += count
    parts[0].insert(0, _FIRST)
    parts[-1] += _LAST
    return parts


TORCHTITAN = Exporter(
    judged="fsdp2",
    write=_write,
    recompute=("none", "op", "full"),
    cannot={
        "zero=1": (lambda s: s.zero == 1, "it replicates, or shards gradients too. Plan with zero=0, 2 or 3"),
        "schedule=zero-bubble": (
            lambda s: s.pp > 1 and s.schedule == "zero-bubble",
            "stages that keep what they remade have another peak",
        ),
        "offload": (
            lambda s: s.offload != "none",
            "a training option of its own, which takes states and parameters together",
        ),
        "sp": (
            lambda s: s.tp > 1 and not s.sp,
            "its tensor parallelism divides the sequence, too. Plan with sp=1",
        ),
    },
)
