"""A mixture of experts whose tokens are in groups is opened without transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import effcompile

OPENED = """
import sys
sys.modules["transformers"] = None  # to import it raises
import effcompile, torch
ids, wanted = torch.load(sys.argv[2])
torch.testing.assert_close(effcompile.load(sys.argv[1])(input_ids=ids).logits, wanted, rtol=1e-5, atol=1e-6)
"""


def test_a_mixture_is_opened_without_transformers(tmp_path: Path) -> None:
    """Its operator for tokens in groups is known only to a process that imported it."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}
    config = transformers.MixtralConfig(**sizes, **experts, num_key_value_heads=2)
    model = transformers.MixtralForCausalLM(config).eval()
    ids = torch.randint(1, 64, (2, 8))
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
    effcompile.optimize(model, {"input_ids": ids}, backend="torch-eager").save(tmp_path / "out")
    torch.save((ids, wanted), tmp_path / "asked.pt")
    ran = subprocess.run(
        [sys.executable, "-c", OPENED, tmp_path / "out", tmp_path / "asked.pt"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-800:]
