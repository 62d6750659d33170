"""GPT-2 small, unmodified from transformers, trained on two sequences of 512 tokens within a memory budget.

effcompile optimize examples/train_gpt2.py --mode training --memory 1150MiB -o out/train

Stock PyTorch takes 2.9 GiB for this step (with dropout); parameters and their gradients alone are 950 MiB.
What comes back trains like the model: loss and gradients are verified against it.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, SEQUENCE = 2, 512

torch.manual_seed(0)
config = GPT2Config(use_cache=False)
model = GPT2LMHeadModel(config).train()
tokens = torch.randint(0, config.vocab_size, (BATCH, SEQUENCE))
inputs = {"input_ids": tokens, "labels": tokens}
