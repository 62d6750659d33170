"""Lowering to ONNX Runtime: planned options are found in the artifact, results are right, the file needs no
effcompile.
"""

import collections
import mmap
import random
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from form_names import form, forms, names
from resident_pages import resident_at, resident_of
from torch.utils import _pytree as pytree

import effcompile
from effcompile.backends.onnxruntime import OnnxRuntime, lowering, session
from effcompile.backends.onnxruntime.quantise import found_formats
from effcompile.capture import capture
from effcompile.core.errors import LoweringError
from effcompile.ir.export import resized
from effcompile.ir.formats import NOT_FOUND
from effcompile.passes.merge import Merge
from effcompile.sites import parts as sites

pytestmark = pytest.mark.usefixtures("exported_once")
LINEAR_OPTIONS = ["fp32", "int8_dynamic", "int8_channel", "int8_static", "w8", "w4", "w4g16", "w8g64"]


def lower(program, tags):
    tagged = program.tagged(forms(tags), "test")
    return OnnxRuntime().lower(tagged, None, [tagged.flat_inputs()])


def outputs_of(model, kwargs):
    with torch.no_grad():
        return [
            leaf
            for leaf in pytree.tree_leaves(model(**kwargs, use_cache=False))
            if isinstance(leaf, torch.Tensor)
        ]


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def optimized(path, tmp_path):
    """Operator counts after ORT's own optimisations with default session options."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return collections.Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)


@pytest.mark.parametrize("option", LINEAR_OPTIONS)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_each_precision_is_applied_everywhere_and_keeps_the_result(option, family, request):
    model, program = request.getfixturevalue(family)
    planned = {site.site: option for site in sites.linears(program)}
    lowered = lower(program, planned)
    assert {site: lowered.applied[site] for site in planned} == forms(planned)
    for sizes in ({}, {"batch": 3, "seq": 24}):
        _, kwargs = resized(program, sizes)
        found = lowered(*program.flat_inputs((), kwargs))
        errors = [relative(f, w) for f, w in zip(found, outputs_of(model, kwargs), strict=True)]
        limit = 1e-5 if option == "fp32" else 0.3 if option.startswith("w4") else 0.08
        assert max(errors) < limit
        assert option == "fp32" or max(errors) > 1e-5  # a quantiser that did nothing would be exact


def test_only_the_planned_nodes_change(bert):
    _, program = bert
    chosen = [site.site for site in sites.linears(program)][::3]
    lowered = lower(program, dict.fromkeys(chosen, "int8_channel"))
    found = {site.site: lowered.applied[site.site] for site in sites.linears(program)}
    assert names(found) == {site: "int8_channel" if site in chosen else "fp32" for site in found}


@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_is_applied_as_planned(bert, seed):
    """Also on linears that share an input: each quantiser would give the shared activation the same names."""
    model, program = bert
    choose = random.Random(seed).choice
    planned = {site.site: choose(LINEAR_OPTIONS) for site in sites.linears(program)}
    lowered = lower(program, planned)
    assert {site: lowered.applied[site] for site in planned} == forms(planned)
    found = lowered(*program.flat_inputs())
    assert max(relative(f, w) for f, w in zip(found, outputs_of(model, program.kwargs), strict=True)) < 0.3


def test_applied_is_read_from_the_model_and_not_from_the_plan(bert, tmp_path):
    _, program = bert
    (path,) = lower(program, {}).save(tmp_path)
    model = onnx.load(path)
    products = [node.name for node in model.graph.node if node.op_type == "MatMul"]
    assert set(found_formats(model, products).values()) == {form("fp32")}
    assert found_formats(model, ["no_such_node"]) == {"no_such_node": NOT_FOUND}


def test_int8_everywhere_is_under_a_third_of_fp32(bert):
    _, program = bert
    tags = {site.site: "int8_channel" for site in sites.linears(program)} | {
        site.site: "int8" for site in sites.embeddings(program)
    }
    lowered = lower(program, tags)
    assert {lowered.applied[site.site] for site in sites.embeddings(program)} == {form("int8")}
    assert lowered.weight_bytes < 0.3 * program.weight_bytes()


def test_split_norms_stay_split_in_a_plain_session_and_fused_ones_are_fused(bert, tmp_path):
    _, program = bert
    norms = [site.site for site in sites.add_norms(program)]
    split = lower(program, dict.fromkeys(norms, "split"))
    assert optimized(split.save(tmp_path / "split")[0], tmp_path)["SkipLayerNormalization"] == 0
    fused = lower(program, dict.fromkeys(norms, "fused"))
    assert optimized(fused.save(tmp_path / "fused")[0], tmp_path)["SkipLayerNormalization"] >= 4


def test_packed_attention_has_no_transposes(bert, tmp_path):
    _, program = bert
    attentions = [site.site for site in sites.attentions(program)]
    lowered = lower(program, dict.fromkeys(attentions, "packed"))
    assert {lowered.applied[site] for site in attentions} == {form("packed")}
    counts = optimized(lowered.save(tmp_path / "a")[0], tmp_path)
    assert counts["Attention"] == len(attentions)
    assert counts["Transpose"] == 0


def test_the_artifact_runs_without_effcompile(gpt2, tmp_path):
    model, program = gpt2
    (path,) = lower(program, {site.site: "int8_dynamic" for site in sites.linears(program)}).save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    np.savez(tmp_path / "in.npz", **{k: v.numpy() for k, v in program.kwargs.items()})
    script = (
        "import sys, numpy as np, onnxruntime\nsys.modules['effcompile'] = None\ns = "
        f"onnxruntime.InferenceSession({str(path)!r})\nnp.save({str(tmp_path / 'out.npy')!r}, "
        f"s.run(['logits'], dict(np.load({str(tmp_path / 'in.npz')!r})))[0])\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    wanted = outputs_of(model, program.kwargs)[0]
    assert relative(torch.from_numpy(np.load(tmp_path / "out.npy")), wanted) < 0.08


def test_wrong_inputs_are_a_lowering_error(bert):
    _, program = bert
    lowered = lower(program, {})
    with pytest.raises(LoweringError, match="ONNX Runtime failed"):
        lowered(torch.zeros(2, 16), torch.zeros(2, 16))


def test_peak_is_at_least_the_weights(bert):
    _, program = bert
    lowered = lower(program, {})
    peak = lowered.peak_bytes(program.flat_inputs())
    assert peak is None or peak > lowered.weight_bytes


@pytest.mark.parametrize("option", LINEAR_OPTIONS)
def test_a_linear_of_rows_that_stays_in_fp32_is_a_gemm_which_hinders_no_other(option):
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).eval()
    program = capture(model, (torch.randn(16, 64),), {})
    lowered = lower(program, {"0": "fp32", "2": option})
    assert lowered.applied == forms({"0": "fp32", "2": option})
    with torch.no_grad():
        assert relative(lowered(*program.flat_inputs())[0], model(*program.args)) < 0.3


class Shared(torch.nn.Module):
    """Two linears of one input, whose merged weight a pass makes, and one behind them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = (torch.nn.Linear(320, 320) for _ in range(3))

    def forward(self, x):
        return self.out(self.q(x) * self.k(x))


def test_weights_that_were_written_are_held_by_the_file_alone(monkeypatch):
    """Those of the model stay as they are, those that a pass made are mapped; none is written for ONNX
    Runtime to transpose.
    """
    monkeypatch.setattr(lowering, "BESIDE", 64)
    torch.manual_seed(0)
    model, x = Shared().eval(), torch.randn(2, 5, 320)
    program = capture(model, (x,), {})
    (site,) = sites.merges(program)
    merged = Merge().apply(program, SimpleNamespace(forms=lambda: {site.site: form("merged")}))
    assert merged.made == (f"{site.merged_site}.weight", f"{site.merged_site}.bias")
    weight = merged.module.get_parameter(merged.made[0])
    before, at, own = weight.detach().clone(), weight.data_ptr(), model.out.weight.data_ptr()
    lowered = OnnxRuntime().lower(replace(merged, made=(*merged.made, "put_elsewhere")), None, [])
    assert weight.data_ptr() != at
    assert torch.equal(weight, before)
    assert model.out.weight.data_ptr() == own
    assert relative(lowered(x)[0], model(x).detach()) < 1e-5
    assert "Transpose" not in {node.op_type for node in onnx.load(lowered._path).graph.node}


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what is resident")
def test_weights_that_a_pass_made_are_not_resident_beside_a_session(monkeypatch):
    """Though the program, which has them, is run at a second shape where the example's batch is 1."""
    monkeypatch.setattr(lowering, "BESIDE", 64)
    model, x = Shared().eval(), torch.randn(1, 5, 320)
    program = capture(model, (x,), {})
    (site,) = sites.merges(program)
    merged = Merge().apply(program, SimpleNamespace(forms=lambda: {site.site: form("merged")}))
    seen, run = [], lowering.run

    def watched(*given):
        seen.append(resident_at(merged.module.get_parameter(merged.made[0]).data_ptr()))
        return run(*given)

    monkeypatch.setattr(lowering, "run", watched)
    OnnxRuntime().lower(merged, None, [])
    assert seen == [0, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what is resident")
def test_of_a_table_what_is_looked_up_is_resident(monkeypatch, tmp_path):
    """Written at once, its file would be cached in pieces of megabytes, each mapped whole."""
    monkeypatch.setattr(lowering, "BESIDE", 64)
    table, ids = torch.nn.Embedding(16384, 256), torch.arange(0, 16384, 1024)[None]
    program = capture(torch.nn.Sequential(table, torch.nn.Linear(256, 4)).eval(), (ids,), {})
    lowered = OnnxRuntime().lower(program, None, [])
    lowered(ids)
    (saved,) = [path for path in lowered.save(tmp_path) if path.suffix == ".data"]
    with saved.open("rb") as file:
        copy = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        assert any(copy[:: 1 << 20])
        written = lowered._path.with_name(saved.name)
        assert max(resident_of(str(path)) for path in (written, saved)) < 4 << 20


def test_a_large_model_that_rests_holds_no_session_and_answers_as_before(monkeypatch):
    monkeypatch.setattr(session, "BESIDE", 64)
    monkeypatch.setattr(lowering, "BESIDE", 64)
    model, x = Shared().eval(), torch.randn(2, 5, 320)
    lowered = OnnxRuntime().lower(capture(model, (x,), {}), None, [])
    before, held = lowered(x)[0], len(session._open)
    lowered.rest()
    assert len(session._open) == held - 1
    assert torch.equal(lowered(x)[0], before)
    assert len(session._open) == held


class Masked(torch.nn.Module):
    """Attention under a mask of one row for all queries, as a padding mask is."""

    def forward(self, q, mask):
        heads = q.unflatten(-1, (2, -1)).transpose(1, 2)
        bias = torch.where(mask[:, None, None] > 0, 0.0, -1e9)
        return (
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, bias)
            .transpose(1, 2)
            .flatten(2)
        )


def test_an_example_of_length_one_hides_no_operator_that_fails_at_other_lengths():
    """ONNX Runtime's Attention takes no mask that broadcasts over the queries; at one query none does."""
    program = capture(Masked().eval(), (torch.randn(1, 1, 16), torch.ones(1, 1)), {})
    lowered = OnnxRuntime().lower(program, None, [])
    q, mask = torch.randn(2, 5, 16), torch.tensor([[1.0, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    assert relative(lowered(q, mask)[0], Masked()(q, mask)) < 1e-5


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.GELU(),
        torch.nn.Conv1d(4, 6, 3, padding=1),
        torch.nn.InstanceNorm1d(4),
        torch.nn.Sequential(torch.nn.AvgPool1d(2), torch.nn.GELU()),
        torch.nn.Upsample(scale_factor=2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_operators_without_a_kernel_in_a_model_of_float64(layer):
    """ONNX Runtime has them in float32 alone, and did not load such a model."""
    model, x = torch.nn.Sequential(layer, torch.nn.Flatten()).double().eval(), torch.randn(2, 4, 8).double()
    (found,) = OnnxRuntime().lower(capture(model, (x,), {}), None, [])(x)
    assert found.dtype == torch.float64
    assert relative(found, model(x).detach()) < 1e-6


class RootMeanSquare(torch.nn.Module):
    """An RMS norm as ONNX Runtime's fusion knows it."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x):
        return self.weight * (x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt())


@pytest.mark.parametrize("norm", [RootMeanSquare(), torch.nn.RMSNorm(8, eps=1e-3)], ids=["sqrt", "of torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_epsilon_of_an_rms_norm_is_its_own_in_every_dtype(norm, dtype):
    """ONNX Runtime's fusion took 1e-5 in float64: of values like these, a tenth of the result."""
    model, x = norm.to(dtype), 0.05 * torch.randn(2, 4, 8, dtype=dtype)
    (found,) = OnnxRuntime().lower(capture(model, (x,), {}), None, [])(x)
    assert relative(found, model(x).detach()) < 1e-6


@pytest.mark.parametrize("name", ["w4", "w8", "int8_dynamic"])
def test_quantised_weights_in_a_model_of_float64(name):
    """Their kernels take float32 alone."""
    torch.manual_seed(0)
    model = (
        torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 48)).eval().double()
    )
    x = torch.randn(3, 64).double()
    program = capture(model, (x,), {})
    tagged = program.tagged({site.site: form(name) for site in sites.linears(program)}, "quantize")
    lowered = OnnxRuntime().lower(tagged, None, [[x]])
    assert names(lowered.applied) == {site.site: name for site in sites.linears(program)}
    found = lowered(x)[0]
    assert found.dtype == torch.float64 and relative(found, model(x).detach()) < (
        0.2 if name.startswith("w4") else 0.03
    )


class Rotates(torch.nn.Module):
    """Rotary embeddings as complex numbers, as DeepSeek-V2 writes them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turns = torch.polar(torch.ones_like(x[..., 0]), x[..., 0]).unsqueeze(1)
        return torch.view_as_real(turns).flatten(1)


def test_a_model_that_onnx_cannot_say_is_refused_with_what_to_do() -> None:
    with pytest.raises(LoweringError, match=r"cannot translate Rotates: .*\. Leave the backend out, or name"):
        effcompile.optimize(Rotates().eval(), (torch.randn(3, 2),), backend="onnxruntime")
