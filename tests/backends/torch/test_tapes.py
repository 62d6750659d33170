"""Graphs of real models: their layers are one call, which computes what the operators do."""

from __future__ import annotations

import operator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from form_names import forms
from torch import Tensor, fx, nn
from torch_formats import where_there
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, ViTConfig, ViTModel, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from effcompile.backends.torch import TorchEager, edit
from effcompile.backends.torch import lowered as torch_lowered
from effcompile.backends.torch.called import Called, called
from effcompile.backends.torch.tapes import with_tapes
from effcompile.capture import capture
from effcompile.ops import bf16_attention
from effcompile.ops.bf16_attention import HeldTiles
from effcompile.ops.fp32_attention import HeldAttention
from effcompile.ops.int8_held import HeldLinear
from effcompile.ops.rows_held import HeldGate, HeldRmsNorm
from effcompile.ops.tape import Tape
from effcompile.passes.precompute import Precompute
from effcompile.passes.same_each_call import held
from effcompile.sites.parts import attentions, linears

LAYERS = 2


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """Weights are transposed, activations written out, rows flattened."""
    config = GPT2Config(n_layer=LAYERS, n_embd=64, n_head=4, n_positions=80, vocab_size=100)
    return GPT2Model(config), {"input_ids": torch.randint(0, 100, (2, 70)), "use_cache": False}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    config = ViTConfig(
        num_hidden_layers=LAYERS, image_size=96, hidden_size=64, intermediate_size=128, num_attention_heads=4
    )
    return ViTModel(config), {"pixel_values": torch.randn(2, 3, 96, 96)}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    """Its mask is the caller's."""
    config = BertConfig(
        num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=100
    )
    asked = {"input_ids": torch.randint(0, 100, (2, 70)), "attention_mask": torch.ones(2, 70).long()}
    asked["attention_mask"][1, 50:] = 0
    return BertModel(config), asked


def whisper() -> tuple[nn.Module, dict[str, Any]]:
    """Queries are scaled before their heads are told apart, and the first input has gaps."""
    config = WhisperConfig(
        encoder_layers=LAYERS, d_model=64, encoder_attention_heads=4, encoder_ffn_dim=128,
        max_source_positions=60, num_mel_bins=16,
    )  # fmt: skip
    return WhisperEncoder(config), {"input_features": torch.randn(2, 16, 120)}


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("held", "most"), [("int8_token", 0.05), ("fp32", 2e-6)])
@pytest.mark.parametrize("make", [gpt2, vit, whisper])
def test_its_layers_are_one_call(make: Any, held: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit, "packing", lambda *dims, ours: "ours")
    torch.manual_seed(0)
    model, inputs = make()
    model = model.eval()
    program = capture(model, (), inputs)
    tags = {site.site: held for site in linears(program)}
    tags |= {site.site: "sdpa_fp32" for site in attentions(program)}
    lowered = TorchEager().lower(program.tagged(forms(tags), "test"), None, [program.flat_inputs()])  # type: ignore[arg-type]
    assert isinstance(lowered._called, Called)
    tapes = [node.target for node in lowered._called._direct.graph.nodes if isinstance(node.target, Tape)]
    inside = [sum(isinstance(step.does, HeldAttention) for step in tape._steps) for tape in tapes]
    assert max(inside) == LAYERS, inside
    given = program.flat_inputs()
    before = [each.clone() for each in given]
    for scale in (1, 2, 1):
        asked = [each * scale if each.is_floating_point() else each for each in given]
        with torch.no_grad():
            wanted, found = lowered.run(*asked)[0], lowered(*asked)[0]
            original = model(**{**inputs, **dict(zip(inputs, asked, strict=False))})[0]
        assert error(found, original) < most
        assert abs(error(found, original) - error(wanted, original)) < most / 5
    assert all(map(torch.equal, before, given)), "no input was written to"
    assert all(kept is not None for tape in tapes if len(tape._steps) > 9 for kept in tape._kept.values())


@pytest.mark.skipif(bf16_attention.fallback_reason() is not None, reason="there is no kernel here")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("make", [bert, gpt2, vit, whisper])
def test_layers_with_attentions_in_bf16_are_one_call(
    make: Any, narrow: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fell apart at each attention."""
    monkeypatch.setattr(edit, "packing", lambda *dims, ours: "ours")
    if not narrow:
        monkeypatch.setattr(edit, "narrow_projections", lambda program: None)
    torch.manual_seed(0)
    model, inputs = make()
    program = capture(model.eval(), (), inputs)
    tags = {site.site: "int8_token" for site in linears(program)}
    tags |= {site.site: "sdpa_bf16" for site in attentions(program)}
    lowered = TorchEager().lower(program.tagged(forms(tags), "test"), None, [program.flat_inputs()])  # type: ignore[arg-type]
    assert isinstance(lowered._called, Called)
    tapes = [node.target for node in lowered._called._direct.graph.nodes if isinstance(node.target, Tape)]
    inside = [sum(isinstance(step.does, HeldTiles) for step in tape._steps) for tape in tapes]
    assert max(inside) == LAYERS, inside
    whole = tapes[inside.index(LAYERS)]
    halved = [step.does._narrow for step in whole._steps if isinstance(step.does, HeldLinear)]
    assert any(halved) == (narrow and make is not whisper), "its queries are scaled in fp32"
    given, before = program.flat_inputs(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with torch.no_grad():
            found, wanted, original = lowered(*given)[0], lowered.run(*given)[0], model(**inputs)[0]
    finally:
        torch.set_num_threads(before)
    assert error(found, original) < 0.05
    assert error(found, wanted) < 1e-3
    assert all(kept is not None for kept in whole._kept.values())


def calls(run: Any) -> list[tuple[str, ...]]:
    """What a lowered model calls beside sizes that are asked for, a tape with its steps."""
    made = list[tuple[str, ...]]()
    for node in run._direct.graph.nodes:
        if node.op == "call_function" and node.target is not Tensor.size:
            inside = node.target._steps if isinstance(node.target, Tape) else ()
            made.append((str(node.target).split(" at ")[0], *(type(step.does).__name__ for step in inside)))
    return made


@pytest.mark.parametrize(
    ("make", "held", "attention"),
    [
        *((make, "int8_token", "sdpa_bf16") for make in (bert, gpt2, vit, whisper)),
        where_there("bf16", "bf16", "sdpa_bf16", value=bert),
        (vit, "fp32", "sdpa_fp32"),
        where_there("int13_token", "int13_token", "sdpa_int8_token", value=whisper),
    ],
)
def test_a_saved_one_runs_the_same_calls(
    make: Any, held: str, attention: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Layers of one that was opened were other calls: BERT took 43 for 21, and held more than was planned."""
    monkeypatch.setattr(edit, "packing", lambda *dims, ours: "ours")
    torch.manual_seed(0)
    model, inputs = make()
    program = capture(model.eval(), (), inputs)
    tags = {site.site: held for site in linears(program) if "pooler" not in site.site}
    tags |= {site.site: attention for site in attentions(program)}
    lowered = TorchEager().lower(program.tagged(forms(tags), "test"), None, [program.flat_inputs()])  # type: ignore[arg-type]
    made: list[Any] = []
    monkeypatch.setattr(
        torch_lowered, "called", lambda module, keeps=0: made.append(called(module)) or made[-1]
    )
    run, _ = torch_lowered.load_flat(*lowered.save(tmp_path))
    assert calls(made[-1]) == calls(lowered._called)
    given = program.flat_inputs()
    assert all(map(torch.equal, run(*given), lowered(*given)))


def test_one_of_several_values_that_is_read_outside_stays_itself() -> None:
    """A norm that makes its sum, too, in a run that cannot be one call as its columns are read elsewhere: in
    a Llama some of whose linears have other formats, each part of the run ended in an IndexError.
    """
    torch.manual_seed(0)
    graph, aten = fx.Graph(), torch.ops.aten
    x, residual = graph.placeholder("x"), graph.placeholder("residual")
    both = graph.call_function(HeldRmsNorm(torch.rand(64), 1e-6, pair=True), (x, residual))
    norm, summed = (graph.call_function(operator.getitem, (both, at)) for at in range(2))
    gated = graph.call_function(HeldGate(), (norm, summed))
    split = graph.call_function(aten.split_with_sizes.default, (gated, [32, 32], -1))
    parts = [graph.call_function(operator.getitem, (split, at)) for at in range(2)]
    made = graph.call_function(aten.mul.Tensor, (parts[0], parts[1]))
    graph.output((made, graph.call_function(aten.neg.default, (summed,))))
    module, given = fx.GraphModule(nn.Module(), graph), (torch.randn(2, 5, 64), torch.randn(2, 5, 64))
    for node in (x, residual, norm, summed, gated):
        node.meta["val"] = given[0]
    wanted = module(*given)
    found = with_tapes(module)
    assert all(map(torch.equal, found(*given), wanted))


class NormedTable(nn.Module):
    """Attends to a table whose rows are normed first, as DeBERTa does to its relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, 64))
        self.norm, self.query, self.key = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) @ self.key(self.norm(self.table)).mT


def test_a_constant_is_no_input_of_a_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit, "packing", lambda *dims, ours: "ours")
    torch.manual_seed(0)
    model, x = NormedTable().eval(), torch.randn(2, 40, 64)
    program = capture(model, (x,), {})
    tags = {site.site: "int8_token" for site in linears(program)}
    lowered = TorchEager().lower(program.tagged(forms(tags), "test"), None, [program.flat_inputs()])  # type: ignore[arg-type]
    with torch.no_grad():
        assert error(lowered(x)[0], model.double()(x.double())) < 0.05


class Biased(nn.Module):
    """Two layers whose attentions add a bias of positions that no input reaches, as T5's and Swin's do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 4, 40, 40))
        self.into = nn.ModuleList(nn.ModuleList(nn.Linear(64, 64) for _ in range(4)) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table.tanh()
        for *heads, out in self.into:  # type: ignore[misc]
            q, k, v = (each(x).view(2, 40, 4, 16).transpose(1, 2) for each in heads)
            made = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            x = x + out(made.transpose(1, 2).reshape(2, 40, 64))
        return x


@pytest.mark.parametrize("once", [False, True])
def test_a_bias_that_is_a_constant_keeps_layers_in_one_call(
    once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edit, "packing", lambda *dims, ours: "ours")
    torch.manual_seed(0)
    model, x = Biased().eval(), torch.randn(2, 40, 64)
    program = capture(model, (x,), {}, dynamic=False)
    tags = {site.site: "int8_token" for site in linears(program)}
    tags |= {site.site: "sdpa_fp32" for site in attentions(program)}
    told = program.tagged(forms(tags), "test")
    if once:
        plan: Any = SimpleNamespace(forms=lambda: forms({held(program)[0].site: "precomputed"}))
        told = Precompute().apply(told, plan)
        assert not told.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    lowered = TorchEager().lower(told, None, [program.flat_inputs()])  # type: ignore[arg-type]
    tapes = [each[1:] for each in calls(lowered._called) if len(each) > 1]
    assert [each.count("HeldAttention") for each in tapes] == [LAYERS], tapes
    with torch.no_grad():
        found, wanted = lowered(x)[0], lowered.run(x)[0]
        assert error(found, model(x)) < 0.05
    assert error(found, wanted) < 1e-3
