"""One captured graph is the model's forward in every regime: prefill, single tokens, chunks; its cache has
the roles of state.
"""

import sys

import generation_models
import pytest
import torch
import transformers
from generation_models import ids, tiny
from torch import nn

from effcompile.backends.torch.lowered import lower_eager
from effcompile.capture.generation import GenerationStep, capture_step
from effcompile.core.errors import CaptureError, InputsError, UsageError
from effcompile.ir.cache import Growth
from effcompile.ir.roles import Entering, Leaving

KINDS = ("llama", "gemma3_text", "t5", "mamba", "qwen3_next")


@pytest.fixture(scope="module", params=KINDS)
def captured(request: pytest.FixtureRequest) -> tuple[nn.Module, GenerationStep]:
    return generation_models.captured(
        request.param, **({"num_hidden_layers": 1} if request.param == "llama" else {})
    )


@pytest.mark.parametrize("sizes", [(5, 1, 1, 2, 1, 30), (40,), (1, 20, 19)])
def test_a_step_is_the_forward_without_a_cache(
    captured: tuple[nn.Module, GenerationStep], sizes: tuple[int, ...]
) -> None:
    """The oracle is the model's own forward over the whole text, which has no cache."""
    model, step = captured
    text, run = ids(2, 40), lower_eager(step.program)
    extra, leaves = {}, _empty(step)
    if step.encoder is not None:
        extra["encoder_outputs"] = model.get_encoder()(ids(2, 7, seed=2), return_dict=True)
        made = iter(lower_eager(step.source)(extra["encoder_outputs"][0], text[:, :1]))
        leaves = [
            next(made) if leaf.growth is Growth.SOURCE else old
            for leaf, old in zip(step.layout, leaves, strict=True)
        ]
    with torch.no_grad():
        wanted = model(**{step.boundary.tokens: text}, **extra, use_cache=False).logits
    past = 0
    for new in sizes:
        given = {
            "tokens": text[:, past : past + new].contiguous(),
            "mask": torch.ones(2, new if step.boundary.local else past + new, dtype=torch.int64),
            "positions": torch.arange(past, past + new).expand(2, new),
            "rows": torch.arange(new),
            "source_mask": torch.ones(2, 7, dtype=torch.int64),
        }
        cache = iter(leaves)
        logits, *after = run(
            *(
                next(cache) if spec.name.startswith("past") else given[spec.name]
                for spec in step.program.inputs
            )
        )
        torch.testing.assert_close(logits, wanted[:, past : past + new], rtol=1e-5, atol=1e-5)
        for at, rows in zip(step.layout.written, after, strict=True):
            window = step.layout.leaves[at].window
            leaves[at] = rows[:, :, -window:] if window else rows
        past += new


def _empty(step: GenerationStep) -> list[torch.Tensor]:
    return [
        torch.zeros(2, *leaf.shape)
        if leaf.growth is Growth.STATE
        else torch.zeros(2, leaf.shape[0], 0, leaf.shape[1])
        for leaf in step.layout
    ]


def test_past_and_new_tokens_are_sizes(captured: tuple[nn.Module, GenerationStep]) -> None:
    _, step = captured
    assert step.program.fixed == ()
    shapes = {spec.name: spec.shape for spec in step.program.inputs}
    assert all(isinstance(size, str) for size in shapes["tokens"] + shapes["mask"])
    for at, leaf in enumerate(step.layout):
        sizes = shapes[f"past_{at}"]
        assert isinstance(sizes[0], str)
        if leaf.growth is Growth.STATE:
            assert sizes[1:] == leaf.shape
        else:
            assert isinstance(sizes[2], str)


def test_the_cache_is_state_that_enters_and_is_updated(captured: tuple[nn.Module, GenerationStep]) -> None:
    _, step = captured
    roles = step.program.roles
    written = [f"past_{at}" for at in step.layout.written]
    assert list(roles.named(Entering.STATE).values()) == written
    assert list(roles.leaves(Leaving.UPDATED)) == written


def test_layers_are_told_apart() -> None:
    _, step = generation_models.captured("gemma3_text")
    assert [(leaf.growth, leaf.window) for leaf in step.layout] == [(Growth.WINDOW, 15)] * 2 + [
        (Growth.FULL, 0)
    ] * 2


def test_states_are_told_apart() -> None:
    _, step = generation_models.captured("qwen3_next")
    assert [(leaf.name, leaf.growth, leaf.shape) for leaf in step.layout] == [
        ("layers.0.conv_states.0", Growth.STATE, (64, 4)),
        ("layers.0.recurrent_states.0", Growth.STATE, (4, 8, 8)),
        ("layers.1.keys", Growth.FULL, (2, 8)),
        ("layers.1.values", Growth.FULL, (2, 8)),
    ]


def test_a_step_of_states_has_its_tokens_as_rows() -> None:
    """Nothing is turned around, products with a weight are linears, and no table is computed at a call."""
    _, step = generation_models.captured("mamba")
    targets = [node.target for node in step.program.graph.nodes if node.op == "call_function"]
    aten = torch.ops.aten
    assert not {aten.transpose.int, aten.matmul.default, aten.exp.default, aten.conv1d.default} & set(targets)
    assert targets.count(aten.linear.default) == 2 * 4 + 1


def test_the_model_stays_as_it_was() -> None:
    model = tiny("gpt2").train()
    model.config.use_cache = False
    capture_step(model)
    assert model.training
    assert model.config.use_cache is False


def test_a_models_recurrences_stay_its_own() -> None:
    """They are operators while its step is traced, and functions of its module before and after."""
    model = tiny("mamba")
    module = sys.modules[type(model).__module__]
    before = {name: vars(module)[name] for name in ("mamba_selective_scan", "causal_conv1d_fn")}
    capture_step(model)
    assert {name: vars(module)[name] for name in before} == before


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(2, 2), "no Hugging Face model"),
        ("rwkv", "returns no cache that a step could carry on"),
        ("xlstm", "does not run with the DynamicCache"),
        ("zaya", r"Layer 0 of the model \(ZayaAttention.* Let this model generate as it is"),
        ("deepseek_v4", "Layer 0 of the model keeps a DeepseekV4HCACache.* Let this model generate as it is"),
    ],
)
def test_models_without_such_a_cache_are_refused_in_words(model: nn.Module | str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        capture_step(tiny(model) if isinstance(model, str) else model)


def test_a_config_that_the_model_itself_raises_for_is_told_with_the_line() -> None:
    """GPT-J turns pairs of numbers: of 7 it raises, whatever it is given."""
    config = transformers.GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=7)
    with pytest.raises(InputsError, match=r"GPTJForCausalLM itself raises with token ids .*\n.*gptj\.py:\d"):
        capture_step(transformers.GPTJForCausalLM(config).eval())


def test_an_encoder_that_is_traced_for_one_prompt_alone_is_refused_with_the_line_that_fixes_it() -> None:
    """LED asks whether any token is global: another mask, length or number of texts is another graph."""
    small = {"d_model": 16, "attention_window": [4], "max_encoder_position_embeddings": 64}
    layers = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    feet = {f"{part}_ffn_dim": 16 for part in ("encoder", "decoder")}
    config = transformers.LEDConfig(vocab_size=40, **small, **layers, **heads, **feet)
    model = transformers.LEDForConditionalGeneration(config).eval()
    with pytest.raises(CaptureError, match=r"is_global_attn.*Let it generate as it is"):
        capture_step(model)
