"""Tiny Hugging Face models that generate: two layers, width 32, random weights."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn

from effcompile.backends import usable_for_steps
from effcompile.capture.generation import GenerationStep, capture_step
from effcompile.compiler.generation.lower import lower_step
from effcompile.core.goal import Goal
from effcompile.ir.figures import Certificate, Totals
from effcompile.ir.plan import Decision, Plan
from effcompile.runtime.generation.executable import GenerationExecutable
from effcompile.runtime.generation.steps import CacheRoom

CONTEXT = 320
Planned = tuple[nn.Module, GenerationExecutable]


def more(*cases: Any) -> tuple[Any, ...]:
    """Cases of which the suite has one of each kind: where EFFCOMPILE_EVERY is set, as `make fuzz` does."""
    return cases if os.environ.get("EFFCOMPILE_EVERY") else ()


_TINY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "intermediate_size": 48, "max_position_embeddings": 512,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_DELTA = {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("AutoModelForCausalLM", _TINY),
    "gemma3_text": (
        "AutoModelForCausalLM",
        {
            **_TINY,
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": ("AutoModelForCausalLM", {**_TINY, "num_local_experts": 4}),
    "gpt2": (
        "AutoModelForCausalLM",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 512},
    ),
    "t5": (
        "AutoModelForSeq2SeqLM",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "vocab_size": 64,
        },
    ),
    "bart": (
        "AutoModelForSeq2SeqLM",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "vocab_size": 64,
            "max_position_embeddings": 512,
            "forced_eos_token_id": None,
        },
    ),
    "mamba": ("AutoModelForCausalLM", {**_TINY, "state_size": 4}),
    "falcon_mamba": ("AutoModelForCausalLM", {**_TINY, "state_size": 4}),
    "mamba2": (
        "AutoModelForCausalLM",
        {**_TINY, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    ),
    "jamba": (
        "AutoModelForCausalLM",
        {
            **_TINY,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "qwen3_next": ("AutoModelForCausalLM", {**_TINY, **_DELTA, **_EXPERTS}),
    "qwen3_5_text": ("AutoModelForCausalLM", {**_TINY, **_DELTA}),
    "olmo_hybrid": (
        "AutoModelForCausalLM",
        {**_TINY, **_DELTA, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "lfm2": ("AutoModelForCausalLM", {**_TINY, "layer_types": ["conv", "full_attention"]}),
    "falcon_h1": ("AutoModelForCausalLM", {**_TINY, **_MAMBA2, "mamba_d_ssm": 64, "head_dim": 8}),
    "bamba": ("AutoModelForCausalLM", {**_TINY, **_MAMBA2, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "AutoModelForCausalLM",
        {
            **_TINY,
            **_MAMBA2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 16,
        },
    ),
    "nemotron_h": (
        "AutoModelForCausalLM",
        {
            **_TINY,
            **_EXPERTS,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 16,
            "head_dim": 8,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "zamba": (
        "AutoModelForCausalLM",
        {
            **_TINY,
            "num_hidden_layers": 8,
            "attn_layer_period": 3,
            "attn_layer_offset": 2,
            "mamba_d_state": 4,
            "n_mamba_heads": 2,
            "mamba_dt_rank": 4,
            "num_key_value_heads": 4,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        },
    ),
    "zamba2": (
        "AutoModelForCausalLM",
        {
            **_TINY,
            "layers_block_type": ["mamba", "hybrid"],
            "hybrid_layer_ids": [1],
            "mamba_d_state": 8,
            "mamba_headdim": 16,
            "mamba_ngroups": 1,
            "n_mamba_heads": 4,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "num_key_value_heads": 4,
            "adapter_rank": 4,
        },
    ),
    # refused: they have caches of their own, or recurrences of their own
    "rwkv": ("AutoModelForCausalLM", {**_TINY, "attention_hidden_size": 32}),
    "xlstm": ("AutoModelForCausalLM", {**_TINY, "embedding_dim": 32, "num_blocks": 2, "num_heads": 2}),
    "zaya": ("AutoModelForCausalLM", _TINY),
    "deepseek_v4": ("AutoModelForCausalLM", _TINY),
}


def tiny(kind: str, **changes: Any) -> nn.Module:
    """A model of that kind in eval mode, which never stops by itself."""
    auto, settings = _KINDS[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**settings, **changes})
    model = getattr(transformers, auto).from_config(config).eval().float()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    if config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = 1
    return model


#: Of the models below, which live as long as this process, by their identity.
STEPS: dict[int, GenerationStep] = {}


@cache
def captured(kind: str, **changes: Any) -> tuple[nn.Module, GenerationStep]:
    """Such a model and its step, which tests leave as they are."""
    model = tiny(kind, **changes)
    STEPS[id(model)] = step = capture_step(model)
    return model, step


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    """Token ids that are no special ones."""
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(seed))


def bare(
    captured: tuple[nn.Module, GenerationStep],
    backend: str = "torch-eager",
    context: int = CONTEXT,
    *,
    batch: int = 1,
    narrow: str | Mapping[str, str] = "",
    chunk: int = 64,
    decisions: tuple[Decision, ...] = (),
) -> Planned:
    """The model's steps lowered as they are: nothing is priced, which takes longer than all the rest.

    `narrow`: the dtype of its cache, or that of each leaf by name. `decisions`: that a backend itself reads.
    """
    model, step = captured
    step = replace(step, layout=step.layout.narrowed(narrow))
    nothing = Totals()
    proof = Certificate(
        status="", objective=0.0, bound=0.0, gap=0.0, sites=0, alternatives=0, seconds=0.0, solver=""
    )
    plan = Plan(
        model="", fingerprint="", parameters=0, goal=Goal.of(mode="generation", context=context, batch=batch),
        target="", target_line="", backend=backend, decisions=decisions, declined=(), certificate=proof,
        baseline=nothing, predicted=nothing,
    )  # fmt: skip
    lowered, parts = lower_step(
        step, step.program, usable_for_steps(backend)[0], plan, CacheRoom(context=context, chunk=chunk)
    )
    return model, GenerationExecutable(
        model, step, lowered, replace(plan, settings=dict(parts["step"].settings)), parts
    )


def same(planned: Planned, *inputs: torch.Tensor, **how: Any) -> torch.Tensor:
    """Both generate the same tokens, drawn from the same random numbers."""
    model, executable = planned
    torch.manual_seed(5)
    wanted: torch.Tensor = model.generate(*inputs, **how)  # type: ignore[operator]
    torch.manual_seed(5)
    assert torch.equal(executable.generate(*inputs, **how), wanted)
    return wanted
