"""Inductor keeps the planned precision in the graph it finally compiles."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest
import torch
from form_names import form
from torch import nn
from torch._dynamo.utils import counters
from torch_formats import lacking

from effcompile.backends.torch import TorchEager, TorchInductor, load
from effcompile.backends.torch import edit as torch_edit
from effcompile.backends.torch import lowered as lowered_module
from effcompile.backends.torch import read_back as found
from effcompile.backends.torch.edit import edit
from effcompile.backends.torch.pack import flatten
from effcompile.capture import capture
from effcompile.ir.program import Program
from effcompile.sites.parts import linears

pytestmark = pytest.mark.skipif(TorchInductor().unavailable() is not None, reason="no C++ compiler")
WANTED = ("int8_token", "bf16", "int8_dynamic", "int8_channel", "int8_static", "int8_static", "bf16")
MIXED = tuple(name if lacking(name) is None else "int8_token" for name in WANTED)


def test_mixed_plan_compiles_and_is_read_back_from_the_compiled_graph(
    model: nn.Module, program: Program
) -> None:
    tags = {site.site: form(option) for site, option in zip(linears(program), MIXED, strict=True)}
    lowered = TorchInductor().lower(program.tagged(tags, "test"), None, [[program.args[0]]])
    assert {site: lowered.applied[site] for site in tags} == tags
    for ids in (program.args[0], program.args[0][:1, :5]):  # the second shape runs uncompiled
        with torch.no_grad():
            reference = model(ids)
        assert float((lowered(ids)[0] - reference).norm() / reference.norm()) < 5e-2
    compiled = counters["stats"]["unique_graphs"]
    with torch.inference_mode():  # Dynamo knows whether it is on: a caller's would have all compiled again
        lowered(program.args[0])
        lowered(program.args[0].clone())
    assert counters["stats"]["unique_graphs"] == compiled > 0


def test_weights_are_packed_once_for_all_shapes(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_edit, "packing", lambda *dims, ours: "oneDNN")

    def in_blocks() -> dict[int, torch.Tensor]:
        """Weights in oneDNN's layout that are alive."""
        gc.collect()
        return {
            id(t): t
            for t in gc.get_objects()
            if type(t) in (torch.Tensor, nn.Parameter, nn.Buffer) and t.is_mkldnn
        }

    before = in_blocks()
    lowered = TorchInductor().lower(program, None, [])
    lowered(program.args[0])
    lowered(program.args[0][:1, :5])
    held = [t for key, t in in_blocks().items() if key not in before]
    assert (
        0
        < len(held)
        == len(
            {node.target for node in lowered.run._eager.graph.nodes if str(node.target).startswith("_packed")}
        )
    )


def test_precision_lost_by_the_compiler_is_reported(program: Program) -> None:
    tags = {site.site: form(MIXED[-1]) for site in linears(program)}
    module = flatten(edit(program.tagged(tags, "test"), []))
    kept = Counter(signature for *_, signature in found.signatures(module))
    applied = found.applied(program, module)
    assert found.confirm(applied, module, kept) == applied
    lost = found.confirm(applied, module, Counter())
    assert all(lost[site] == found.NOT_FOUND for site in tags)


class Folded(torch.nn.Module):
    """A constant that compiling folds, of a size that no other tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 61)
        self.register_buffer("table", torch.randn(61, 67))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ (self.table * 2)


def tables() -> int:
    gc.collect()
    return sum(
        type(held) in (torch.Tensor, torch.nn.Parameter) and held.numel() == 61 * 67
        for held in gc.get_objects()
    )


def test_frozen_weights_go_with_what_was_compiled() -> None:
    """Inductor and Dynamo would keep them until the process ends."""
    model, x = Folded().eval(), torch.randn(4, 16)
    program = capture(model, (x,), {})
    before = tables()
    lowered = TorchInductor().lower(program, None, [])
    assert torch.allclose(lowered(x)[0], model(x), atol=1e-5)
    assert tables() > before
    del lowered
    assert tables() == before


class Marked(nn.Module):
    """Marks a place that is computed of the values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros_like(x).scatter(1, x[:, :1].round().long(), 1.0)


def test_a_scatter_at_no_place_is_refused() -> None:
    """Inductor would compare places with the index, and leave out what is none."""
    model, x = Marked(), torch.full((4, 16), 3.0)
    lowered = TorchInductor().lower(capture(model, (x,), {}), None, [])
    assert torch.equal(lowered(x)[0], model(x))
    for wrong in (-1.0, 16.0, 4000.0):
        with pytest.raises(RuntimeError, match="out of bounds"):
            lowered(x + wrong - 3)


class _Generated:
    """How often code was taken from Inductor's cache of graphs, and how often it was made."""

    def __init__(self) -> None:
        self.before = counters["inductor"].copy()

    def now(self) -> tuple[int, int]:
        since = counters["inductor"] - self.before
        self.before = counters["inductor"].copy()
        return since["fxgraph_cache_hit"], since["fxgraph_cache_miss"]


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Generated:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return _Generated()


def dynamic(width: int = 32) -> Program:
    """A linear whose weight oneDNN packs, with codes of 8 bits."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, 8)).eval()
    program = capture(model, (torch.randn(4, width),), {})
    return program.tagged({site.site: form("int8_dynamic") for site in linears(program)}, "test")


@pytest.mark.skipif(lacking("int8_dynamic") is not None, reason="no such kernel here")
def test_code_of_packed_weights_is_generated_once_and_told_as_it_was(generated: _Generated) -> None:
    """What the final graph held is read from Inductor's own entry of the code: no pass runs."""
    program = dynamic()
    first = TorchInductor().lower(program, None, [[program.args[0]]])
    assert generated.now() == (0, 1)
    again = TorchInductor().lower(program, None, [[program.args[0]]])
    assert generated.now() == (1, 0)
    assert first.applied == again.applied
    assert {site: again.applied[site] for site in program.tags} == program.tags
    assert torch.equal(first(program.args[0])[0], again(program.args[0])[0])


@pytest.mark.skipif(lacking("int8_dynamic") is not None, reason="no such kernel here")
def test_code_of_a_saved_model_is_generated_once_for_each_content(
    generated: _Generated, tmp_path: Path
) -> None:
    program = dynamic()
    x, lowered = program.args[0], TorchInductor().lower(program, None, [])
    wanted, (path, *_) = lowered(x)[0], lowered.save(tmp_path / "one")
    generated.now()
    for of_cache in ((0, 1), (1, 0)):
        run = load(path)
        found_there, again = run(x), run(x)
        assert torch.allclose(found_there, wanted, atol=1e-4) and torch.equal(found_there, again)
        assert generated.now() == of_cache
    # each further shape took half a minute to compile, and the ninth failed: Dynamo compiles eight times
    for rows in (1, *range(3, 12)):
        assert torch.equal(
            run(x[:1].expand(rows, *x.shape[1:])), lowered(x[:1].expand(rows, *x.shape[1:]))[0]
        )
    with torch.inference_mode():
        run(x.clone())
    assert generated.now() == (0, 0)
    with torch.no_grad():
        next(iter(program.module.parameters()))[0, 0] += 1  # one element, of the same sizes
    other, *_ = TorchInductor().lower(program, None, []).save(tmp_path / "other")
    generated.now()
    assert torch.allclose(load(other)(x), TorchEager().lower(program, None, [])(x)[0], atol=1e-4)
    assert generated.now() == (0, 1)


@pytest.mark.skipif(lacking("int8_dynamic") is not None, reason="no such kernel here")
def test_a_lost_kernel_is_lost_in_what_is_taken_from_the_cache_too(
    generated: _Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, read = dynamic(), lowered_module._words
    monkeypatch.setattr(lowered_module, "_words", lambda graph: read(graph)[1:])
    first = TorchInductor().lower(program, None, [])
    monkeypatch.setattr(lowered_module, "_words", read)
    again = TorchInductor().lower(program, None, [])
    assert generated.now() == (1, 1)
    assert first.applied == again.applied
    assert list(first.applied.values()).count(found.NOT_FOUND) == 1


@pytest.mark.skipif(lacking("int8_dynamic") is not None, reason="no such kernel here")
def test_another_weight_other_threads_and_other_operators_have_code_of_their_own(
    generated: _Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = dynamic()
    TorchInductor().lower(program, None, [])
    assert generated.now() == (0, 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        TorchInductor().lower(program, None, [])
        assert generated.now() == (0, 1)
    finally:
        torch.set_num_threads(threads)
    with monkeypatch.context() as patched:
        patched.setattr(lowered_module, "_what_compiles", lambda threads: "another release")
        TorchInductor().lower(program, None, [])
        assert generated.now() == (0, 1)
    with torch.no_grad():
        next(iter(program.module.parameters()))[0, 0] += 1  # one element, of the same sizes
    model = TorchInductor().lower(program, None, [])
    assert generated.now() == (0, 1)
    x = program.args[0]
    wanted = TorchEager().lower(program, None, [])(x)[0]
    assert torch.allclose(model(x)[0], wanted, atol=1e-4)
