"""Rows of several requests in one batch: each has the logits that it has alone, whoever joins and leaves."""

import random
from types import SimpleNamespace

import pytest
import torch
from generation_models import bare, captured, ids, more, tiny
from torch import nn

from effcompile.core.errors import UsageError
from effcompile.runtime.generation.rows import SharedRows

CONTEXT = 64


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        *((kind, "") for kind in ("llama", "gemma3_text", "gpt2", "mamba", "falcon_h1")),
        *(("gemma3_text", narrow) for narrow in ("uint8", "int8")),
        ("falcon_h1", "uint8"),
        ("gpt2", "int8"),
        *more(*((kind, narrow) for kind in ("llama", "mamba") for narrow in ("uint8", "int8"))),
    ],
)
def test_each_row_is_the_row_alone(kind: str, cache: str) -> None:
    """Rows of random lengths come and go over forty tokens, beyond a window of 15.

    The oracle is the model's forward over a row's text.
    """
    model, executable = bare(captured(kind), context=CONTEXT, narrow=cache)
    rows, draw = SharedRows(executable.stepper), random.Random(3)
    texts: list[list[int]] = []
    compared = 0
    for _ in range(40):
        keep = [at for at, text in enumerate(texts) if len(text) < CONTEXT - 1 and draw.random() > 0.06]
        come, caches = [], []
        if len(keep) < 4 and draw.random() < 0.5:
            come = [ids(draw.choice((1, 3, 20)), seed=draw.randrange(999)).tolist()]
            caches = [rows.opened()]
            wanted = alone(model, come[0])
            torch.testing.assert_close(rows.read(caches[0], come[0]), wanted, **closeness(cache))
        if come or len(keep) < len(texts):
            rows.change(keep, caches)
            texts = [texts[at] for at in keep] + come
        if not texts:
            continue
        new = [draw.randrange(3, 64) for _ in texts]
        texts = [[*text, token] for text, token in zip(texts, new, strict=True)]
        for found, text in zip(rows.next(new), texts, strict=True):
            torch.testing.assert_close(found, alone(model, text), **closeness(cache))
            compared += 1
    assert compared > 60 and rows.lengths == [len(text) for text in texts]


def closeness(cache: str) -> dict[str, float]:
    return (
        {"rtol": 1e-4, "atol": 1e-4}
        if not cache
        else {"rtol": 0.05, "atol": {"int8": 0.02, "uint8": 0.1}[cache]}
    )


def alone(model: nn.Module, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([text]), use_cache=False).logits[0, -1]
    return logits


def test_a_prompt_in_parts_is_the_prompt() -> None:
    model, executable = bare(captured("llama", num_hidden_layers=1), context=CONTEXT)
    rows, text = SharedRows(executable.stepper), ids(30).tolist()
    cache = rows.opened()
    rows.read(cache, text[:11])
    torch.testing.assert_close(rows.read(cache, text[11:]), alone(model, text), rtol=1e-4, atol=1e-4)


def test_a_cache_of_something_else_is_refused() -> None:
    """By the settings, before anything else is looked at."""
    with pytest.raises(UsageError, match="encoder-decoder"):
        SharedRows(SimpleNamespace(config=tiny("t5").config))
