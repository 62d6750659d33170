"""A Qwen2 model as a GGUF file, version 3 (ggml-org/ggml, docs/gguf.md): what llama.cpp reads.

Matrices are in bf16, vectors in fp32; there is no tokenizer in it, for tokens are given.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_ALIGNED = 32
_F32, _BF16 = 0, 30
_UINT32, _FLOAT32, _STRING = 4, 6, 8
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write(model: Any, path: Path) -> None:
    """A `Qwen2ForCausalLM` with a tied head."""
    config = model.config
    settings: dict[str, int | float | str] = {
        "general.architecture": "qwen2",
        "general.file_type": 32,
        "qwen2.block_count": config.num_hidden_layers,
        "qwen2.context_length": config.max_position_embeddings,
        "qwen2.embedding_length": config.hidden_size,
        "qwen2.feed_forward_length": config.intermediate_size,
        "qwen2.attention.head_count": config.num_attention_heads,
        "qwen2.attention.head_count_kv": config.num_key_value_heads,
        "qwen2.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "qwen2.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "qwen2.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "none",
    }
    tensors = dict(_tensors(model))
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings)))
        for key, value in settings.items():
            file.write(_string(key) + _value(value))
        at = 0
        for name, tensor in tensors.items():
            sizes = tuple(reversed(tensor.shape))
            file.write(_string(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
            file.write(struct.pack("<IQ", _BF16 if tensor.dtype == torch.bfloat16 else _F32, at))
            at += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        for tensor in tensors.values():
            file.write(bytes(-file.tell() % _ALIGNED))
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        file.write(bytes(-file.tell() % _ALIGNED))


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if name in _TOP:
            told = _TOP[name]
        else:
            layer, rest = name.removeprefix("model.layers.").split(".", 1)
            stem, kind = rest.rsplit(".", 1)
            told = f"blk.{layer}.{_OF_LAYER[stem]}.{kind}"
        held = parameter.detach()
        yield told, held.bfloat16() if held.dim() == 2 else held.float()


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: float | str) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    kind, form = (_UINT32, "<II") if isinstance(value, int) else (_FLOAT32, "<If")
    return struct.pack(form, kind, value)
