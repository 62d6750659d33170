"""OpenVINO: planned linears in int8, the rest untouched; skipped where the extra is not installed."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from form_names import form, forms
from torch import fx, nn

from effcompile.backends.base import Backend, Lowered
from effcompile.backends.openvino import OpenVino, load, measure
from effcompile.backends.openvino.model import convert
from effcompile.capture import capture
from effcompile.core.errors import FormatError, InputsError, LoweringError
from effcompile.core.goal import Goal
from effcompile.ir.program import Program
from effcompile.machine.calibration import BackendPoints, measured
from effcompile.machine.target import KernelCall
from effcompile.sites.parts import attentions, embeddings, linears

installed = pytest.mark.skipif(
    OpenVino().unavailable() is not None, reason="openvino or nncf is not installed"
)


def lower(program: Program, tags: dict[str, str]) -> Lowered:
    return OpenVino().lower(
        program.tagged(forms(tags), "test"), None, [[program.args[0]], [program.args[0].flip(0)]]
    )


def error(model: nn.Module, lowered: Lowered, ids: torch.Tensor) -> float:
    with torch.no_grad():
        reference = model(ids)
    return float((lowered(ids)[0] - reference).norm() / reference.norm())


def test_meets_the_contract_and_names_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(OpenVino(), Backend)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'effcompile[openvino]'" in str(OpenVino().unavailable())
    assert OpenVino().measure(KernelCall("linear/fp32", (4, 8, 8))) is None


def test_refuses_bf16_beside_fp32(program: Program) -> None:
    first, *rest = [site.site for site in linears(program)]
    assert OpenVino().refuses(program.tagged(dict.fromkeys(rest, form("bf16")), "test"), Goal())
    assert (
        OpenVino().refuses(program.tagged(dict.fromkeys([first, *rest], form("bf16")), "test"), Goal())
        is None
    )
    with pytest.raises(LoweringError, match="bf16"):
        lower(program, dict.fromkeys(rest, "bf16"))


@installed
def test_no_stack_is_kept_of_nodes_while_openvino_traces_again(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads them, and they were a quarter of a conversion."""
    import openvino

    kept = list[bool]()
    plain = openvino.convert_model

    def converting(*args: object) -> object:
        kept.append(not fx.config.do_not_emit_stack_traces)
        return plain(*args)

    monkeypatch.setattr(openvino, "convert_model", converting)
    convert(program)
    assert kept == [False]


@installed
@pytest.mark.parametrize(("option", "limit"), [("fp32", 1e-5), ("bf16", 2e-2), ("int8_static", 0.15)])
def test_options_run_at_any_shape_and_are_read_back(
    model: nn.Module, program: Program, option: str, limit: float
) -> None:
    tags = {site.site: option for site in linears(program)}
    lowered = lower(program, tags)
    assert {site: lowered.applied[site] for site in tags} == forms(tags)
    for ids in (program.args[0], program.args[0][:1, :5]):  # int8: other tokens in sight than in calibration
        assert error(model, lowered, ids) <= limit


@installed
def test_exactly_the_planned_linears_are_int8(program: Program) -> None:
    tags = {site.site: ("int8_static", "fp32")[i % 2] for i, site in enumerate(linears(program))}
    tags |= {site.site: "int8_rows" for site in embeddings(program)}
    lowered = lower(program, tags)
    assert {site: lowered.applied[site] for site in tags} == forms(tags)


@installed
def test_nothing_is_printed(program: Program) -> None:
    """In a process of its own, as nncf's log handler keeps the stdout of its first import."""
    script = """
import torch
from torch import fx, nn
from effcompile.backends.openvino import OpenVino
from effcompile.capture import capture
from effcompile.ir.formats import INT8_STATIC, Form
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
x = torch.randn(4, 16)
program = capture(model, (x,)).tagged(dict.fromkeys("02", Form(weights=INT8_STATIC)), "test")
lowered = OpenVino().lower(program, None, [[x]])
assert lowered.applied["0"] == lowered.applied["2"] == Form(weights=INT8_STATIC)
assert lowered.peak_bytes([x]) > lowered.weight_bytes
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "nncf" not in done.stderr.lower()


@installed
def test_threads_that_call_at_once_are_given_their_own_results() -> None:
    """A request holds the results of its last call, which was another thread's."""
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)).eval()
    x = torch.randn(64, 64)
    lowered = OpenVino().lower(capture(model, (x,), {}), None, [[x]])
    given = [x * (at + 1) for at in range(3)]
    right = [lowered(each)[0] for each in given]
    with ThreadPoolExecutor(3) as pool:
        asked = [*range(3)] * 40
        found = list(pool.map(lambda at: torch.equal(lowered(given[at])[0], right[at]), asked))
    assert all(found)


@installed
def test_peak_grows_with_the_input(program: Program) -> None:
    lowered = lower(program, {})
    long = lowered.peak_bytes([program.args[0].repeat(8, 32)])
    short = lowered.peak_bytes([program.args[0]])
    assert long is not None
    assert short is not None
    assert lowered.weight_bytes < short < long


@installed
def test_attention_is_int8_only_where_planned(model: nn.Module, program: Program) -> None:
    site = attentions(program)[0].site
    linear_tags = {s.site: "int8_static" for s in linears(program)}
    plain, planned = lower(program, linear_tags), lower(program, {**linear_tags, site: "sdpa_int8"})
    assert plain.applied[site] == form("sdpa")
    assert planned.applied[site] == form("sdpa_int8")
    assert {s: planned.applied[s] for s in linear_tags} == forms(linear_tags)
    ids = program.args[0]
    assert not torch.equal(plain(ids)[0], planned(ids)[0])
    assert error(model, planned, ids) <= 0.15


@installed
def test_artifact_comes_back_with_the_same_numbers(program: Program, tmp_path: Path) -> None:
    lowered = lower(program, {site.site: "int8_static" for site in linears(program)})
    path, data = lowered.save(tmp_path)
    assert data.name == "model.bin"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.bin", "model.xml"]
    assert torch.equal(load(path)(program.args[0])[0], lowered(program.args[0])[0])
    path.write_text("not a model")
    with pytest.raises(FormatError):
        load(path)


@installed
def test_a_file_that_says_it_has_a_flag_and_has_none_is_told(program: Program, tmp_path: Path) -> None:
    lower(program, {}).save(tmp_path)
    file = tmp_path / "model.xml"
    before, _, after = file.read_text().rpartition("<rt_info>")
    flag = '<effcompile><indices_in_range value="the last output"/></effcompile>'
    file.write_text(f"{before}<rt_info>{flag}{after}")
    with pytest.raises(LoweringError, match="the file was changed"):
        load(file)(*program.flat_inputs())


@installed
def test_measures_what_it_has() -> None:
    assert (OpenVino().measure(KernelCall("linear/int8_static", (8, 32, 32))) or 0) > 0
    assert (OpenVino().measure(KernelCall("attention/sdpa_int8", (1, 2, 8, 8, 16))) or 0) > 0
    assert OpenVino().measure(KernelCall("linear/int8_token", (8, 32, 32))) is None


@pytest.mark.parametrize("kernel", sorted(measure.WITHOUT))
def test_what_costs_nothing_beside_a_linear_is_a_kernel_all_the_same(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise may make the linear alone the slower one; a price of nothing would be taken for no kernel."""
    seconds = iter((1e-4, 2e-4))
    monkeypatch.setattr(measure, "_seconds", lambda *_: next(seconds))
    points = BackendPoints()
    assert (measured(points, measure.measure, KernelCall(kernel, (1, 2, 8, 8, 16))) or 0) > 0


def test_few_rows_are_no_range_to_smooth_by() -> None:
    lacks = OpenVino().lacks
    assert "1 rows" in str(lacks(KernelCall("linear/int8_static", (1, 32, 32))))
    assert lacks(KernelCall("linear/int8_static", (16, 32, 32))) is None
    assert lacks(KernelCall("linear/fp32", (1, 32, 32))) is None


@installed
def test_nan_is_refused_and_infinity_is_not() -> None:
    model, x = nn.Sequential(nn.ReLU()), torch.randn(2, 8)
    lowered = OpenVino().lower(capture(model, (x,), {}), None, [[x]])
    x[1, 3] = float("-inf")
    assert torch.equal(lowered(x)[0], x.relu())
    x[0, 2] = float("nan")
    with pytest.raises(InputsError, match=r"NaN.*another backend"):
        lowered(x)


class Decoder(nn.Module):
    """Two causal attentions with padding, before a text as well."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1])
        sees = (at[:, None] >= at) & mask.bool()[:, None, None, :]
        for _ in range(2):
            x = x + nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], sees)[:, 0]
        return x


@installed
def test_what_sees_nothing_is_no_nan_in_the_next_layer() -> None:
    x, mask = torch.randn(2, 9, 16), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    lowered = OpenVino().lower(capture(Decoder(), (x, mask)), None, [])
    torch.testing.assert_close(lowered(x, mask)[0], Decoder()(x, mask))
