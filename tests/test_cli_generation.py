"""`--mode generation`: planned from a file, written, and made to speak."""

import html
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner, Result

from effcompile.cli import app

MODEL = """
import torch
from generation_models import ids, tiny
model = tiny("llama", num_hidden_layers=1)
inputs = {"input_ids": ids(2, 20)}
"""
HOW = ["--mode", "generation", "--target", "cpu-generic", "--backend", "torch-eager"]


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What optimize -o wrote, with a tokenizer of 64 words beside it."""
    root = tmp_path_factory.mktemp("generation")
    (root / "model.py").write_text(MODEL)
    made = run(
        "optimize",
        str(root / "model.py"),
        *HOW,
        "--context",
        "48",
        "--prompt",
        "8",
        "--new",
        "8",
        "-o",
        str(root / "out"),
    )
    assert made.exit_code == 0, made.output
    assert "LlamaForCausalLM" in made.output
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(root / "words")
    return root


def test_a_saved_generation_speaks(folder: Path) -> None:
    said = run(
        "run",
        str(folder / "out"),
        "--prompt",
        "w5 w9 w11",
        "--new",
        "6",
        "--tokenizer",
        str(folder / "words"),
        "--json",
    )
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert found["text"].startswith("w5 w9 w11 w")
    assert (found["prompt_tokens"], found["new_tokens"]) == (3, 6)
    from generation_models import tiny

    wanted = tiny("llama", num_hidden_layers=1).generate(
        torch.tensor([[5, 9, 11]]), max_new_tokens=6, do_sample=False
    )
    assert found["text"].split() == [f"w{i}" for i in wanted[0].tolist()]


def test_a_front_has_the_command_of_each_plan(folder: Path) -> None:
    """What was typed, with the plan's peak as the memory; it makes that plan, and half of it none."""
    how = [str(folder / "model.py"), *HOW]
    made = run(
        "frontier",
        *how,
        "--context",
        "48",
        "--max-error",
        "0.3",
        "--points",
        "2",
        "-o",
        str(folder / "front"),
    )
    assert made.exit_code == 0, made.output
    page = html.unescape((folder / "front" / "report.html").read_text(encoding="utf-8"))
    commands = re.findall(r"^effcompile optimize (.*)$", page.replace("</pre>", "\n"), re.MULTILINE)
    assert commands
    least = shlex.split(commands[0])
    assert sorted(least[:-1]) == sorted([*how, "--context", "48", "--max-error", "0.3", "--memory"])
    plan = json.loads(run("plan", *least, "--json").stdout)
    assert plan["predicted"]["peak_bytes"] <= int(least[-1])
    assert run("plan", *least[:-1], str(int(least[-1]) // 2)).exit_code == 1


def test_drafted_tokens_leave_the_text_as_it_is(folder: Path) -> None:
    """A prompt that repeats itself, of a model that soon does: some drafts are right, and none changes the
    text.
    """
    how = [
        "run",
        str(folder / "out"),
        "--prompt",
        "w5 w9 w11 w5 w9",
        "--new",
        "30",
        "--tokenizer",
        str(folder / "words"),
        "--json",
    ]
    plain, drafted = (json.loads(run(*how, *more).stdout) for more in ([], ["--drafts", "3"]))
    assert drafted["text"] == plain["text"]
    assert plain["new_tokens"] == drafted["new_tokens"] == 30
    assert plain["tokens_per_step"] == 1 < drafted["tokens_per_step"] <= 4


def test_text_is_streamed_and_rates_are_told(folder: Path) -> None:
    said = run(
        "run", str(folder / "out"), "--prompt", "w5 w9", "--new", "4", "--tokenizer", str(folder / "words")
    )
    assert said.exit_code == 0, said.output
    assert "w5 w9" in said.stdout
    assert "2 tokens of prompt at" in said.stdout
    assert "4 new ones at" in said.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "Give the text to go on from"),
        (["--prompt", "w1"], "holds no tokenizer"),
        (["--prompt", "w1", "--tokenizer", "BROKEN"], "transformers makes no tokenizer of"),
        (["--prompt", "w1", "--tokenizer", "nowhere"], "is no folder"),
        (["--prompt", "", "--tokenizer", "WORDS"], "The prompt has no tokens"),
        (["--prompt", "w1 " * 60, "--tokenizer", "WORDS"], "room for context = 48"),
    ],
)
def test_what_cannot_speak_is_told(folder: Path, words: list[str], told: str) -> None:
    (folder / "broken").mkdir(exist_ok=True)
    (folder / "broken" / "tokenizer.json").write_text("{")
    places = {"WORDS": str(folder / "words"), "BROKEN": str(folder / "broken")}
    said = run("run", str(folder / "out"), *[places.get(word, word) for word in words])
    assert isinstance(said.exception, Exception)
    assert told in str(said.exception)


@pytest.mark.parametrize("command", [["serve"], ["run", "--prompt", "w1"]])
def test_that_there_is_no_tokenizer_is_told_before_anything_is_imported(
    folder: Path, command: list[str]
) -> None:
    """Importing transformers and opening the model take seconds."""
    script = """
import sys
from effcompile.cli import app
try:
    app(sys.argv[1:], standalone_mode=False)
except Exception as error:
    print(error, "torch" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, *command, str(folder / "out")], capture_output=True, text=True
    )
    assert "--tokenizer DIR. False" in ran.stdout, ran.stdout + ran.stderr


def test_counts_are_for_generation(folder: Path) -> None:
    said = run("optimize", str(folder / "model.py"), "--context", "48")
    assert "context is for mode = 'generation'" in str(said.exception)
