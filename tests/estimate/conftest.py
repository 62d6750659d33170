import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from effcompile.ir.program import Program


def _capture(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Program:
    """A Program straight from torch.export, without the capture layer's mends."""
    model = model.eval()
    exported = torch.export.export(model, args, kwargs, strict=False).run_decompositions({})
    return Program(
        name=type(model).__name__, module=exported.module(), args=args, kwargs=kwargs, inputs=(), outputs=()
    )


@pytest.fixture
def capture() -> Callable[..., Program]:
    return _capture


@pytest.fixture(scope="session")
def _tiny() -> dict[str, tuple[torch.nn.Module, Program]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    bert = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=96
    )
    gpt2 = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=96, n_positions=64, use_cache=False
    )
    ids = torch.randint(0, 96, (2, 16))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    models = {
        "bert": transformers.BertModel(bert, add_pooling_layer=False).eval(),
        "gpt2": transformers.GPT2LMHeadModel(gpt2).eval(),
    }
    return {
        name: (model, _capture(model, input_ids=ids, attention_mask=mask)) for name, model in models.items()
    }


@pytest.fixture(params=["bert", "gpt2"])
def tiny(request: pytest.FixtureRequest, _tiny: dict[str, Any]) -> tuple[torch.nn.Module, Program]:
    """A tiny HF model and its program."""
    model, program = _tiny[request.param]
    return model, copy.copy(program)
