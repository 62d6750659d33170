"""Steps of generation in OpenVINO: texts are the model's own, whoever holds which cache.

Skipped where the extra is not installed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from form_names import forms
from generation_models import CONTEXT, Planned, bare, captured, ids, same

import effcompile
from effcompile.backends import usable_for_steps
from effcompile.backends.openvino import OpenVino
from effcompile.backends.openvino.states import KeptRows
from effcompile.backends.openvino.steps import OpenVinoSteps
from effcompile.capture.caches import new_cache
from effcompile.core.errors import EffcompileError, FormatError, GuardError, InputsError, UsageError
from effcompile.estimate import fake_quant
from effcompile.machine.target import KernelCall
from effcompile.sites.parts import embeddings, linears

installed = pytest.mark.skipif(
    OpenVino().unavailable() is not None, reason="openvino or nncf is not installed"
)
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def planned() -> Planned:
    return bare(captured("llama"), "openvino")


def logits(run: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = run(tokens, past_key_values=cache).logits
    return made


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 1e-5)


def test_is_a_backend_of_generation_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="openvino"):  # it is among those that are named
        usable_for_steps("torch-inductor")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install 'effcompile\\[openvino\\]'"):
        usable_for_steps("openvino")
    steps = OpenVinoSteps()
    assert steps.lacks(KernelCall("linear/w4", (1, 64, 8, 32))) is None
    for kernel, dims in (
        ("linear/w4", (1, 48, 8, 32)),
        ("linear/w8", (1, 64, 8, 16)),
        ("linear/bf16", (1, 64, 8)),
    ):
        assert steps.lacks(KernelCall(kernel, dims)) is not None
    assert OpenVino().lacks(KernelCall("linear/w4", (1, 64, 8, 32))) is not None  # of forward calls


class Numbers:
    """Stands for what a request keeps."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.rows = values, values.shape[2]

    def read(self, place: int, rows: int) -> torch.Tensor:
        return self.values[:, :, :rows].clone()


def test_kept_rows_are_what_is_kept_until_they_are_written_to() -> None:
    values = torch.arange(24.0).reshape(1, 2, 3, 4)
    numbers: Any = Numbers(values)
    rows = KeptRows(numbers, 0, values.shape, values.dtype)
    assert rows.shape == values.shape
    assert torch.equal(rows + 0, values)
    assert torch.equal(rows.index_select(0, torch.tensor([0, 0])), values.repeat(2, 1, 1, 1))
    assert torch.equal(copy.deepcopy(rows), values)
    assert torch.equal(pickle.loads(pickle.dumps(rows)), values)
    assert rows.current(0) is numbers
    assert rows.current(1) is None  # of another leaf
    numbers.values, numbers.rows = torch.cat([values, values], 2), 6
    assert rows.current(0) is None  # it went on
    assert torch.equal(rows + 0, values)
    numbers.rows = 3
    rows[:, :, :1].zero_()  # by a view
    assert rows.current(0) is None
    assert float(rows[0, 0, 0].sum()) == 0
    assert torch.equal(rows[:, :, 1:], values[:, :, 1:])


@installed
def test_texts_are_the_models(planned: Planned) -> None:
    for prompt in (ids(1, 5), ids(2, 9), ids(1, 150)):  # the last in chunks
        same(planned, prompt, **GREEDY)
    padded = ids(2, 10)
    mask = torch.ones_like(padded)
    mask[0, :4] = mask[1, :2] = 0
    _, executable = planned
    made = executable.generate(padded, attention_mask=mask, **GREEDY)
    assert torch.equal(made[:1, 4:], executable.generate(padded[:1, 4:], **GREEDY))
    assert torch.equal(made[1:, 2:], executable.generate(padded[1:, 2:], **GREEDY))
    same(planned, ids(2, 7), max_new_tokens=8, do_sample=True)
    same(planned, ids(2, 7), max_new_tokens=8, num_beams=3)
    same(planned, ids(1, 6).repeat(1, 4), prompt_lookup_num_tokens=3, **GREEDY)


@installed
def test_caches_never_mix(planned: Planned) -> None:
    model, executable = planned
    texts = [ids(1, 20, seed=seed) for seed in (1, 2, 3)]
    mine, theirs = ([new_cache(model) for _ in texts] for _ in range(2))
    for at in range(20):
        for text, one, other in zip(texts, mine, theirs, strict=True):
            new = text[:, at : at + 1]
            assert close(logits(executable, one, new), logits(model, other, new))
    for one, other in zip(mine, theirs, strict=True):
        for layer, wanted in zip(one.layers, other.layers, strict=True):
            assert isinstance(layer.keys, KeptRows)
            assert close(layer.keys + 0, wanted.keys)
            assert close(layer.values + 0, wanted.values)


@installed
def test_a_cache_goes_on_from_whatever_it_holds(planned: Planned) -> None:
    model, executable = planned
    text, more = ids(2, 9), ids(2, 1, seed=4)
    mine, theirs = new_cache(model), new_cache(model)
    logits(executable, mine, text), logits(model, theirs, text)
    branch, deep = copy.copy(mine), copy.deepcopy(mine)
    branch.layers = [copy.copy(layer) for layer in mine.layers]
    other = copy.deepcopy(theirs)
    assert close(logits(executable, mine, more), logits(model, theirs, more))
    for again in (branch, deep):  # what keeps it has gone on, or never had it
        assert close(logits(executable, again, more), logits(model, copy.deepcopy(other), more))
    for each in (mine, theirs):
        each.crop(-4)
        each.reorder_cache(torch.tensor([1, 1]))
    assert close(logits(executable, mine, text[:, :3]), logits(model, theirs, text[:, :3]))
    for each in (mine, theirs):
        each.layers[0].keys.mul_(0.5)
    assert close(logits(executable, mine, more), logits(model, theirs, more))
    filled = new_cache(model)  # by the model, and handed over
    logits(model, filled, text)
    assert close(logits(executable, filled, more), logits(model, other, more))


@installed
def test_what_cannot_be_is_refused(planned: Planned) -> None:
    model, executable = planned
    with pytest.raises(GuardError, match="context"):
        executable.generate(ids(1, CONTEXT - 2), max_new_tokens=8, min_new_tokens=8)
    cache = new_cache(model)
    logits(executable, cache, ids(2, 4))
    with pytest.raises(GuardError, match="rows"):
        logits(executable, cache, ids(1, 1))
    for layer in cache.layers:
        layer.keys = layer.keys[:, :1]
    with pytest.raises(GuardError, match="does not"):
        logits(executable, cache, ids(2, 1))
    filled = new_cache(model)
    logits(model, filled, ids(1, 4))
    filled.layers[1].values[0, 0, 0, 0] = float("nan")
    with pytest.raises(InputsError, match="NaN"):
        logits(executable, filled, ids(1, 1))
    same(planned, ids(1, 5), **GREEDY)


@installed
@pytest.mark.parametrize("kind", ["gemma3_text", "t5"])
def test_windows_and_encoders(kind: str) -> None:
    other = bare(captured(kind), "openvino")
    same(other, ids(2, 5), max_new_tokens=24, min_new_tokens=24, do_sample=False)


@installed
def test_a_folder_is_opened_without_the_model(planned: Planned, tmp_path: Path) -> None:
    model, executable = planned
    executable.save(tmp_path / "out")
    opened: Any = effcompile.load(tmp_path / "out")
    prompt = ids(2, 7)
    assert torch.equal(opened.generate(prompt, **GREEDY), model.generate(prompt, **GREEDY))  # type: ignore[operator]


@installed
def test_weights_are_held_in_planned_codes() -> None:
    _, step = captured("llama", hidden_size=64)
    program = step.program
    kinds = ("w4", "w8", "fp32", "w8g64")
    tags = {site.site: kinds[at % 4] for at, site in enumerate(linears(program)) if site.k % 64 == 0}
    tags |= {site.site: "int8_rows" for site in embeddings(program)}
    tagged = program.tagged(forms(tags), "test")
    lowered: Any = OpenVinoSteps().lower(tagged, None, [])  # type: ignore[arg-type]
    assert {site: lowered.applied[site] for site in tags} == forms(tags)
    flat = program.flat_inputs()
    wanted = tagged.editable("rounded")
    with torch.no_grad():
        for site in [*linears(wanted), *embeddings(wanted)]:
            if site.site in tags:
                weight = wanted.tensor(site.weight)
                assert weight is not None
                weight = torch.nn.Parameter(fake_quant.weight(weight.detach(), tagged.format_at(site.site)))
                setattr_nested(wanted.module, str(site.weight.target), weight)
        told = wanted.module(**dict(wanted.kwargs))["logits"]
        plain = program.module(**dict(program.kwargs))["logits"]
    found = lowered(*flat)[0]
    # activations are rounded to 8 bits in groups, too
    assert (found - told).norm() < 0.02 * told.norm()
    assert (found - told).norm() < 0.5 * (plain - told).norm()


def setattr_nested(module: torch.nn.Module, name: str, value: torch.nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, value)


@installed
def test_a_graph_whose_products_are_sums_is_told(planned: Planned, tmp_path: Path) -> None:
    """Where its sizes fit as far as OpenVINO looks, there are no logits of the tokens that were asked for."""
    folder = planned[1].save(tmp_path / "out")
    graph, plan = folder / "step.xml", json.loads((folder / "plan.json").read_text())
    graph.write_text(graph.read_text().replace('type="MatMul"', 'type="Add"', 1))
    plan["artifact"]["step.xml"] = hashlib.sha256(graph.read_bytes()).hexdigest()
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(EffcompileError, match=r"not the one that was planned|failed with these inputs"):
        effcompile.load(folder).generate(ids(1, 6), **GREEDY)


@installed
def test_a_graph_whose_weights_have_no_digest_is_not_opened(planned: Planned, tmp_path: Path) -> None:
    folder = planned[1].save(tmp_path / "out")
    plan = json.loads((folder / "plan.json").read_text())
    del plan["artifact"]["step.bin"]
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(FormatError, match=r"does not describe 'step\.bin'"):
        effcompile.load(folder)
