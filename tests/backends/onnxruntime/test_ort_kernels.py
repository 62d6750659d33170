"""Every kernel that ONNX Runtime has can be timed; those it lacks are None."""

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
import pytest

from effcompile.backends.onnxruntime import OnnxRuntime, kernels
from effcompile.backends.torch import measure
from effcompile.machine.grid import grid
from effcompile.machine.target import KERNELS, KernelCall

DIMS = {call.kernel: call.dims for call in grid(quick=True)}
ABSENT = {
    "linear/bf16",
    "linear/2:4",
    "linear/sparse_int8",
    "linear/int8_token",
    "linear/int13_token",
    "linear/int8_groups",
    "linear/int4_groups",
    "linear/w8_channel",
    "embedding/int8_rows",
    "embedding/int8_row_groups",
    *(
        f"attention/{form}"
        for form in (
            "math",
            "sdpa_int8",
            "sdpa_bf16",
            "sdpa_int8_token",
            "sdpa_fp32",
            "causal_fp32",
            "tiled",
            "tiled_scores",
            "tiles",
            "flex",
        )
    ),
}
ABSENT |= {kernel for kernel in KERNELS if kernel.startswith(("predict/", "product/", "rows/"))}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(kernel):
    seconds = OnnxRuntime().measure(KernelCall(kernel, DIMS[kernel]))
    if kernel in ABSENT:
        assert seconds is None
    else:
        assert seconds is not None
        assert 0 < seconds < 1


def test_weight_only_needs_whole_groups():
    assert OnnxRuntime().measure(KernelCall("linear/w4", (4, 48, 32, 32))) is None


def test_large_weights_are_mapped_from_a_file_and_not_held_by_the_model(monkeypatch):
    seen = []

    def opened(path: Path, settings):
        seen.extend((path.stat().st_size, (path.parent / "weights").stat().st_size))
        return real(path, settings)

    real = kernels.open_session
    monkeypatch.setattr(kernels, "open_session", opened)
    assert OnnxRuntime().measure(KernelCall("linear/fp32", (32, 1024, 4096, 0))) > 0
    model, weights = seen
    assert model < 400 << 10
    assert weights >= 3 * 4 * 1024 * 4096  # copies that together exceed the caches


@pytest.mark.parametrize(
    ("kernel", "more"), [("fp32", ()), ("int8_channel", ()), ("w8", (32,)), ("w4", (32,))]
)
def test_no_two_weights_are_equal(kernel, more):
    """ONNX Runtime holds equal ones once: their time was that of reading a cache."""
    model, _, copies = kernels._BUILDERS[f"linear/{kernel}"]((1, 512, 512, *more))
    large = [tensor.raw_data for tensor in model.graph.initializer if len(tensor.raw_data) >= 1 << 16]
    assert copies > 1 and len(large) == len(set(large)) >= copies


@pytest.mark.parametrize("kernel", ["int8_dynamic", "int8_channel"])
def test_copies_run_what_one_alone_in_a_model_runs(kernel, tmp_path):
    """Of an input that all shared ONNX Runtime made codes once, and multiplied by other kernels: of two forms
    the slower one was the cheaper (DeBERTa within 0.031: 1.05 times the time of `int8_dynamic` alone).
    """

    def operators(rows):
        model, feeds, copies = kernels._BUILDERS[f"linear/{kernel}"]((rows, 512, 512, 0))
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / f"{rows}.onnx")
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        assert {each.name for each in session.get_inputs()} == feeds.keys()
        found = Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)
        return found, copies

    (alone, one), (together, several) = operators(256), operators(64)
    assert one == 1 < several and together == {name: count * several for name, count in alone.items()}


@pytest.mark.parametrize(("rows", "several"), [(255, True), (256, False)])
def test_products_of_many_rows_need_no_copies(rows, several):
    """They take far longer than reading a weight."""
    _, _, copies = kernels._BUILDERS["linear/fp32"]((rows, 128, 128))
    call = KernelCall("linear/fp32", (rows, 128, 128))
    assert (copies > 1) is several and (measure.copies(call) > 1) is several
