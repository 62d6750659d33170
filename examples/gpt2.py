"""GPT-2 small, unmodified from transformers (random weights): the logits of a 256-token prompt.

effcompile optimize examples/gpt2.py --max-error 0.031 -o out/gpt2

A generator reads only the last position: add `--reads last` and the other 255 rows of logits are not
computed.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, SEQUENCE = 1, 256

torch.manual_seed(0)
config = GPT2Config(use_cache=False)
model = GPT2LMHeadModel(config).eval()
inputs = {"input_ids": torch.randint(0, config.vocab_size, (BATCH, SEQUENCE))}
