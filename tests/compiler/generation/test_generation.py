"""optimize(mode="generation"): the model's own generate() on planned steps, token for token, saved and opened
again.
"""

import copy
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from generation_models import CONTEXT, Planned, bare, captured, ids, same, tiny
from tokenizers import Tokenizer, models, pre_tokenizers

import effcompile
from effcompile.capture.generation import capture_step
from effcompile.ops import row_program
from effcompile.runtime.generation import files


@pytest.fixture(scope="module", params=["gemma3_text", "t5"])
def planned(request: pytest.FixtureRequest) -> Planned:
    return bare(captured(request.param))


@pytest.fixture(scope="module")
def llama() -> Planned:
    return bare(captured("llama", num_hidden_layers=1))


@pytest.mark.skipif(not row_program.available(), reason="no kernels are compiled here")
def test_a_step_of_an_encoder_decoder_is_one_call() -> None:
    """With its head, behind the embedding and the masks; a batch of rows that share learned positions, and
    beams, too.
    """
    planned = bare(captured("bart"))
    calls = [node for node in planned[1].lowered.run.graph.nodes if node.op == "call_function"]  # type: ignore[attr-defined]
    names = [type(node.target).__name__ for node in calls]
    at = names.index("Region")
    assert names.count("Region") == 1 and {node.target for node in calls[at + 1 :]} == {operator.getitem}
    for rows, how in ((1, {}), (3, {}), (2, {"num_beams": 3})):
        same(planned, ids(rows, 9), max_new_tokens=24, do_sample=False, **how)


def test_256_greedy_tokens_are_the_models(planned: Planned) -> None:
    same(planned, ids(1, 9), max_new_tokens=256, do_sample=False)


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "top_k": 20, "temperature": 0.8},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
        {"do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 5},
    ],
    ids=["sampling", "beams", "several", "processors"],
)
def test_other_ways_to_generate(planned: Planned, how: dict[str, Any]) -> None:
    same(planned, ids(2, 9), max_new_tokens=24, **how)


def test_a_left_padded_batch_is_the_models(planned: Planned) -> None:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    same(planned, ids(2, 9), attention_mask=mask, max_new_tokens=24, do_sample=False)


def test_a_left_padded_row_is_the_row_alone(llama: Planned) -> None:
    row, mask = ids(1, 5), torch.ones(1, 9, dtype=torch.int64)
    mask[0, :4] = 0
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.int64), row], 1)
    alone = llama[1].generate(row, max_new_tokens=16, do_sample=False)
    assert torch.equal(
        llama[1].generate(padded, attention_mask=mask, max_new_tokens=16, do_sample=False)[:, 4:], alone
    )


def test_a_cache_is_handed_back_and_taken_again(llama: Planned) -> None:
    model, executable = llama
    text = ids(1, 30)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        wanted = model(text, use_cache=False).logits
    first = executable(text[:, :20], past_key_values=cache)
    second = executable(text[:, 20:], past_key_values=first.past_key_values)
    assert first.past_key_values is cache
    assert cache.get_seq_length() == 30
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), wanted, rtol=1e-5, atol=1e-5)


def test_drafted_tokens_are_checked_in_one_step(planned: Planned) -> None:
    """Prompt look-up gives several tokens to a step and cuts those of the cache that were not accepted,
    beyond a window too.
    """
    same(planned, ids(1, 6).repeat(1, 4), max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=3)


def test_prefill_in_chunks(llama: Planned) -> None:
    same(llama, ids(1, 50), max_new_tokens=10, do_sample=False, prefill_chunk_size=16)


def test_streamer_and_stopping_criteria(llama: Planned) -> None:
    class Streamer(transformers.generation.BaseStreamer):
        def __init__(self) -> None:
            self.said: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.said += value.flatten().tolist()

        def end(self) -> None:
            self.said.append(-1)

    stop = transformers.StoppingCriteriaList(
        [lambda tokens, scores, **_: torch.full((tokens.shape[0],), tokens.shape[1] >= 14)]
    )
    streamer = Streamer()
    found = llama[1].generate(
        ids(1, 9), max_new_tokens=40, do_sample=False, streamer=streamer, stopping_criteria=stop
    )
    assert found.shape[1] == 14
    assert streamer.said == [*found[0].tolist(), -1]


def test_the_cache_takes_its_bytes_at_once_and_no_more(planned: Planned) -> None:
    """The oracle counts the storages that the cache holds."""
    model, executable = planned
    if model.config.is_encoder_decoder:
        pytest.skip("its cache has two parts")
    cache = transformers.DynamicCache(config=model.config)
    for count in (30, 1, 1, 40):
        executable(ids(1, count), past_key_values=cache)
        held = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
        assert held == executable.lowered.layout.nbytes(CONTEXT, 1)


REFUSED: dict[str, tuple[Callable[[Planned], object], str]] = {
    "too long": (lambda p: p[1].generate(ids(1, 9), max_new_tokens=CONTEXT), "context = 320"),
    "prompt": (lambda p: p[1](ids(1, CONTEXT + 1)), "321 or more"),
    "embeddings": (lambda p: p[1](inputs_embeds=torch.zeros(1, 3, 32)), r"takes .*\. Give input_ids, or run"),
    "hidden states": (
        lambda p: p[1](ids(1, 3), output_hidden_states=True),
        "output_hidden_states is not planned for",
    ),
    "static": (
        lambda p: p[1].generate(ids(1, 9), max_new_tokens=4, cache_implementation="static"),
        "DynamicCache",
    ),
    "offloaded": (
        lambda p: p[1].generate(ids(1, 9), max_new_tokens=4, cache_implementation="offloaded"),
        "offloading",
    ),
    "first layers": (
        lambda p: p[1].generate(ids(1, 9), max_new_tokens=4, assistant_early_exit=1),
        "runs all of them",
    ),
    "mask": (
        lambda p: p[1](ids(1, 3), attention_mask=torch.ones(1, 5, dtype=torch.int64)),
        "attention_mask is",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_was_not_planned_is_refused_in_words(llama: Planned, case: str) -> None:
    call, said = REFUSED[case]
    if case == "offloaded" and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("transformers opens a stream of CUDA for it, as torch was built for one")
    with pytest.raises(effcompile.EffcompileError, match=said):
        call(llama)


def test_huggingfaces_pipeline_takes_it_for_the_model(llama: Planned) -> None:
    model, executable = llama
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    wanted, found = (
        transformers.pipeline("text-generation", model=each, tokenizer=tokenizer)(
            "w5 w9 w17", max_new_tokens=6, do_sample=False
        )
        for each in (model, executable)
    )
    assert found == wanted


@pytest.mark.parametrize("as_opened", [False, True])
def test_a_planned_model_writes_the_drafts_of_another(
    planned: Planned, as_opened: bool, tmp_path: Path
) -> None:
    """Of one that is planned, and of one that is not: the text is that of the larger model."""
    model, executable = planned
    drafting: Any = executable
    if as_opened:
        executable.save(tmp_path / "drafting")
        drafting = effcompile.load(tmp_path / "drafting")
    called: list[int] = []
    asked, how = drafting.generate, {"max_new_tokens": 24, "do_sample": False}
    drafting.generate = lambda *args, **kwargs: called.append(1) or asked(*args, **kwargs)
    try:
        wanted = model.generate(ids(1, 9), **how)
        for larger in (model, executable) if as_opened else (model,):
            assert torch.equal(larger.generate(ids(1, 9), **how, assistant_model=drafting), wanted)
    finally:
        del drafting.generate
    assert called


def test_a_refused_call_leaves_the_model_as_it_was(llama: Planned) -> None:
    """generate() marks it as having fewer layers while those draft."""
    model, executable = llama
    before = model.config.to_dict()
    for how in ({"assistant_early_exit": 1}, {"output_attentions": True, "return_dict_in_generate": True}):
        with pytest.raises(effcompile.EffcompileError):
            executable.generate(ids(1, 9), max_new_tokens=4, **how)
    assert model.config.to_dict() == before
    same(llama, ids(1, 9), max_new_tokens=4, do_sample=False)


def test_a_changed_model_is_refused() -> None:
    model = tiny("gpt2", n_layer=1)
    _, executable = bare((model, capture_step(model)))
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    with pytest.raises(effcompile.EffcompileError, match=r"wte.weight was changed since GPT2LMHeadModel"):
        executable.generate(ids(1, 4), max_new_tokens=2)


def test_saved_and_opened_again(planned: Planned, tmp_path: Path) -> None:
    _, executable = planned
    executable.save(tmp_path / "out")
    opened = effcompile.load(tmp_path / "out")
    how: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    assert torch.equal(opened.generate(ids(2, 9), **how), executable.generate(ids(2, 9), **how))
    assert opened.plan.goal.context == CONTEXT


def test_an_opened_one_is_pickled_and_copied(llama: Planned, tmp_path: Path) -> None:
    """Both open the folder once more, of whatever kind; the settings go along. A caller's autocast does not
    reach its graph.
    """
    opened = effcompile.load(llama[1].save(tmp_path / "out"))
    logits = opened(ids(1, 5)).logits
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(opened(ids(1, 5)).logits, logits)
    opened.generation_config.max_new_tokens = 5
    wanted = opened.generate(ids(2, 9), do_sample=False)
    assert wanted.shape == (2, 14)
    for other in (pickle.loads(pickle.dumps(opened)), copy.deepcopy(opened)):
        assert torch.equal(other.generate(ids(2, 9), do_sample=False), wanted)


def test_a_class_of_ones_own_opens_as_the_one_that_it_is_of(llama: Planned, tmp_path: Path) -> None:
    """Where it changes no more than what is planned."""
    model = llama[0]

    class Mine(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Other(Mine):
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            return super().prepare_inputs_for_generation(*args, **kwargs)

    assert files._opened_as(Mine) is type(model) and files._opened_as(Other) is Other
    header = files.read(llama[1].save(tmp_path / "out"))[1]
    with pytest.raises(effcompile.EffcompileError, match=r"has no Other.*nothing but __init__ and forward"):
        files.kind_of(msgspec.structs.replace(header, kind="Other"))


def test_settings_of_generate_are_saved_as_they_are(
    llama: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those, too, that transformers itself refuses to save, and entries that only the model's class knows."""
    told = copy.deepcopy(llama[0].generation_config)
    monkeypatch.setattr(llama[0], "generation_config", told)
    told.temperature, told.top_k, told.repetition_penalty, told.lang_to_id = 0.3, 5, 1.3, {"<|en|>": 6}
    opened = effcompile.load(llama[1].save(tmp_path / "out"))
    for name in ("temperature", "top_k", "repetition_penalty", "lang_to_id", "eos_token_id", "pad_token_id"):
        assert getattr(opened.generation_config, name) == getattr(told, name)
    assert torch.equal(*(each.generate(ids(2, 9), max_new_tokens=8) for each in (opened, llama[1])))


def test_onnxruntime_generates_the_same_and_opens_again(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, executable = bare(captured("llama", num_hidden_layers=1), "onnxruntime", 64)
    executable.parts["step"].save(tmp_path)
    graph = pytest.importorskip("onnx").load(str(tmp_path / "model.onnx")).graph
    made = {name: node.op_type for node in graph.node for name in node.output}
    (attention,) = (node for node in graph.node if node.op_type == "Attention")
    assert [made[name] for name in attention.input[1:3]] == ["Concat", "Concat"]  # no head is repeated
    same((model, executable), ids(2, 9), max_new_tokens=24, do_sample=False)
    same((model, executable), ids(1, 9), max_new_tokens=12, num_beams=2, do_sample=False)
    executable.save(tmp_path / "out")
    opened = effcompile.load(tmp_path / "out")
    how: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    assert torch.equal(opened.generate(ids(2, 9), **how), model.generate(ids(2, 9), **how))


def test_a_forward_with_what_the_encoder_reads() -> None:
    """As Whisper's generate() calls it to find the language; behind a cache, too."""
    model, executable = bare(captured("t5"))
    given = {"input_ids": ids(2, 7), "attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2])}
    wanted = model(**given, decoder_input_ids=ids(2, 3))
    found = executable(**given, decoder_input_ids=ids(2, 3))
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], wanted.encoder_last_hidden_state, rtol=1e-5, atol=1e-5)
    more = [
        one(**given, decoder_input_ids=ids(2, 1, seed=4), past_key_values=each.past_key_values).logits
        for one, each in ((model, wanted), (executable, found))
    ]
    torch.testing.assert_close(*more, rtol=1e-5, atol=1e-5)
    with pytest.raises(effcompile.EffcompileError, match="needs encoder_outputs"):
        executable(decoder_input_ids=ids(2, 3))
    for wrong in (ids(2, 7).float(), ids(7), ids(2, 0)):
        with pytest.raises(effcompile.GuardError, match="input_ids must be token ids"):
            executable.generate(wrong, max_new_tokens=2)


def test_whisper_finds_the_language_by_itself(tmp_path: Path) -> None:
    """Opened again, too: its generate() reads strides of the encoder, which is not there."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "vocab_size": 80, "max_source_positions": 1500, "pad_token_id": 0}
    parts = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))
    }
    special = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = transformers.WhisperConfig(**sizes, **parts, **special)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    told = model.generation_config
    told.update(
        is_multilingual=True, no_timestamps_token_id=70, suppress_tokens=None, begin_suppress_tokens=None
    )
    told.lang_to_id = {"<|en|>": 60, "<|de|>": 61}
    told.task_to_id = {"transcribe": 65, "translate": 66}
    planned = model, bare((model, capture_step(model)), context=64)[1]
    sound = torch.randn(2, 80, 3000)
    opened = effcompile.load(planned[1].save(tmp_path / "out"))
    for how in ({}, {"language": "de", "task": "translate"}):
        wanted = same(planned, sound, max_new_tokens=12, do_sample=False, **how)
        assert torch.equal(opened.generate(sound, max_new_tokens=12, do_sample=False, **how), wanted)
