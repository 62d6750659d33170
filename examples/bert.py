"""BERT-base, unmodified from transformers (random weights, so nothing is downloaded), one sentence of 128
tokens.

effcompile optimize examples/bert.py --max-error 0.031 -o out/bert
"""

import torch
from transformers import BertConfig, BertModel

BATCH, SEQUENCE = 1, 128

torch.manual_seed(0)
config = BertConfig()
model = BertModel(config).eval()
inputs = {
    "input_ids": torch.randint(0, config.vocab_size, (BATCH, SEQUENCE)),
    "attention_mask": torch.ones(BATCH, SEQUENCE, dtype=torch.long),
}
