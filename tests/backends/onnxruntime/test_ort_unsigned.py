"""int8 weights are held unsigned where products of signed ones are cut at 16 bits, and mean the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from effcompile.backends.onnxruntime import backend, quantise
from effcompile.backends.onnxruntime.unsigned import SIGNED, products_saturate
from effcompile.core.errors import LoweringError
from effcompile.ir.formats import WeightFormat

ROWS, K, N = 8, 96, 40


def product(weight: np.ndarray) -> onnx.ModelProto:
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [ROWS, size])
        for name, size in (("x", K), ("y", N))
    )
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="p")],
        "g",
        [x],
        [y],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("held", SIGNED, ids=lambda held: held.name)
def test_the_largest_sums_are_right_and_the_format_is_the_same(
    held: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations near the top of their range by weights of full magnitude: cut at 16 bits, these would be
    off by a third.
    """
    monkeypatch.setattr(quantise, "products_saturate", lambda: True)
    rng = np.random.default_rng(0)
    x = rng.uniform(0.8, 1.0, (ROWS, K)).astype(np.float32)
    weight = (rng.choice([-1.0, 1.0, 1.0], (K, N)) * rng.uniform(0.9, 1.0, (K, N))).astype(np.float32)
    made = quantise.quantise(product(weight), {"p": held}, {"p": (0.0, 1.0)})
    assert TensorProto.INT8 not in {tensor.data_type for tensor in made.graph.initializer}
    assert quantise.found_formats(made, ["p"])["p"].weights == held
    (y,) = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )
    assert np.linalg.norm(y - x @ weight) <= 0.01 * np.linalg.norm(x @ weight)


def test_this_machines_products_are_right_as_they_are_held_here() -> None:
    rng = np.random.default_rng(1)
    x, weight = (
        rng.uniform(0.8, 1.0, (ROWS, K)).astype(np.float32),
        rng.uniform(0.9, 1.0, (K, N)).astype(np.float32),
    )
    made = quantise.quantise(product(weight), {"p": SIGNED[1]}, {})
    (y,) = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )
    assert np.linalg.norm(y - x @ weight) <= 0.01 * np.linalg.norm(x @ weight)
    kinds = {tensor.data_type for tensor in made.graph.initializer}
    assert (TensorProto.INT8 in kinds) != products_saturate()


def test_an_artifact_of_another_machine_is_refused_where_it_would_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save_model(product(np.ones((K, N), np.float32)), str(path))
    monkeypatch.setattr(backend, "products_saturate", lambda: True)
    with pytest.raises(LoweringError, match="Run `effcompile optimize` on this machine"):
        backend.load(path, {"int8_weights": "signed"})
    assert backend.load(path, {"int8_weights": "unsigned"})({"x": np.ones((ROWS, K), np.float32)})[
        0
    ].shape == (ROWS, N)
