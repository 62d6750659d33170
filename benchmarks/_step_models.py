"""Small HuggingFace models for training steps, dropout 0.1 where they have any, and a batch with labels for
each.
"""

from __future__ import annotations

from typing import Any

EXACT = (
    "gpt2",
    "llama",
    "bert",
    "t5",
    "vit",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "opt",
    "gpt_neo",
    "gpt_neox",
    "bloom",
    "phi",
    "roberta",
    "distilbert",
    "electra",
    "albert",
    "mpnet",
    "bart",
    "olmo",
    "stablelm",
    "starcoder2",
    "swin",
    "mixtral",
    "cohere",
    "falcon",
)


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """A small model of an architecture in training mode, and a batch for it."""
    import torch
    import transformers

    torch.manual_seed(0)
    common = {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    drop = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    ids = torch.randint(5, 512, (2, 48))
    text = {"input_ids": ids, "labels": ids.clone()}
    heads = {
        "gpt2": (
            "GPT2LMHeadModel",
            {
                "n_embd": 64,
                "n_layer": 3,
                "n_head": 4,
                "vocab_size": 512,
                "n_positions": 64,
                "resid_pdrop": 0.1,
            },
        ),
        "bert": ("BertForMaskedLM", {**common, **drop}),
        "roberta": ("RobertaForMaskedLM", {**common, **drop, "max_position_embeddings": 66}),
        "electra": ("ElectraForMaskedLM", {**common, **drop, "embedding_size": 64}),
        "albert": ("AlbertForMaskedLM", {**common, **drop, "embedding_size": 32}),
        "mpnet": ("MPNetForMaskedLM", {**common, **drop}),
        "distilbert": (
            "DistilBertForMaskedLM",
            {"vocab_size": 512, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 128, "dropout": 0.1},
        ),
        "t5": (
            "T5ForConditionalGeneration",
            {
                "vocab_size": 512,
                "d_model": 64,
                "d_kv": 16,
                "d_ff": 128,
                "num_layers": 3,
                "num_heads": 4,
                "decoder_start_token_id": 0,
            },
        ),
        "bart": (
            "BartForConditionalGeneration",
            {
                "vocab_size": 512,
                "d_model": 64,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 128,
                "decoder_ffn_dim": 128,
                "max_position_embeddings": 64,
            },
        ),
        "vit": (
            "ViTForImageClassification",
            {
                "hidden_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "intermediate_size": 128,
                "image_size": 64,
                "patch_size": 8,
                "num_labels": 10,
                **drop,
            },
        ),
        "swin": (
            "SwinForImageClassification",
            {
                "image_size": 32,
                "patch_size": 2,
                "embed_dim": 16,
                "depths": [2, 2],
                "num_heads": [2, 4],
                "window_size": 4,
                "num_labels": 10,
            },
        ),
        "opt": (
            "OPTForCausalLM",
            {
                "vocab_size": 512,
                "hidden_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "ffn_dim": 128,
                "word_embed_proj_dim": 64,
                "dropout": 0.1,
            },
        ),
        "gpt_neo": (
            "GPTNeoForCausalLM",
            {
                "vocab_size": 512,
                "hidden_size": 64,
                "num_layers": 2,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 1]],
                "resid_dropout": 0.1,
            },
        ),
        "bloom": (
            "BloomForCausalLM",
            {"vocab_size": 512, "hidden_size": 64, "n_layer": 3, "n_head": 4, "hidden_dropout": 0.1},
        ),
        "falcon": (
            "FalconForCausalLM",
            {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
        ),
    }
    causal = {
        "llama": "Llama",
        "mistral": "Mistral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "gemma2": "Gemma2",
        "gemma3": "Gemma3",
        "gpt_neox": "GPTNeoX",
        "phi": "Phi",
        "olmo": "Olmo",
        "stablelm": "StableLm",
        "starcoder2": "Starcoder2",
        "mixtral": "Mixtral",
        "cohere": "Cohere",
    }
    if name in causal:
        extra = {"num_key_value_heads": 2} if name not in ("gpt_neox", "phi") else {}
        extra |= {"head_dim": 16} if name in ("gemma2", "gemma3", "qwen3") else {}
        extra |= {"attention_dropout": 0.1} if name not in ("gemma2", "gemma3") else {}
        kind = f"{causal[name]}ForCausalLM"
        fields = {**common, **extra, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    else:
        kind, fields = heads[name]
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**fields)).train()
    if name in ("vit", "swin"):
        size = model.config.image_size
        return model, {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([1, 2])}
    return model, text
