import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from effcompile.capture import capture


def _inputs():
    torch.manual_seed(0)
    return {"input_ids": torch.randint(0, 100, (2, 16)), "attention_mask": torch.ones(2, 16, dtype=torch.long)}


@pytest.fixture(scope="session")
def bert():
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=100)
    model = BertModel(config).eval()
    return model, capture(model, (), _inputs())


@pytest.fixture(scope="session")
def gpt2():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100)).eval()
    return model, capture(model, (), _inputs())
