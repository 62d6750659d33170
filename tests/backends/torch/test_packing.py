"""A linear in fp32 runs as measured to be faster: on a packed weight, or as torch runs it; and is priced as
it runs.
"""

import pytest
import torch
from torch import nn

from effcompile.backends.torch import TorchEager, measure, measure_linears, packing
from effcompile.backends.torch import edit as torch_edit
from effcompile.capture import capture
from effcompile.core import torch_compat
from effcompile.machine.target import KernelCall

pytestmark = pytest.mark.skipif(not torch_compat.has_onednn(), reason="nothing is packed")
PACKED = "mkldnn._linear_pointwise.default"


@pytest.fixture(autouse=True)
def forgotten() -> None:
    packing._packed_is_faster.cache_clear()


@pytest.mark.parametrize("faster", [False, True])
def test_the_graph_has_the_product_that_was_faster(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch_edit, "packs", lambda *dims: asked.append(dims) or faster)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 8)).eval(), torch.randn(6, 24)
    lowered = TorchEager().lower(capture(model, (x,), {}), None, [])
    assert asked == [(6, 24, 40), (6, 40, 8)]
    assert sum(str(node.target) == PACKED for node in lowered.run.graph.nodes) == 2 * faster
    torch.testing.assert_close(lowered(x)[0], model(x))


@pytest.mark.parametrize("faster", [False, True])
def test_it_is_timed_as_it_runs(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_linears, "packs", lambda m, k, n: faster)
    ran: list[str] = []
    product = torch.ops.mkldnn._linear_pointwise.default
    monkeypatch.setattr(
        torch.ops.mkldnn._linear_pointwise, "default", lambda *given: ran.append("packed") or product(*given)
    )
    assert measure.measure(KernelCall("linear/fp32", (16, 24, 40)), "eager", device="cpu") is not None
    assert bool(ran) is faster


def test_the_faster_one_is_found_and_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # packed, plain; then the other way round
    ticks = iter([0.0, 1.0, 1.0, 3.0] * packing._ROUNDS + [0.0, 2.0, 2.0, 3.0] * packing._ROUNDS)
    monkeypatch.setattr(packing, "perf_counter", lambda: next(ticks))
    assert packing.packs(16, 24, 40)
    assert packing.packs(9, 24, 40)  # of the same class of rows
    assert not packing.packs(16, 24, 48)
    assert next(ticks, None) is None


def test_few_rows_are_never_packed_and_large_weights_are_judged_by_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[tuple[int, ...]] = []
    monkeypatch.setattr(packing, "_packed_is_faster", lambda *dims: judged.append(dims) or True)
    assert not packing.packs(packing.ROWS - 1, 8, 8)
    assert packing.packs(100_000, 1024, 50_257)
    assert judged == [(1024, 1024, 2048, torch.get_num_threads())]
