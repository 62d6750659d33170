"""A Hugging Face model whose configuration is changed after planning: its answers, a copy's too, are the
model's own or refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from mutations import Undo
from torch import nn

import effcompile
from effcompile.compiler import Executable
from effcompile.core.errors import GuardError
from effcompile.core.goal import Goal
from effcompile.search.request import Request

IDS = torch.randint(1, 32, (2, 8), generator=torch.Generator().manual_seed(0))
Change = Callable[[Any], Undo]


@cache
def planned() -> tuple[nn.Module, Executable]:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 32,
    }
    model = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False).eval()
    made = effcompile.optimize(model, inputs={"input_ids": IDS}, backend="torch-eager", target="cpu-generic")
    assert isinstance(made, Executable)
    return model, made


def put(name: str, value: Any) -> Change:
    def change(model: Any) -> Undo:
        before = getattr(model.config, name)
        setattr(model.config, name, value)
        return lambda: setattr(model.config, name, before)

    return change


def another_attention(model: Any) -> Undo:
    """One of the user's own, as transformers lets it be registered."""

    def ones(module: nn.Module, query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return torch.ones_like(query).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("ones", ones)
    return put("_attn_implementation", "ones")(model)


REFUSED: dict[str, Change] = {
    "another attention": another_attention,
    "attentions asked for": put("_output_attentions", True),
    "hidden states asked for": put("output_hidden_states", True),
    "tuples asked for": put("return_dict", False),
    "chunks": put("chunk_size_feed_forward", 2),
}
#: Read when the model is made, and not by its forward.
HARMLESS: dict[str, Change] = {
    "activation": put("hidden_act", "relu"),
    "dropout": put("hidden_dropout_prob", 0.9),
    "epsilon": put("layer_norm_eps", 1.0),
    "padding": put("pad_token_id", 5),
}


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).last_hidden_state
    return found


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("name", [*REFUSED, *HARMLESS])
def test_a_changed_configuration_gives_no_old_answer(name: str, copied: bool) -> None:
    model, made = planned()
    made = copy.deepcopy(made) if copied else made
    own: Any = made.original
    undo = {**REFUSED, **HARMLESS}[name](own)
    try:
        if name in HARMLESS:
            torch.testing.assert_close(answer(made), answer(own), rtol=1e-4, atol=1e-5)
        else:
            with pytest.raises(GuardError, match="config"):
                answer(made)
    finally:
        undo()
    torch.testing.assert_close(answer(made), answer(model), rtol=1e-4, atol=1e-5)


def test_hidden_states_that_the_model_itself_was_asked_for_change_nothing() -> None:
    """HuggingFace hooks collectors into the model at the first such call, which do nothing in others; hooks
    of others change answers.
    """
    model, made = planned()
    own: Any = made.original
    own(input_ids=IDS, output_hidden_states=True)
    assert own._output_capturing_hooks_installed
    torch.testing.assert_close(answer(made), answer(model), rtol=1e-4, atol=1e-5)
    hook = own.encoder.layer[0].register_forward_hook(lambda *_: None)
    with pytest.raises(GuardError, match="hook"):
        answer(made)
    hook.remove()


def test_what_a_refusal_offers_is_there_to_be_asked_for() -> None:
    _, made = planned()
    with pytest.raises(GuardError, match=r"on_change='replan' plans again by itself, on_change='eager' runs"):
        made(input_ids=IDS, output_hidden_states=True)
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    training, generation = Goal(mode="training"), Goal(mode="generation", context=8)
    assert Request(goal=training).offers == ("replan", "eager")
    assert Request(goal=training, optimizer=sgd).offers == ("eager",)
    assert Request(goal=training, loss=lambda outputs, inputs: outputs).offers == ("replan",)
    assert Request(goal=generation).offers == Request(goal=training, on_change="eager").offers == ()


def test_hidden_states_that_a_later_step_asks_for_are_returned() -> None:
    """Fields for show are left out of a plan that nobody asked for them; one who asks at the call gets them,
    not None.
    """
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops, use_cache=False)).train()
    inputs = {"input_ids": IDS, "labels": IDS}
    made: Any = effcompile.optimize(model, inputs=inputs, mode="training", on_change="replan")
    found = made(**inputs, output_hidden_states=True)
    wanted = model(**inputs, output_hidden_states=True)
    torch.testing.assert_close(found.hidden_states, wanted.hidden_states, rtol=1e-4, atol=1e-5)
    found.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert "logits" not in made(**inputs)
