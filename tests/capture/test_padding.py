"""On which side texts are padded follows from what an attention's first query sees."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModel

from effcompile.capture import capture, variants
from effcompile.capture.padding import padded_behind
from effcompile.core.goal import Goal
from effcompile.ir.program import Program
from effcompile.proof.verify import references

SIZES = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "llama": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 64,
    },
    "bart": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    },
}  # fmt: skip


def captured(kind: str, mask: torch.Tensor | None, attention: str = "sdpa", **more: object) -> Program:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=64, use_cache=False, attn_implementation=attention, **SIZES[kind]
    )
    given = {"input_ids": torch.randint(3, 60, (3, 12)), **more}
    if mask is not None:
        given["attention_mask"] = mask
    return capture(AutoModel.from_config(config).eval(), (), given, dynamic=False)


def ones() -> torch.Tensor:
    return torch.ones(3, 12, dtype=torch.long)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("kind", "right"), [("bert", True), ("gpt2", False), ("llama", False)])
def test_encoders_are_padded_on_the_right(kind: str, right: bool, attention: str) -> None:
    found = padded_behind(captured(kind, ones(), attention))
    assert found == ({"attention_mask"} if right else set())


def test_of_two_masks_each_has_its_side() -> None:
    decoder = {"decoder_input_ids": torch.randint(3, 60, (3, 12)), "decoder_attention_mask": ones()}
    assert padded_behind(captured("bart", ones(), **decoder)) == {"attention_mask"}


def test_the_example_may_say_otherwise() -> None:
    left, right = ones(), ones()
    left[0, :3], right[0, -3:] = 0, 0
    assert padded_behind(captured("bert", left)) == set()
    assert padded_behind(captured("bert", right)) == {"attention_mask"}
    assert padded_behind(captured("bert", None)) == set()


def test_an_error_is_verified_where_texts_are_padded_and_what_is_exact_on_the_left() -> None:
    program = captured("bert", ones())
    first_tokens = {}
    for goal in (Goal(max_error=0.03), Goal()):
        cases = references(
            program,
            AutoModel.from_config(AutoConfig.for_model("bert", vocab_size=64, **SIZES["bert"])).eval(),
            goal,
        )
        (padded,) = [case for case in cases if case.name.startswith("padded")]
        first_tokens[goal.exact] = padded.kwargs["attention_mask"][:, 0].tolist()
        assert padded.kwargs["attention_mask"].sum(1).tolist() == [9, 1, 12]
    assert first_tokens == {False: [1, 1, 1], True: [0, 0, 1]}
    assert variants(program)[-1][2]["attention_mask"][1].tolist() == [0] * 11 + [1]
    (right,) = [v for v in variants(program, {"attention_mask"}) if v[0].startswith("padded")]
    assert right[2]["attention_mask"][1].tolist() == [1] + [0] * 11
