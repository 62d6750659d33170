"""The configuration of a stock engine that a plan for many devices stands for, as text.

Knows no torch: strategies in, files out.

A plan says what an engine's ranks hold only if it was made for that engine (`--strategy engine=fsdp2`), so
that the peak in the file is the engine's own, with its interval. What an engine cannot say is refused with
the reason.
"""

from __future__ import annotations

from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.exports.common import Exporter, Subject
from effcompile.exports.fsdp2 import FSDP2
from effcompile.exports.json_files import ACCELERATE, DEEPSPEED, HUGGINGFACE
from effcompile.exports.megatron import MEGATRON
from effcompile.exports.torchtitan import TORCHTITAN
from effcompile.ir.plan import Plan

__all__ = ["ENGINES", "exported"]

#: Engine → what writes its file.
ENGINES: dict[str, Exporter] = {
    "fsdp2": FSDP2,
    "hf": HUGGINGFACE,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
    "megatron": MEGATRON,
    "torchtitan": TORCHTITAN,
}


def exported(plan: Plan, engine: str) -> str:
    """The file of an engine.

    Raises:
        UnknownNameError: no such engine. UsageError: the plan is not for it, or says what it cannot.
    """
    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, tuple(ENGINES))
    chosen = ENGINES[engine]
    found = plan.distributed
    if found is None:
        raise UsageError(
            "The plan is for one device, or for our own lowering, which is its own script. Plan for an "
            "engine: effcompile plan MODEL "
            f'--mode training --devices 8 --strategy "engine={chosen.judged}" -o DIR.'
        )
    if found.strategy.engine != chosen.judged:
        raise UsageError(
            f"The plan counts the buffers of the engine {found.strategy.engine!r}, and {engine} has those "
            f"of {chosen.judged!r}: its peak "
            f'would be another one. Plan again with --strategy "engine={chosen.judged}".'
        )
    subject = Subject(model=plan.model, found=found)
    for part, reason in chosen.refused(subject):
        raise UsageError(f"{engine} cannot say {part}: {reason}")
    return chosen.write(subject)
