"""Tiny Hugging Face models with a named attention implementation, and the side operands of the attentions in
their graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import fx

from effcompile.capture import capture
from effcompile.ir.program import Program, shape_of

aten = torch.ops.aten
_TEXT = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
_GROUPED = _TEXT | {"num_key_value_heads": 1, "head_dim": 8}
_KINDS = ["sliding_attention", "full_attention"]
#: name → config class, model class, fields; `window` is put in by `build`.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaModel", _GROUPED | {"num_hidden_layers": 1}),
    "mistral": (
        "MistralConfig",
        "MistralModel",
        _GROUPED | {"num_hidden_layers": 1, "sliding_window": "window"},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3TextModel",
        _GROUPED | {"sliding_window": "window", "layer_types": _KINDS},
    ),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertModel",
        _TEXT
        | {
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": "window",
            "global_attn_every_n_layers": 2,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4TextModel",
        _GROUPED
        | {
            "attention_chunk_size": "window",
            "layer_types": ["chunked_attention", "full_attention"],
            "intermediate_size_mlp": 32,
        }
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "no_rope_layers": [0, 1]},
    ),
    "bert": ("BertConfig", "BertModel", _TEXT | {"num_hidden_layers": 1}),
    "gpt2": (
        "GPT2Config",
        "GPT2Model",
        {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 512},
    ),
    "t5": (
        "T5Config",
        "T5EncoderModel",
        {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    ),
    "bloom": ("BloomConfig", "BloomModel", {"vocab_size": 64, "hidden_size": 16, "n_layer": 1, "n_head": 2}),
    "mpt": (
        "MptConfig",
        "MptModel",
        {"vocab_size": 64, "d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 512},
    ),
    "falcon": ("FalconConfig", "FalconModel", _TEXT | {"num_hidden_layers": 1, "alibi": True}),
    "deberta": (
        "DebertaV2Config",
        "DebertaV2Model",
        _TEXT
        | {
            "num_hidden_layers": 1,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_biased_input": False,
        },
    ),
}


def captured(name: str, attention: str, seq: int, window: int, padded: int = 0) -> Program:
    """The program of a tiny model for a batch of 2, of which the second row has `padded` tokens less, on the
    left.
    """
    config_name, model_name, fields = MODELS[name]
    config = getattr(transformers, config_name)(
        **{k: window if v == "window" else v for k, v in fields.items()}
    )
    torch.manual_seed(0)
    model = getattr(transformers, model_name)._from_config(config, attn_implementation=attention).eval()
    mask = torch.ones(2, seq, dtype=torch.long)
    mask[1, :padded] = 0
    return capture(model, (), {"input_ids": torch.randint(3, 64, (2, seq)), "attention_mask": mask})


@dataclass(frozen=True, kw_only=True, eq=False)
class SideOperand:
    """What is added to, or written over, the scores of one attention."""

    node: fx.Node
    sense: Any
    q_len: int
    k_len: int
    fill: float | None = None


def operands(program: Program) -> list[SideOperand]:
    """Each once, in graph order: from every softmax up to the product of queries and keys, and of
    every SDPA.
    """
    found: dict[fx.Node, SideOperand] = {}
    for node in program.calls():
        for operand in (*_eager(node), *_sdpa(node)):
            found.setdefault(operand.node, operand)
    return list(found.values())


def _eager(softmax: fx.Node) -> Iterator[SideOperand]:
    if softmax.target not in (aten.softmax.int, aten._softmax.default):
        return
    node: Any = softmax.args[0]
    q_len, k_len = shape_of(node)[-2:]
    while node.target not in (aten.matmul.default, aten.bmm.default, aten.baddbmm.default):
        if node.target is aten.masked_fill.Scalar:
            yield SideOperand(node=node.args[1], sense="hidden", q_len=q_len, k_len=k_len, fill=node.args[2])
        elif node.target is aten.add.Tensor:
            yield SideOperand(node=node.args[1], sense="added", q_len=q_len, k_len=k_len)
        node = node.args[0]


def _sdpa(node: fx.Node) -> Iterator[SideOperand]:
    if (
        node.target is not aten.scaled_dot_product_attention.default
        or len(node.args) < 4
        or node.args[3] is None
    ):
        return
    mask: Any = node.args[3]
    sense = "visible" if mask.meta["val"].dtype is torch.bool else "added"
    yield SideOperand(
        node=mask, sense=sense, q_len=shape_of(node.args[0])[-2], k_len=shape_of(node.args[1])[-2]
    )
