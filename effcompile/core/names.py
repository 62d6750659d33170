"""The names of passes and backends, each with what it does: known before torch is loaded.

Tests hold them equal to the registries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from effcompile.core.errors import UnknownNameError
from effcompile.core.installed import entry_points

#: Of an inference plan, in order of application.
INFERENCE_PASSES: Mapping[str, str] = {
    "shrink": "removes heads and channels that the outputs do not need (structured pruning)",
    "fold": "folds gains and BatchNorm into the weights of the linears beside them",
    "merge": "computes linears of one input as one",
    "logits": "computes the logits of the last token alone, where only they are read",
    "attention": "finds attentions and gives each the kernel for its mask",
    "predict": "leaves out tiles of attention that are predicted to be near zero",
    "fuse": "fuses GELU, and norms with what is added before them",
    "rows": "fuses norms, gates and rotary embeddings row by row",
    "quantize": "stores weights in 8 or 4 bits, and computes in 8 where that is faster",
    "precompute": "computes once what weights alone make",
    "sparsify": "stores weights in blocks, or two of four, where most are zero",
    "speculate": "drafts tokens of a generation from the text before, where that is measured to be faster",
}
#: Of a training plan, in order of application.
TRAINING_PASSES: Mapping[str, str] = {
    "microbatch": "runs the step in parts of the batch and adds up their gradients",
    "tensor": "tensor-parallel ranks: divides heads and neurons among them",
    "precision": "computes in bf16 or fp16, with the master weights in fp32",
    "attention": "attention without its matrix of scores, forward and backward",
    "loss_head": "computes logits and loss in chunks; adds tied gradients in place",
    "parts": "sums the gradients of a value's parts, read in a loop, in place",
    "wide": "computes 16-bit products in fp32, rounded once, where that is faster",
    "tiled": "gradients of bf16 attentions by AMX's tiles, where that is faster",
    "int8": "computes products with weights in 8 bits, gradients of weights in full (SwitchBack)",
    "frozen": "holds weights that are not trained in 8 or 4 bits (QLoRA)",
    "pointwise": "runs chains of element-wise operators as one kernel",
    "shard": "data-parallel ranks: replicates parameters, or shards and gathers them",
    "pipeline": "ranks with some of the layers each, which hand micro-batches on",
    "states": "holds the optimizer's states in 8 bits, or on the host",
    "checkpoint": "chooses what each block keeps from forward to backward, and what it computes again",
    "offload": "holds kept activations on the host",
    "compress": "holds kept activations in fewer bits",
    "bitmask": "holds dropout's masks as bits from forward to backward",
}
#: Those that take part only where they are named, or one of their options is set.
OPTIONAL = frozenset(
    {
        "offload",
        "compress",
        "bitmask",
        "fold",
        "predict",
        "speculate",
        "microbatch",
        "precision",
        "frozen",
        "int8",
    }
)
BACKENDS: Mapping[str, str] = {
    "onnxruntime": "ONNX Runtime",
    "torch-eager": "PyTorch, operator by operator, weights packed",
    "torch-inductor": "PyTorch, compiled by Inductor",
    "openvino": "OpenVINO",
    "triton": "PyTorch with our kernels in Triton, on a GPU",
}

#: What others call them, so that a search by such a name ends at the right one.
_OTHERWISE: Mapping[str, str] = {
    **dict.fromkeys(("remat", "rematerialize", "recompute", "gradient_checkpointing"), "checkpoint"),
    **dict.fromkeys(("accumulate", "gradient_accumulation"), "microbatch"),
    **dict.fromkeys(("amp", "autocast", "mixed_precision"), "precision"),
    **dict.fromkeys(("prune", "pruning"), "shrink"),
    **dict.fromkeys(("zero", "fsdp"), "shard"),
    **dict.fromkeys(("flash", "sdpa"), "attention"),
    "qlora": "frozen",
    "speculative": "speculate",
}


def unknown_pass(name: str, known: Iterable[str]) -> UnknownNameError:
    """That there is no such pass among those known, and the nearest of them."""
    return UnknownNameError("pass", name, known, _OTHERWISE)


def check_passes(given: Iterable[str]) -> None:
    """Refuse a pass that there is none of.

    Raises:
        UnknownNameError: as loading it would.
    """
    known = {*INFERENCE_PASSES, *TRAINING_PASSES}
    for item in given:
        name = item.partition("=")[0].partition(".")[0].strip()
        if name not in known and name.removeprefix("no-") not in known:
            known |= (
                _installed("effcompile.passes")
                | _installed("effcompile.training_passes")
                | _installed("effcompile.value_levers")
            )
            if name not in known and name.removeprefix("no-") not in known:
                raise unknown_pass(name.removeprefix("no-"), known)


def check_backend(name: str | None) -> None:
    """Refuse a backend that there is none of; "torch" is a training step's.

    Raises:
        UnknownNameError: as loading it would.
    """
    if (
        name is not None
        and name not in (*BACKENDS, "torch")
        and name not in (found := _installed("effcompile.backends"))
    ):
        raise UnknownNameError("backend", name, {*BACKENDS, *found})


def _installed(group: str) -> set[str]:
    return {entry.name for entry in entry_points(group=group)}
