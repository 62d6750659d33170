"""A saved generation of somebody's: what of its header or of its configs cannot be is refused in words that
name the file, before anything is made by it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from generation_models import bare, captured, ids, tiny
from tokenizers import Tokenizer, models, pre_tokenizers

import effcompile
from effcompile.capture.generation import capture_step
from effcompile.core.errors import FormatError
from effcompile.runtime.generation.spoken import speak

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, planned = bare(captured("llama", num_hidden_layers=1), context=48)
    return planned.save(tmp_path_factory.mktemp("generation") / "out")


def changed(folder: Path, to: Path, file: str, change: Change) -> Path:
    """A copy with another file, and the plan with its digest."""
    shutil.copytree(folder, to)
    for name, do in ((file, change), ("plan.json", lambda plan: _signed(plan, to / file, file))):
        tree = json.loads((to / name).read_text())
        do(tree)
        (to / name).write_text(json.dumps(tree))
    return to


def _signed(plan: dict[str, Any], path: Path, file: str) -> None:
    plan["artifact"][file] = hashlib.sha256(path.read_bytes()).hexdigest()


def leaf(**change: object) -> Change:
    return lambda header: header["layout"]["leaves"][0].update(change)


def past(**change: object) -> Change:
    return lambda header: next(i for i in header["inputs"] if i["name"] == "past_0").update(change)


HEADERS: list[tuple[Change, str]] = [
    (leaf(shape=[-1, 8]), r"layers\.0\.keys has the shape \[-1, 8\]"),
    (leaf(shape=[1 << 40, 8]), r"layers\.0\.keys has the shape"),
    (leaf(shape=[]), r"layers\.0\.keys has the shape \[\]"),
    (leaf(shape=[4, 8]), r"has the shape \[4, 8\], and past_0 \['batch', 2"),
    (leaf(name="../../etc/passwd"), "no leaf of a cache is named"),
    (leaf(layer=-1), "of layer -1"),
    (leaf(held="float7"), "is held in 'float7'"),
    (leaf(window=-5), "a window of -5"),
    (past(dtype="nn"), r"past_0\.dtype = 'nn' is no dtype"),
    (past(shape=["batch", 2]), r"has the shape \[2, 8\], and past_0 \['batch', 2\]"),
    (past(name="elsewhere"), "others than inputs"),
    (lambda header: header["room"].update(context=-1), r"room\.context = -1, and the plan's is 48"),
    (lambda header: header["room"].update(context=1 << 40), r"room\.context"),
    (lambda header: header["room"].update(chunk=-1), r"room\.chunk = -1"),
    (lambda header: header["tables"].update(tokens=-1), r"tables\.tokens = -1"),
    (lambda header: header["graphs"].clear(), "graphs are none"),
    (lambda header: header["layout"]["leaves"].pop(), "layout has 1 leaves"),
    (lambda header: header.update(kind="Trainer"), "has no Trainer"),
    (lambda header: header.update(kind="x" * 9999), "has no xxx"),
]


@pytest.mark.parametrize(("change", "said"), HEADERS, ids=[said for _, said in HEADERS])
def test_a_header_that_cannot_be_is_refused(folder: Path, tmp_path: Path, change: Change, said: str) -> None:
    with pytest.raises(FormatError, match=said) as refused:
        effcompile.load(changed(folder, tmp_path / "out", "generation.json", change))
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("config.json", {"hidden_act": 7}, r"config\.json' is no config of LlamaForCausalLM: .*hidden_act"),
        ("config.json", {"rope_parameters": "x"}, r"config\.json' is no config of LlamaForCausalLM"),
        ("config.json", {"num_hidden_layers": 1 << 62}, r"num_hidden_layers = 4611686018427387904"),
        ("generation_config.json", {"bos_token_id": "x"}, r"bos_token_id = x, which is no token"),
        ("generation_config.json", {"eos_token_id": [1, 2.5]}, r"eos_token_id = \[1, 2\.5\]"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    folder: Path, tmp_path: Path, file: str, change: dict[str, object], said: str
) -> None:
    with pytest.raises(FormatError, match=said):
        effcompile.load(changed(folder, tmp_path / "out", file, lambda tree: tree.update(change)))


@pytest.mark.parametrize("file", ["generation.json", "step.pt2"])
def test_a_file_of_which_the_plan_has_no_digest_is_not_opened(
    folder: Path, tmp_path: Path, file: str
) -> None:
    assert (folder / file).is_file()
    out = changed(folder, tmp_path / "out", "config.json", lambda tree: None)
    plan = json.loads((out / "plan.json").read_text())
    del plan["artifact"][file]
    (out / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(FormatError, match=f"does not describe '{re.escape(file)}'"):
        effcompile.load(out)


def test_what_was_written_is_opened(folder: Path, tmp_path: Path) -> None:
    opened = effcompile.load(changed(folder, tmp_path / "out", "generation.json", lambda header: None))
    given = ids(1, 5)
    wanted = tiny("llama", num_hidden_layers=1).generate(given, max_new_tokens=8, do_sample=False)
    assert opened.generate(given, max_new_tokens=8, do_sample=False).tolist() == wanted.tolist()


def test_the_files_of_every_tokenizer_go_along(tmp_path: Path) -> None:
    """Those that the tokenizers of transformers name, by their sources; a folder of such a name does not."""
    found = Path(transformers.__file__).parent
    sources = [*found.glob("models/*/tokenization_*.py"), *found.glob("tokenization_*.py")]
    text = "\n".join(each.read_text() for each in sources)
    tables = re.findall(r"_FILES_NAMES\b[^{\n]*\{(.*?)\}", text, re.DOTALL)
    names = {name for table in tables for name in re.findall(r':\s*"([^"]+)"', table)}
    assert {"vocab.txt", "source.spm", "sentencepiece.bpe.model"} < names
    names |= {"tekken.json", "qwen.tiktoken", "chat_template.jinja", "preprocessor_config.json"}
    read = tmp_path / "read"
    (read / "tokenizer").mkdir(parents=True)
    for name in (*names, "model.safetensors", "README.md"):
        (read / name).write_text(name)
    model = tiny("llama", num_hidden_layers=1)
    model.name_or_path = str(read)
    saved = bare((model, capture_step(model)), context=48)[1].save(tmp_path / "out")
    assert {name for name in names if (saved / name).is_file()} == names
    assert not any((saved / name).exists() for name in ("tokenizer", "model.safetensors", "README.md"))


def test_of_an_encoder_decoder_new_tokens_are_those_behind_the_first(tmp_path: Path) -> None:
    """The token that each text begins with is none that was asked for."""
    folder = bare(captured("t5"), context=24)[1].save(tmp_path / "out")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    told = speak(folder, tmp_path / "words")("w5 w9 w11", 4, 0, None)
    assert (told["prompt_tokens"], told["new_tokens"], told["tokens_per_step"]) == (3, 4, 1.0)
    assert len(told["text"].split()) == 5
