"""A GPT-2 small enough to plan its training step in seconds.

effcompile optimize examples/train_tiny.py --mode training --memory 3MiB
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=64, use_cache=False)
model = GPT2LMHeadModel(config).train()
tokens = torch.randint(0, config.vocab_size, (8, 32))
inputs = {"input_ids": tokens, "labels": tokens}
