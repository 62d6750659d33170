"""A BERT small enough to try every command in seconds.

effcompile optimize examples/tiny.py --max-error 0.05
"""

import torch
from transformers import BertConfig, BertModel

torch.manual_seed(0)
config = BertConfig(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=64,
)
model = BertModel(config).eval()
inputs = {
    "input_ids": torch.randint(0, config.vocab_size, (2, 16)),
    "attention_mask": torch.ones(2, 16, dtype=torch.long),
}
