"""The small models that schedules.py trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)


def gpt2(layers: int = 4, width: int = 64, dropout: float = 0.0) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=width, n_layer=layers, n_head=4, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def llama() -> nn.Module:
    """GPT-2's Conv1D is no linear, which sparsity is of."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        use_cache=False
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def vit() -> nn.Module:
    config = ViTConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
    )
    config.num_labels = 8
    return ViTForImageClassification(config).train()


class PostNorm(nn.Module):
    """A byte-level transformer with norms behind its branches, twelve layers."""

    def __init__(self, layers: int = 12, width: int = 64) -> None:
        super().__init__()
        self.table, self.places, self.head = (
            nn.Embedding(256, width),
            nn.Embedding(128, width),
            nn.Linear(width, 256, bias=False),
        )
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(layers)
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        length = input_ids.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        hidden = self.table(input_ids) + self.places.weight[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return type("Out", (), {"loss": loss, "logits": logits})()


def with_linears(model: nn.Module) -> nn.Module:
    """GPT-2's Conv1D as linears, which sparsity knows."""
    for module in list(model.modules()):
        for name, one in list(module.named_children()):
            if type(one).__name__ == "Conv1D":
                linear = nn.Linear(one.weight.shape[0], one.weight.shape[1])
                linear.weight.data, linear.bias.data = one.weight.data.T.contiguous(), one.bias.data
                setattr(module, name, linear)
    return model
