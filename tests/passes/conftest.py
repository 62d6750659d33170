"""Tiny captured models."""

from __future__ import annotations

import os

import pytest
import torch
from pass_helpers import Block

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from effcompile.capture.inference import capture
from effcompile.ir.program import Program


@pytest.fixture(scope="session")
def block() -> Program:
    torch.manual_seed(0)
    return capture(Block().eval(), (torch.randn(2, 5, 32),))


@pytest.fixture(scope="session")
def bert() -> Program:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=100
    )
    return capture(BertModel(config).eval(), (), _text())


@pytest.fixture(scope="session")
def gpt2() -> Program:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=100, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return capture(GPT2LMHeadModel(config).eval(), (), _text())


def _text() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.randint(0, 100, (2, 16)),
        "attention_mask": torch.ones(2, 16, dtype=torch.long),
    }
