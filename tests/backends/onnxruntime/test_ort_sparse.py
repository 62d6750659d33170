"""Block-sparse linears in ONNX Runtime: our operator equals the dense product, is found in the artifact, and
runs from disk.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from form_names import form, forms, names
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import effcompile
from effcompile.backends.onnxruntime import OnnxRuntime, custom_ops, custom_ops_library, kernels
from effcompile.backends.onnxruntime.custom_ops import DOMAIN, block_sparse_node, library_for
from effcompile.backends.onnxruntime.session import Settings, open_session, run
from effcompile.capture.inference import capture
from effcompile.core.errors import LoweringError
from effcompile.ir.formats import Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine import native
from effcompile.machine.target import KernelCall
from effcompile.passes.sparsify import Sparsify
from effcompile.report.reasons import words
from effcompile.runtime.artifact import run_artifact
from effcompile.sparse import BLOCKS, BlockPattern

UP, DOWN, GATE = "layers.0.up", "layers.0.down", "layers.0.gate"


@pytest.fixture(autouse=True)
def _compiler() -> None:
    try:
        custom_ops_library()
    except LoweringError as error:
        pytest.skip(str(error)) if "no C++ compiler" in str(error) else pytest.fail(str(error))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(48, 96), nn.Linear(96, 48, bias=False), nn.Linear(48, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)) * self.gate(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def sparse_model() -> nn.Module:
    """The first layer's linears in blocks of 16, 8 and 1; a block row of `up` is empty."""
    torch.manual_seed(0)
    model, generator = Model().eval(), torch.Generator().manual_seed(1)
    kept = BlockPattern.random(96, 48, 16, 0.5, generator).blocks()
    kept[2] = False
    masks = {
        UP: BlockPattern.from_blocks(kept, 16).mask(),
        DOWN: BlockPattern.random(48, 96, 8, 0.75, generator).mask(),
        GATE: BlockPattern.random(96, 48, 1, 0.75, generator).mask(),
    }
    with torch.no_grad():
        for site, mask in masks.items():
            model.get_parameter(f"{site}.weight").mul_(mask)
    return model


def program_of(model: nn.Module, *shape: int) -> Program:
    return capture(model, (torch.randn(*shape, 48, generator=torch.Generator().manual_seed(2)),))


def planned(program: Program) -> dict[str, Form]:
    """The sparse forms that the weights have as they are, in the blocks that fit them best."""
    return {
        site.site: Form(weights=[form for form in forms if not form.coded][-1].format)
        for site, forms in Sparsify()._forms(program)
    }


def lower(program: Program, tags: dict[str, Form]) -> Any:
    tagged = program.tagged(tags, "test")
    return OnnxRuntime().lower(tagged, None, [tagged.flat_inputs()])  # type: ignore[arg-type]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


# ------------------------------------------------------------------ the operator


def linear_model(
    pattern: BlockPattern, values: np.ndarray, bias: np.ndarray | None, rank: int, **attributes: int
) -> bytes:
    constants = {"values": values, "crow": pattern.crow.numpy(), "col": pattern.col.numpy()} | (
        {} if bias is None else {"bias": bias}
    )
    sizes = {"rows": pattern.rows, "cols": pattern.cols, "block": pattern.block} | attributes
    axes = [f"a{i}" for i in range(rank - 1)]
    graph = helper.make_graph(
        [block_sparse_node(["x", *constants], "y", **sizes)],
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*axes, "k"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*axes, pattern.rows])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_operator_equals_the_dense_product(data: st.DataObject) -> None:
    block = data.draw(st.sampled_from(BLOCKS))
    rows, cols = data.draw(st.integers(1, 5)) * block, data.draw(st.integers(1, 5)) * block
    kept = torch.tensor(data.draw(st.lists(st.booleans(), min_size=25, max_size=25))).view(5, 5)[
        : rows // block, : cols // block
    ]
    leading = data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=3))
    threads = data.draw(st.integers(1, 3))
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    pattern = BlockPattern.from_blocks(kept, block)
    values = random.standard_normal((pattern.nnz, block, block), dtype=np.float32)
    bias = random.standard_normal(rows, dtype=np.float32) if data.draw(st.booleans()) else None
    x = random.standard_normal((*leading, cols), dtype=np.float32)
    found = run(
        open_session(linear_model(pattern, values, bias, x.ndim), Settings(threads=threads)), {"x": x}
    )[0]
    wanted = x.astype(np.float64) @ pattern.to_dense(torch.from_numpy(values)).double().numpy().T + (
        0 if bias is None else bias
    )
    assert found.shape == wanted.shape
    assert np.linalg.norm(found - wanted) <= 3e-6 * np.linalg.norm(wanted)


def large(block: int = 16) -> tuple[BlockPattern, np.ndarray]:
    pattern = BlockPattern.random(320, 1024, block, 0.8, torch.Generator().manual_seed(0))
    return pattern, np.random.default_rng(0).standard_normal((pattern.nnz, block, block), dtype=np.float32)


def test_many_stripes_of_panels_by_calls_at_once() -> None:
    """More rows than one stripe of the workspace holds; a session may be called from several threads."""
    pattern, values = large()
    x = np.random.default_rng(1).standard_normal((3000, 1024), dtype=np.float32)
    session = open_session(linear_model(pattern, values, None, 2), Settings(threads=2))
    wanted = x @ pattern.to_dense(torch.from_numpy(values)).numpy().T
    found: dict[int, np.ndarray] = {}
    callers = [
        threading.Thread(target=lambda i=i: found.update({i: run(session, {"x": x[i:]})[0]}))
        for i in range(3)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for i in range(3):
        assert np.linalg.norm(found[i] - wanted[i:]) <= 3e-6 * np.linalg.norm(wanted)


def test_no_rows_give_no_rows() -> None:
    pattern, values = large()
    session = open_session(linear_model(pattern, values, None, 2))
    assert run(session, {"x": np.zeros((0, 1024), np.float32)})[0].shape == (0, 320)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"block": 3}, "has no blocks of 3"),
        ({"cols": 1000}, "has no blocks of 16"),
        ({"cols": 2048}, "x does not end in the weight's columns, 2048"),
        ({"rows": 160}, "do not fit a weight of 160 rows"),
        ({"col": 1}, "crow or col is out of range"),
        ({"crow": 1}, "crow or col is out of range"),
        ({"bias": np.zeros(7, np.float32)}, "bias is not one number for each row"),
    ],
)
def test_a_broken_model_is_refused_and_nothing_is_written(change: dict[str, Any], says: str) -> None:
    pattern, values = large()
    sizes = {name: change[name] for name in ("rows", "cols", "block") if name in change}
    pattern.col[0] += 64 * change.get("col", 0)
    pattern.crow[-1] += change.get("crow", 0)
    with pytest.raises(LoweringError, match=says):
        run(
            open_session(linear_model(pattern, values, change.get("bias"), 2, **sizes)),
            {"x": np.zeros((3, 1024), np.float32)},
        )


# ------------------------------------------------------------------ lowering


def test_planned_forms_are_found_and_equal_dense(sparse_model: nn.Module) -> None:
    program = program_of(sparse_model, 2, 5)
    tags = planned(program)
    assert {site: tags[site].name.partition("@")[0] for site in tags} == {
        UP: "sparse16",
        DOWN: "sparse8",
        GATE: "unstructured",
    }
    lowered = lower(program, tags)
    assert {site: lowered.applied[site] for site in tags} == tags
    assert lowered.applied["layers.1.up"] == lowered.applied["head"] == form("fp32")
    x = torch.randn(4, 7, 48)  # other leading sizes than the example's
    assert relative(lowered(x)[0], sparse_model(x)) < 1e-5
    assert lowered.peak_bytes([x]) is not None


def test_linears_on_matrices(sparse_model: nn.Module) -> None:
    """These are exported as Gemm."""
    program = program_of(sparse_model, 9)
    lowered = lower(program, planned(program))
    assert {site: lowered.applied[site] for site in (UP, DOWN, GATE)} == planned(program)
    x = torch.randn(3, 48)
    assert relative(lowered(x)[0], sparse_model(x)) < 1e-5


def test_beside_quantised_linears(sparse_model: nn.Module) -> None:
    program = program_of(sparse_model, 2, 5)
    tags = planned(program) | forms(
        {"layers.1.up": "int8_channel", "layers.1.down": "int8_static", "layers.1.gate": "w8"}
    )
    tags.pop(DOWN)
    lowered = lower(program, tags | {"layers.1.gate": form("fp32")})
    assert {site: lowered.applied[site] for site in (UP, GATE, DOWN, "layers.1.up", "layers.1.down")} == {
        **planned(program), DOWN: form("fp32"), "layers.1.up": form("int8_channel"),
        "layers.1.down": form("int8_static"),
    }  # fmt: skip
    x = program.flat_inputs()[0]
    assert 1e-5 < relative(lowered(x)[0], sparse_model(x)) < 0.05


def test_the_artifact_says_what_it_is_and_bare_onnxruntime_needs_one_line(
    sparse_model: nn.Module, tmp_path: Path
) -> None:
    program = program_of(sparse_model, 2, 5)
    lowered = lower(program, planned(program))
    (path,) = lowered.save(tmp_path)
    with pytest.raises(Exception, match=DOMAIN):
        onnxruntime.InferenceSession(str(path))
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(lowered.settings["register_custom_ops_library"])
    x = torch.randn(2, 5, 48)
    (name,) = (value.name for value in onnxruntime.InferenceSession(str(path), options).get_inputs())
    found = onnxruntime.InferenceSession(str(path), options).run(None, {name: x.numpy()})[0]
    assert relative(torch.from_numpy(found), sparse_model(x)) < 1e-5
    operators = [node for node in onnx.load(path).graph.node if node.domain == DOMAIN]
    assert sorted(len(node.input) for node in operators) == [4, 5, 5]  # the biases of two are added inside
    assert lowered.weight_bytes < 0.8 * program.weight_bytes()


def test_a_foreign_model_gets_our_library_only_for_our_domain(
    sparse_model: nn.Module, tmp_path: Path
) -> None:
    program = program_of(sparse_model, 2, 5)
    (sparse,) = lower(program, planned(program)).save(tmp_path / "sparse")
    (dense,) = lower(program, {}).save(tmp_path / "dense")
    assert (
        library_for(sparse) == library_for(sparse.read_bytes()) == custom_ops_library()
        and library_for(dense) is None
    )
    for cut in (0, 1, 100, sparse.stat().st_size - 3):  # of what is no model, ONNX Runtime says so
        broken = tmp_path / f"broken{cut}.onnx"
        broken.write_bytes(sparse.read_bytes()[:cut])
        with pytest.raises(LoweringError, match="cannot load"):
            open_session(broken)
    assert library_for(tmp_path / "none.onnx") is None


# ------------------------------------------------------------------ planned, saved and run again


@pytest.fixture
def cheap_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices by which sparse products pay, whatever else this machine is doing."""

    def measure(self: OnnxRuntime, call: KernelCall) -> float | None:
        return (
            1e-12 * call.flops
            if call.kernel == "linear/sparse"
            else 1e-3
            if kernels.measure(call) is not None
            else None
        )

    monkeypatch.setattr(OnnxRuntime, "measure", measure)


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
def test_optimize_serves_a_sparse_model_sparse_and_runs_it_from_disk(
    sparse_model: nn.Module, cheap_sparse: None, own_cache: Path, tmp_path: Path
) -> None:
    x = torch.randn(2, 5, 48)
    made = effcompile.optimize(sparse_model, inputs=(x,), backend="onnxruntime")
    decisions = {d.site: d.applied for d in made.plan.decisions if d.by == "sparsify"}
    assert decisions == names(planned(program_of(sparse_model, 2, 5)))
    assert relative(made(x), sparse_model(x)) < 1e-5
    folder = made.save(tmp_path / "out")
    for library in (own_cache / "native").glob("block_sparse_ort-*.so"):
        # as on another machine: it is compiled again
        library.unlink()
    written = Plan.load(folder / "plan.json")
    assert written.settings["register_custom_ops_library"].startswith(str(own_cache))
    written.with_changes(
        settings={**written.settings, "register_custom_ops_library": "/no/such/library.so"}
    ).save(folder / "plan.json")
    assert len(run_artifact(folder, ((x,), {})).outputs) == 1
    again = OnnxRuntime().open(folder, made.plan)
    (name,) = (line.partition(" ")[0] for line in made.plan.inputs)
    assert relative(again({name: x})[0], sparse_model(x)) < 1e-5


# ------------------------------------------------------------------ where it cannot be had


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def test_without_a_compiler_it_is_declined_with_the_reason(
    sparse_model: nn.Module, no_compiler: None
) -> None:
    made = effcompile.optimize(sparse_model, inputs=(torch.randn(2, 5, 48),), backend="onnxruntime")
    declined = {d.site: words(d.reason) for d in made.plan.declined if d.by == "sparsify"}
    assert set(declined) == {UP, DOWN, GATE}
    assert all(
        "onnxruntime has no linear/sparse kernel here: There is no C++ compiler: no-such-compiler" in r
        for r in declined.values()
    )
    assert "register_custom_ops_library" not in made.plan.settings


def test_an_artifact_on_a_machine_without_a_compiler_says_what_to_do(
    sparse_model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(sparse_model, 2, 5)
    (path,) = lower(program, planned(program)).save(tmp_path)
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        LoweringError,
        match=r"has block-sparse operators of effcompile\. There is no C\+\+ compiler.*Install one",
    ):
        open_session(path)


def test_a_runtime_that_is_too_old_is_refused() -> None:
    """`RegisterCustomOps` called as by a runtime that has API version 16 at most."""
    said: list[bytes] = []

    @ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p)
    def create_status(code: int, message: bytes) -> int:
        said.append(message)
        return 1

    table = (ctypes.c_void_p * 276)(ctypes.cast(create_status, ctypes.c_void_p))
    get_api = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_uint32)(
        lambda version: ctypes.addressof(table) if version <= 16 else 0
    )
    text = ctypes.create_string_buffer(b"1.16.3")
    version = ctypes.CFUNCTYPE(ctypes.c_size_t)(lambda: ctypes.addressof(text))
    base = (ctypes.c_void_p * 2)(ctypes.cast(get_api, ctypes.c_void_p), ctypes.cast(version, ctypes.c_void_p))
    register = ctypes.CDLL(str(custom_ops_library())).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, ctypes.byref(base)) == 1
    assert said == [b"effcompile's operators need ONNX Runtime 1.17 or later; this is 1.16.3"]


def test_a_library_that_computes_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # as if blocks of 16 came out wrong
    monkeypatch.setattr(custom_ops, "_close", lambda found, wanted: found.shape[1] != 48)
    custom_ops._objection.cache_clear()
    try:
        with pytest.raises(
            LoweringError, match=r"wrong results \(blocks of 16 with a bias, blocks of 16 without one\)"
        ):
            custom_ops_library()
    finally:
        custom_ops._objection.cache_clear()


def test_other_kernels_or_another_compiler_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.fingerprint()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.fingerprint() == "no compiler" != before
