"""A model with fewer neurons and heads on the backends that fuse and convert: planned, lowered, found and
verified end to end.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_structured_pruning import HEADS, NEURONS, Model

import effcompile
from effcompile.backends import load_backend
from effcompile.machine.target import KernelCall


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch-inductor", "openvino"])
def test_a_smaller_model_is_planned_lowered_and_verified(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = load_backend(name)
    if (reason := backend.unavailable()) is not None:
        pytest.skip(str(reason))
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    by_flops = lambda self, call: (  # noqa: E731
        1e-11 * call.flops if call.kernel.startswith("linear/fp32") else _other(call)
    )
    # this machine's times of layers so small are noise
    monkeypatch.setattr(type(backend), "measure", by_flops)
    torch.manual_seed(0)
    model = Model().eval()
    with torch.no_grad():  # half of the neurons and one of the two groups of heads hardly count
        model.layers[0].down.weight[:, 32:] *= 1e-2
        model.layers[0].attention.out.weight[:, 16:] *= 1e-2
    x = torch.randn(3, 5, 32)
    asked = ["shrink.neurons=0.5", "shrink.heads=0.5", "no-quantize"]
    made = effcompile.optimize(model, inputs=(x,), backend=name, max_error=0.1, passes=asked)
    decisions = {d.site: d for d in made.plan.decisions}
    for site in (NEURONS, HEADS):
        assert decisions[site].option.partition(" ")[0] == "-50%"
    with torch.no_grad():
        wanted = model(x)
    assert 1e-6 < float((made(x) - wanted).norm() / wanted.norm()) < 0.1
    # rows, columns and biases that are gone
    neurons, heads = 32 * (3 * 32 + 2), 16 * (32 + 1) + 16 * 32 + 16 * 32
    assert made.plan.measured.weight_bytes < sum(p.nbytes for p in model.parameters()) - 0.95 * 4 * (
        neurons + heads
    )


def _other(call: KernelCall) -> float | None:
    return None if call.kernel.startswith("linear/") else 1e-6
