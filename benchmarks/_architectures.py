"""The HuggingFace architectures of architectures.py: tiny configs, and the inputs each takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

B, S, V, D = 2, 16, 128, 32
Built = tuple[Any, dict[str, Any]]

#: The usual config of a text model; each architecture adds what it calls otherwise.
TEXT = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
MOE = {**LLAMA, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32}
VISION = {
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
AUDIO = {
    **{k: v for k, v in TEXT.items() if k != "pad_token_id"},
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Arch:
    """HF config and model class, config fields, and which inputs it takes."""

    config: str
    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    inputs: str = "text"
    family: str = "encoder"


def _encoder(prefix: str, head: str = "Model", **fields: Any) -> Arch:
    return Arch(f"{prefix}Config", f"{prefix}{head}", {**TEXT, **fields})


def _decoder(prefix: str, base: dict[str, Any] = LLAMA, head: str = "ForCausalLM", **fields: Any) -> Arch:
    family = "moe" if base is MOE or "num_local_experts" in fields else "decoder"
    return Arch(f"{prefix}Config", f"{prefix}{head}", {**base, **fields}, family=family)


def _both(prefix: str, head: str = "ForConditionalGeneration", **fields: Any) -> Arch:
    return Arch(f"{prefix}Config", f"{prefix}{head}", fields, inputs="seq2seq", family="encoder-decoder")


def _vision(prefix: str, head: str = "Model", **fields: Any) -> Arch:
    return Arch(f"{prefix}Config", f"{prefix}{head}", {**VISION, **fields}, inputs="image", family="vision")


_BART = {
    "vocab_size": V,
    "d_model": D,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
_BART |= {
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
_BART |= {"decoder_start_token_id": 2, "forced_eos_token_id": 2}
_T5 = {
    "vocab_size": V,
    "d_model": D,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_GPT2 = {
    "vocab_size": V,
    "n_embd": D,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWERS = {
    "text_config": {**TEXT, "max_position_embeddings": 64},
    "vision_config": dict(VISION),
    "projection_dim": 16,
}

ARCHITECTURES: dict[str, Arch] = {
    # text encoders
    "bert": _encoder("Bert"),
    "roberta": _encoder("Roberta"),
    "distilbert": Arch(
        "DistilBertConfig",
        "DistilBertModel",
        {"vocab_size": V, "dim": D, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    ),
    "albert": _encoder("Albert", embedding_size=16),
    "electra": _encoder("Electra", embedding_size=16),
    "mobilebert": _encoder("MobileBert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    "camembert": _encoder("Camembert"),
    "xlm-roberta": _encoder("XLMRoberta"),
    "mpnet": _encoder("MPNet"),
    "deberta": _encoder(
        "Deberta", relative_attention=True, pos_att_type="c2p|p2c", position_biased_input=False
    ),
    "deberta-v2": _encoder(
        "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False
    ),
    "modernbert": _encoder("ModernBert", cls_token_id=1, sep_token_id=2),
    "ernie": _encoder("Ernie"),
    "esm": _encoder("Esm", mask_token_id=3),
    "convbert": _encoder("ConvBert", embedding_size=16),
    "squeezebert": _encoder("SqueezeBert", embedding_size=D),
    "layoutlm": _encoder("LayoutLM"),
    "roformer": _encoder("RoFormer", embedding_size=D),
    "funnel": Arch(
        "FunnelConfig",
        "FunnelModel",
        {"vocab_size": V, "d_model": D, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1]},
    ),
    "longformer": _encoder("Longformer", attention_window=8),
    "reformer": Arch(
        "ReformerConfig",
        "ReformerModel",
        {
            "vocab_size": V,
            "hidden_size": D,
            "num_attention_heads": 2,
            "attention_head_size": 16,
            "feed_forward_size": 64,
        }
        | {
            "axial_pos_embds": False,
            "attn_layers": ["local", "lsh"],
            "num_buckets": 2,
            "local_attn_chunk_length": 8,
            "lsh_attn_chunk_length": 8,
        }
        | {"is_decoder": False, "max_position_embeddings": 64},
    ),
    # decoders
    "gpt2": Arch("GPT2Config", "GPT2LMHeadModel", _GPT2, family="decoder"),
    "gpt-neo": _decoder(
        "GPTNeo",
        TEXT,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
    ),
    "gpt-neox": _decoder("GPTNeoX", TEXT),
    "gptj": Arch("GPTJConfig", "GPTJForCausalLM", {**_GPT2, "rotary_dim": 4}, family="decoder"),
    "gpt-bigcode": Arch("GPTBigCodeConfig", "GPTBigCodeForCausalLM", _GPT2, family="decoder"),
    "opt": _decoder("OPT", TEXT, ffn_dim=64, word_embed_proj_dim=D, max_position_embeddings=64),
    "bloom": Arch(
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": V, "hidden_size": D, "n_layer": 2, "n_head": 4},
        family="decoder",
    ),
    "falcon": _decoder("Falcon", TEXT),
    "mpt": Arch(
        "MptConfig",
        "MptForCausalLM",
        {"vocab_size": V, "d_model": D, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        family="decoder",
    ),
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral"),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3"),
    "gemma": _decoder("Gemma"),
    "gemma2": _decoder("Gemma2"),
    "gemma3": Arch("Gemma3TextConfig", "Gemma3ForCausalLM", LLAMA, family="decoder"),
    "phi": _decoder("Phi"),
    "phi3": _decoder("Phi3"),
    "olmo": _decoder("Olmo"),
    "olmo2": _decoder("Olmo2"),
    "cohere": _decoder("Cohere"),
    "granite": _decoder("Granite"),
    "stablelm": _decoder("StableLm"),
    "starcoder2": _decoder("Starcoder2"),
    "smollm3": _decoder("SmolLM3"),
    # mixtures of experts
    "mixtral": _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe": _decoder("Qwen2Moe", MOE, shared_expert_intermediate_size=32),
    "qwen3-moe": _decoder("Qwen3Moe", MOE),
    "olmoe": _decoder("Olmoe", MOE),
    "gpt-oss": _decoder("GptOss", num_local_experts=4, num_experts_per_tok=2),
    "granitemoe": _decoder("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    # state-space models
    "mamba": Arch(
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 1, "state_size": 4},
        "ids",
        "ssm",
    ),
    "rwkv": Arch(
        "RwkvConfig",
        "RwkvForCausalLM",
        {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 2},
        "ids",
        "ssm",
    ),
    # encoder-decoders
    "t5": _both("T5", **_T5),
    "mt5": _both("MT5", **_T5),
    "umt5": _both("UMT5", **_T5),
    "bart": _both("Bart", **_BART),
    "mbart": _both("MBart", **_BART),
    "pegasus": _both("Pegasus", **_BART),
    "marian": _both("Marian", "MTModel", **_BART),
    "m2m-100": _both("M2M100", **_BART),
    "blenderbot": _both("Blenderbot", **_BART),
    # vision
    "vit": _vision("ViT"),
    "deit": _vision("DeiT"),
    "beit": _vision("Beit"),
    "dinov2": _vision("Dinov2"),
    "vit-mae": _vision("ViTMAE", mask_ratio=0.0),
    "swin": Arch(
        "SwinConfig",
        "SwinModel",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 2,
        },
        "image",
        "vision",
    ),
    "convnext": _vision("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "resnet": _vision("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    "segformer": _vision(
        "Segformer",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        num_attention_heads=[1, 2],
    ),
    # audio
    "wav2vec2": Arch("Wav2Vec2Config", "Wav2Vec2Model", AUDIO, "waveform", "audio"),
    "hubert": Arch("HubertConfig", "HubertModel", AUDIO, "waveform", "audio"),
    "whisper": Arch(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**_BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64},
        "mel",
        "audio",
    ),
    "audio-spectrogram-transformer": Arch(
        "ASTConfig", "ASTModel", {**VISION, "max_length": 32, "num_mel_bins": 16}, "spectrogram", "audio"
    ),
    # multimodal
    "clip": Arch("CLIPConfig", "CLIPModel", _TOWERS, "text+image", "multimodal"),
    "siglip": Arch("SiglipConfig", "SiglipModel", _TOWERS, "text+image", "multimodal"),
    "vilt": Arch(
        "ViltConfig",
        "ViltModel",
        {**TEXT, **VISION, "max_position_embeddings": 64},
        "text+image",
        "multimodal",
    ),
    "blip": Arch("BlipConfig", "BlipModel", _TOWERS, "text+image", "multimodal"),
    "flava-text": Arch(
        "FlavaTextConfig", "FlavaTextModel", {**TEXT, "max_position_embeddings": 64}, "text", "multimodal"
    ),
}


def build(arch: Arch, batch: int = B, length: int = S) -> Built:
    """The model with random weights and its example inputs, of `batch` examples with `length` tokens where
    they are text.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, arch.config)(**arch.fields)
    model = getattr(transformers, arch.model)(config).eval()
    tokens = {
        "input_ids": torch.randint(4, V, (batch, length)),
        "attention_mask": torch.ones(batch, length, dtype=torch.long),
    }
    image = {"pixel_values": torch.randn(batch, 3, 32, 32)}
    decoder = {"decoder_input_ids": torch.randint(4, V, (batch, length - 4))}
    inputs: dict[str, dict[str, Any]] = {
        "text": tokens,
        "ids": {"input_ids": tokens["input_ids"]},
        "seq2seq": tokens | decoder,
        "image": image,
        "text+image": tokens | image,
        "waveform": {
            "input_values": torch.randn(batch, 800),
            "attention_mask": torch.ones(batch, 800, dtype=torch.long),
        },
        "mel": {"input_features": torch.randn(batch, 8, 32)} | decoder,
        "spectrogram": {"input_values": torch.randn(batch, 32, 16)},
    }
    return model, inputs[arch.inputs]
