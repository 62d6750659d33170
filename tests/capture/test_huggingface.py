"""Each capture in a process of its own: HF registers pytree classes globally, so that a warm process proves
less.
"""

from collections.abc import Iterator

import pytest
from fresh_process import Forks, forks

pytest.importorskip("transformers")

SCRIPT = """
import json, sys, torch, transformers
from effcompile.capture import capture, verify_capture
from effcompile.ir.program import module_path, shape_of
from effcompile.sites.parts import attentions, linears
torch.manual_seed(0)
small = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
ids, ones = torch.randint(1, 64, (1, 8)), torch.ones(1, 8, dtype=torch.long)
kind, most = sys.argv[1], {}
if kind == "bert":
    model = transformers.BertModel(transformers.BertConfig(**small))
elif kind == "gpt_oss":
    most = {'gathered': int(sys.argv[2])}
    heads = dict(num_key_value_heads=1, head_dim=8, max_position_embeddings=64, pad_token_id=0)
    more = dict(layer_types=["full_attention"], num_local_experts=4, num_experts_per_tok=2)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**small, **heads, **more))
elif kind == "gpt2":
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
else:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, num_key_value_heads=2))
cache = model.config.use_cache
model.train()
program = capture(model, (), {"attention_mask": ones, "input_ids": ids}, **most)
print("ANSWER" + json.dumps({
    "inputs": [(s.name, s.shape) for s in program.inputs],
    "outputs": [(s.name, s.shape) for s in program.outputs],
    "mends": [*map(str, program.mends)], "fixed": [*map(str, program.fixed)],
    "restored": model.config.use_cache is cache and model.training,
    "linears": [(s.site, s.dims) for s in linears(program)],
    "attentions": [(s.site, s.dims) for s in attentions(program)],
    "bare": [n.name for n in program.calls() if "val" not in n.meta or not n.meta.get("nn_module_stack")],
    "targets": [str(n.target) for n in program.calls()],
    "type": type(program.module(input_ids=ids, attention_mask=ones)).__name__,
    "checks": [(c.name, c.error, c.passed, str(c.note)) for c in verify_capture(program, model)],
}))
"""


@pytest.fixture(scope="module")
def captures() -> Iterator[Forks]:
    with forks(SCRIPT) as found:
        yield found


@pytest.mark.parametrize(
    ("kind", "cached", "first", "attention", "outputs"),
    [
        (
            "bert",
            False,
            "encoder.layer.0.attention.self.query",
            "encoder.layer.0.attention.self",
            ["last_hidden_state", "pooler_output"],
        ),
        ("gpt2", True, "transformer.h.0.attn.c_attn", "transformer.h.0.attn", ["logits"]),
        ("llama", True, "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn", ["logits"]),
    ],
)
def test_a_tiny_model_from_a_batch_1_example(
    captures: Forks, kind: str, cached: bool, first: str, attention: str, outputs: list[str]
) -> None:
    found = captures.answer(kind)
    assert found["inputs"] == [["attention_mask", ["batch", "seq"]], ["input_ids", ["batch", "seq"]]]
    assert [name for name, _ in found["outputs"]] == outputs
    assert found["outputs"][0][1][:2] == ["batch", "seq"]
    assert found["fixed"] == []
    assert bool(found["mends"]) is cached
    assert found["restored"]
    assert found["bare"] == []
    assert found["linears"][0][0] == first
    assert found["linears"][0][1][:2] == [8, 16]
    assert found["attentions"] == [[f"{attention}:attention", [1, 2, 8, 8, 8]]]
    assert "Output" in found["type"]
    assert [name.split()[0] for name, *_ in found["checks"]] == ["example", "second", "padded"]
    assert all(passed for _, _, passed, _ in found["checks"])
    assert found["checks"][2][3].startswith("padding changes the output")


@pytest.mark.parametrize(("most", "grouped"), [(2**30, False), (2**16 - 1, True)])
def test_experts_whose_weights_would_be_copied_for_every_token_take_their_tokens_in_groups(
    captures: Forks, most: int, grouped: bool
) -> None:
    """8 tokens × 2 experts × 16 × 64 × 4 bytes = 64 KiB."""
    found = captures.answer("gpt_oss", str(most))
    assert any("by_expert" in target for target in found["targets"]) is grouped
    # in groups is what this model does anyway
    assert any("batched_mm" in mend for mend in found["mends"]) is not grouped
    assert all(passed for _, _, passed, _ in found["checks"]) and found["restored"]
