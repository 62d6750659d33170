"""Attention as HuggingFace and torch write it: a registry of families, each built at any size with eager
attention and padded inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Built = tuple[torch.nn.Module, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the model and its batch are.

    `window` is that of local attention, `image` and `patch` in pixels.
    """

    batch: int = 2
    seq: int = 16
    layers: int = 2
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 128
    inner: int = 64
    window: int = 6
    image: int = 32
    patch: int = 8

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def positions(self) -> int:
        return max(64, 2 * self.seq)


Fields = dict[str, Any]
Config = Callable[[Sizes], Fields]
ATTENTION = "eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """HF config and model class, the config's fields, which inputs it takes, and how many attentions it has
    with two layers.
    """

    config: str
    model: str
    fields: Config
    inputs: str = "text"
    attentions: int = 2
    variant: str = "scale, mask"


def _text(s: Sizes) -> Fields:
    return {
        "vocab_size": s.vocab, "hidden_size": s.width, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "intermediate_size": s.inner, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "max_position_embeddings": s.positions,
    }  # fmt: skip


def _grouped(s: Sizes) -> Fields:
    return _text(s) | {"num_key_value_heads": s.kv_heads, "head_dim": s.head_dim}


def _local(s: Sizes) -> Fields:
    """The first layer sees a window, the second everything."""
    return _grouped(s) | {"sliding_window": s.window, "layer_types": _layer_types("sliding_attention", s)}


def _layer_types(first: str, s: Sizes) -> list[str]:
    return [first if layer % 2 == 0 else "full_attention" for layer in range(s.layers)]


def _gpt2(s: Sizes) -> Fields:
    return {
        "vocab_size": s.vocab, "n_embd": s.width, "n_layer": s.layers, "n_head": s.heads,
        "n_positions": s.positions, "n_inner": s.inner, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0,
    }  # fmt: skip


def _rotary(s: Sizes) -> Fields:
    return _gpt2(s) | {"rotary_dim": s.head_dim // 2}


def _bart(s: Sizes) -> Fields:
    fields = {
        "vocab_size": s.vocab, "d_model": s.width, "encoder_layers": s.layers, "decoder_layers": s.layers,
        "pad_token_id": 0, "encoder_attention_heads": s.heads, "decoder_attention_heads": s.heads,
        "encoder_ffn_dim": s.inner, "decoder_ffn_dim": s.inner, "bos_token_id": 1, "eos_token_id": 2,
        "max_position_embeddings": s.positions, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
    }  # fmt: skip
    return fields


def _t5(s: Sizes) -> Fields:
    return {
        "vocab_size": s.vocab, "d_model": s.width, "d_kv": s.head_dim, "d_ff": s.inner,
        "num_layers": s.layers, "num_heads": s.heads, "decoder_start_token_id": 0, "pad_token_id": 0,
        "eos_token_id": 2,
    }  # fmt: skip


def _vision(s: Sizes) -> Fields:
    return {
        "hidden_size": s.width, "num_hidden_layers": s.layers, "num_attention_heads": s.heads,
        "intermediate_size": s.inner, "image_size": s.image, "patch_size": s.patch,
    }  # fmt: skip


def _swin(s: Sizes) -> Fields:
    return {
        "image_size": s.image, "patch_size": s.patch // 2, "embed_dim": s.width // 2, "depths": [2, 2],
        "num_heads": [2, 4], "window_size": 4,
    }  # fmt: skip


def _deberta(s: Sizes) -> Fields:
    return _text(s) | {
        "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False,
        "max_relative_positions": s.positions,
    }  # fmt: skip


def _mla(s: Sizes) -> Fields:
    return _text(s) | {
        "num_key_value_heads": s.heads, "q_lora_rank": s.width // 2, "kv_lora_rank": s.width // 2,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": s.head_dim, "v_head_dim": s.head_dim - 2,
        "moe_intermediate_size": s.inner, "n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    }  # fmt: skip


def _llama4(s: Sizes) -> Fields:
    return _grouped(s) | {
        "attention_chunk_size": s.window,
        "layer_types": [("chunked_attention", "full_attention")[i % 2] for i in range(s.layers)],
        "intermediate_size_mlp": s.inner,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "no_rope_layers": [i % 2 for i in range(s.layers)],
    }


def _bloom(s: Sizes) -> Fields:
    return {
        "vocab_size": s.vocab, "hidden_size": s.width, "n_layer": s.layers, "n_head": s.heads,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _mpt(s: Sizes) -> Fields:
    return {
        "vocab_size": s.vocab,
        "d_model": s.width,
        "n_layers": s.layers,
        "n_heads": s.heads,
        "max_seq_len": s.positions,
    }


def _clip(s: Sizes) -> Fields:
    return {"text_config": _text(s), "vision_config": _vision(s), "projection_dim": 16}


def _xlnet(s: Sizes) -> Fields:
    return {
        "vocab_size": s.vocab,
        "d_model": s.width,
        "n_layer": s.layers,
        "n_head": s.heads,
        "d_inner": s.inner,
        "pad_token_id": 0,
    }


def _distilbert(s: Sizes) -> Fields:
    fields: Fields = {
        "vocab_size": s.vocab,
        "dim": s.width,
        "n_layers": s.layers,
        "n_heads": s.heads,
        "hidden_dim": s.inner,
    }
    return fields | {"pad_token_id": 0, "max_position_embeddings": s.positions}


def _whisper(s: Sizes) -> Fields:
    return _bart(s) | {"num_mel_bins": 8, "max_source_positions": s.seq, "max_target_positions": s.positions}


def _blocks(s: Sizes) -> Fields:
    """gpt-neo: global and local layers in turn."""
    kinds = [[["global", "local"], s.layers // 2]]
    fields: Fields = {
        "vocab_size": s.vocab,
        "hidden_size": s.width,
        "num_layers": s.layers,
        "num_heads": s.heads,
        "attention_types": kinds,
    }
    return fields | {
        "intermediate_size": s.inner,
        "window_size": s.window,
        "max_position_embeddings": s.positions,
        "pad_token_id": 0,
    }


def _with(base: Config, **more: Any) -> Config:
    return lambda sizes: base(sizes) | more


def _lm(prefix: str, fields: Config = _text, head: str = "ForCausalLM", **more: Any) -> Family:
    return Family(config=f"{prefix}Config", model=f"{prefix}{head}", fields=fields, **more)


def _encoder(prefix: str, fields: Config = _text, **more: Any) -> Family:
    return _lm(prefix, fields, "Model", **more)


def _image(prefix: str, fields: Config = _vision, **more: Any) -> Family:
    return _lm(prefix, fields, "Model", inputs="image", **more)


def _both(prefix: str, fields: Config = _bart, head: str = "ForConditionalGeneration", **more: Any) -> Family:
    return _lm(prefix, fields, head, inputs="seq2seq", **{"attentions": 6} | more)


#: The 26 families of which Inductor's patterns fuse 2 (shared/facts/kernels.md, section 3a).
LISTED: dict[str, Family] = {
    "llama": _lm("Llama", _grouped),
    "mistral": _lm("Mistral", lambda s: _grouped(s) | {"sliding_window": s.window}),
    "qwen3": _lm("Qwen3", _grouped),
    "gemma2": _lm(
        "Gemma2", _with(_local, attn_logit_softcapping=20.0, query_pre_attn_scalar=8), variant="softcap"
    ),
    "gemma3": Family(
        config="Gemma3TextConfig", model="Gemma3ForCausalLM", fields=_with(_local, query_pre_attn_scalar=8)
    ),
    "gpt_oss": _lm("GptOss", _with(_local, num_local_experts=4, num_experts_per_tok=4), variant="sink"),
    "gpt2": _lm("GPT2", _gpt2, "LMHeadModel"),
    "bert": _encoder("Bert"),
    "t5": _both("T5", _t5, variant="relative bias"),
    "mpt": _lm("Mpt", _mpt, variant="ALiBi, masked_fill"),
    "bloom": _lm("Bloom", _bloom, variant="ALiBi in baddbmm"),
    "deberta-v2": _encoder("DebertaV2", _deberta, variant="disentangled bias"),
    "opt": _lm("OPT", lambda s: _text(s) | {"ffn_dim": s.inner, "word_embed_proj_dim": s.width}),
    "phi3": _lm("Phi3", _grouped),
    "olmo2": _lm("Olmo2", _grouped),
    "cohere": _lm("Cohere", _grouped),
    "gpt_neox": _lm("GPTNeoX"),
    "modernbert": _encoder(
        "ModernBert",
        lambda s: (
            _text(s)
            | {
                "cls_token_id": 1,
                "sep_token_id": 2,
                "local_attention": s.window,
                "global_attn_every_n_layers": 2,
            }
        ),
    ),
    "starcoder2": _lm("Starcoder2", _grouped),
    "granite": _lm("Granite", _with(_grouped, attention_multiplier=0.2)),
    "stablelm": _lm("StableLm", _grouped),
    "nemotron": _lm("Nemotron", _grouped),
    "llama4": Family(config="Llama4TextConfig", model="Llama4ForCausalLM", fields=_llama4),
    "falcon": _lm("Falcon", _with(_text, alibi=True), variant="ALiBi in place"),
    "gptj": _lm("GPTJ", _rotary, variant="divide, mask"),
    "vit": _image("ViT", variant="scale"),
}

#: Families not on that list.
OTHERS: dict[str, Family] = {
    "deepseek_v3": _lm("DeepseekV3", _mla, variant="MLA"),
    "falcon-rope": _lm("Falcon", _with(_text, alibi=False), variant="multi-query"),
    "electra": _encoder("Electra", _with(_text, embedding_size=16)),
    "roberta": _encoder("Roberta"),
    "albert": _encoder("Albert", _with(_text, embedding_size=16)),
    "distilbert": _encoder("DistilBert", _distilbert),
    "deberta": _encoder("Deberta", _with(_deberta, pos_att_type="c2p|p2c"), variant="disentangled bias"),
    "mpnet": _encoder("MPNet", variant="relative bias"),
    "esm": _encoder("Esm", _with(_text, mask_token_id=3)),
    "roformer": _encoder("RoFormer", lambda s: _text(s) | {"embedding_size": s.width}),
    "xlnet": _encoder("XLNet", _xlnet, variant="einsum, relative bias"),
    "bart": _both("Bart"),
    "mbart": _both("MBart"),
    "pegasus": _both("Pegasus"),
    "marian": _both("Marian", head="MTModel"),
    "blenderbot": _both("Blenderbot"),
    "whisper": _lm("Whisper", _whisper, "ForConditionalGeneration", inputs="mel", attentions=6),
    "gemma": _lm("Gemma", _grouped),
    "phi": _lm("Phi", _grouped),
    "qwen2": _lm("Qwen2", _grouped),
    "mixtral": _lm("Mixtral", _with(_grouped, num_local_experts=4, num_experts_per_tok=4)),
    "codegen": _lm("CodeGen", _rotary, variant="divide, mask"),
    "gpt_bigcode": _lm("GPTBigCode", _gpt2, variant="multi-query"),
    "gpt_neo": _lm("GPTNeo", _blocks),
    "xglm": _lm(
        "XGLM",
        lambda s: (
            {
                "vocab_size": s.vocab,
                "d_model": s.width,
                "num_layers": s.layers,
                "attention_heads": s.heads,
                "ffn_dim": s.inner,
            }
            | {
                "max_position_embeddings": s.positions,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
        ),
    ),
    "deit": _image("DeiT", variant="scale"),
    "beit": _image("Beit", _with(_vision, use_relative_position_bias=True), variant="relative bias"),
    "dinov2": _image("Dinov2", variant="scale"),
    "swin": _image("Swin", _swin, attentions=4, variant="relative bias, shifted windows"),
    "swinv2": _image("Swinv2", _swin, attentions=4, variant="cosine, relative bias, shifted windows"),
    "clip": _lm("CLIP", _clip, "Model", inputs="text+image", attentions=4),
}

#: nn.Modules of torch itself.
TORCH = ("torch-encoder", "torch-mha", "torch-mha-weights")
NAMES = (*LISTED, *OTHERS, *TORCH)


def build(name: str, sizes: Sizes | None = None, *, attention: str = ATTENTION) -> Built:
    """The model, random weights, no dropout, and its inputs, padded where it takes a mask.

    Raises:
        KeyError: no family has this name.
    """
    import torch

    sizes = sizes or Sizes()
    torch.manual_seed(0)
    if name in TORCH:
        return _torch_module(name, sizes)
    import transformers

    family = (LISTED | OTHERS)[name]
    config = _without_dropout(getattr(transformers, family.config)(**family.fields(sizes)))
    model = getattr(transformers, family.model)._from_config(config, attn_implementation=attention)
    _spread(model)
    return model, _inputs(family, model, sizes)


def attentions_of(name: str, sizes: Sizes | None = None) -> int:
    """How many attentions the family has. Swin's depth is fixed."""
    layers = (sizes or Sizes()).layers
    per_two_layers = 2 if name in TORCH else (LISTED | OTHERS)[name].attentions
    return per_two_layers if name.startswith("swin") else per_two_layers * layers // 2


def variant_of(name: str) -> str:
    """In a few words, what its attention has that others have not."""
    return "3-D bmm" if name in TORCH else (LISTED | OTHERS)[name].variant


def _without_dropout(config: Any) -> Any:
    """Every dropout rate of a config, and of the configs in it, is 0."""
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
        elif hasattr(value, "model_type"):
            _without_dropout(value)
    if hasattr(config, "loss_type"):
        config.loss_type = None
    return config


def _spread(model: torch.nn.Module) -> None:
    """Weights so large that scores differ: at HF's 0.02 every softmax is nearly uniform, and an error in it
    would not show.
    """
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=1.0 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)


def _inputs(family: Family, model: Any, s: Sizes) -> dict[str, Any]:
    import torch

    mask = torch.ones(s.batch, s.seq, dtype=torch.long)
    for row in range(1, s.batch):  # the first row is whole, the others lose 3, 4, ... tokens on the left
        mask[row, : 2 + row] = 0
    tokens = {"input_ids": torch.randint(4, s.vocab, (s.batch, s.seq)), "attention_mask": mask}
    decoder = {"decoder_input_ids": torch.randint(4, s.vocab, (s.batch, s.seq - 4))}
    image = {"pixel_values": torch.randn(s.batch, 3, s.image, s.image)}
    mel = {"input_features": torch.randn(s.batch, 8, 2 * s.seq)}
    kinds: Mapping[str, dict[str, Any]] = {
        "text": tokens, "seq2seq": tokens | decoder, "image": image, "text+image": tokens | image,
        "mel": mel | decoder,
    }  # fmt: skip
    return dict(kinds[family.inputs])


def _torch_module(name: str, s: Sizes) -> Built:
    import torch
    from torch import nn

    class Layers(nn.Module):
        """Self-attentions one after the other; with `weights`, the form that computes them, unread."""

        def __init__(self, weights: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.MultiheadAttention(s.width, s.heads, batch_first=True) for _ in range(s.layers)
            )
            self.weights = weights

        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x, x, x, key_padding_mask=hidden, need_weights=self.weights)[0]
            return x

    hidden = torch.zeros(s.batch, s.seq, dtype=torch.bool)
    hidden[1:, -3:] = True
    x = torch.randn(s.batch, s.seq, s.width)
    if name == "torch-encoder":
        layer = nn.TransformerEncoderLayer(s.width, s.heads, s.inner, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, s.layers, enable_nested_tensor=False), {
            "src": x,
            "src_key_padding_mask": hidden,
        }
    return Layers(weights=name == "torch-mha-weights"), {"x": x, "hidden": hidden}
