"""A linear in fp32 runs as measured to be faster: on a packed weight, or as torch runs it; and is priced as
it runs.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from effcompile.backends.torch import TorchEager, measure, measure_linears, packing
from effcompile.backends.torch import edit as torch_edit
from effcompile.backends.torch.lowered import load
from effcompile.capture import capture
from effcompile.core import torch_compat
from effcompile.machine.target import KernelCall

pytestmark = pytest.mark.skipif(not torch_compat.has_onednn(), reason="nothing is packed")
PACKED = "mkldnn._linear_pointwise.default"


OURS = "effcompile.fp32_linear.default"


@pytest.fixture(autouse=True)
def forgotten() -> None:
    packing._fastest.cache_clear()


@pytest.mark.parametrize(("way", "product"), [("none", ""), ("oneDNN", PACKED), ("ours", OURS)])
def test_the_graph_has_the_product_that_was_faster(
    way: str, product: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch_edit, "packing", lambda *dims, ours: asked.append(dims) or way)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 8)).eval(), torch.randn(6, 24)
    lowered = TorchEager().lower(capture(model, (x,), {}), None, [])
    assert asked == [(6, 24, 40), (6, 40, 8)]
    targets = [str(node.target) for node in lowered.run.graph.nodes]
    assert [target for target in targets if target in (PACKED, OURS)] == [product] * (2 * bool(product))
    assert ("aten.relu.default" in targets) == (way != "ours"), "it follows in the kernel"
    assert {site: form.name for site, form in lowered.applied.items() if ":" not in site} == dict.fromkeys(
        ("0", "2"), "fp32"
    )
    torch.testing.assert_close(lowered(x)[0], model(x))
    for keeps in (False, True):  # what is kept is a share of the weights' bytes, packed ones have no storage
        (saved,) = replace(lowered, keeps=keeps).save(tmp_path / str(keeps))
        assert torch.equal(load(saved)(x), lowered(x)[0])


def test_ours_is_not_asked_for_where_inductor_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch_edit, "packing", lambda *dims, ours: asked.append(ours) or "none")
    torch_edit.edit(capture(nn.Linear(24, 40).eval(), (torch.randn(20, 24),), {}), [], compiled=True)
    assert asked == [False]


@pytest.mark.parametrize("way", ["none", "oneDNN", "ours"])
def test_it_is_timed_as_it_runs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_linears, "packing", lambda m, k, n, ours: way)
    ran: list[str] = []
    product = packing.product
    monkeypatch.setattr(
        measure_linears, "product", lambda way, *given: ran.append(way) or product(way, *given)
    )
    rows = 256 if way == "ours" else 16  # fewer are timed on a tape, several at once
    assert measure.measure(KernelCall("linear/fp32", (rows, 24, 40)), "eager", device="cpu") is not None
    assert set(ran) == {way} - {"none"}


def test_the_faster_one_is_found_and_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By times in turn, plain, by oneDNN, ours: begin and end of each."""

    def round_of(*seconds: float) -> list[float]:
        return [tick for each in seconds for tick in (0.0, each)]

    far, *close = (
        round_of(*each) * packing._ROUNDS
        for each in ((2.0, 1.0, 3.0), (2.0, 1.92, 3.0), (2.0, 1.91, 1.99), (1.0, 1.9, 1.01))
    )
    ticks = iter([*far, *(tick for each in close for tick in each * 3)])
    monkeypatch.setattr(packing, "perf_counter", lambda: next(ticks))
    assert packing.packing(16, 24, 40, ours=True) == "oneDNN"
    assert packing.packing(9, 24, 40, ours=True) == "oneDNN", "of the same class of rows"
    assert packing.packing(16, 24, 48, ours=True) == "none", "a copy costs its bytes"
    assert packing.packing(16, 24, 56, ours=True) == "ours", "no call of torch is around it"
    assert packing.packing(16, 24, 64, ours=True) == "none"
    assert next(ticks, None) is None


def test_few_rows_are_never_packed_and_large_weights_are_judged_by_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[tuple[object, ...]] = []
    monkeypatch.setattr(packing, "_fastest", lambda *dims: judged.append(dims) or "oneDNN")
    threads = torch.get_num_threads()
    assert packing.packing(packing.ROWS - 1, 8, 8, ours=True) == "none"
    packing.packing(packing.ROWS, 8, 8, ours=True)
    packing.packing(100_000, 1024, 50_257, ours=True)
    packing.packing(100_000, 1024, 50_257, ours=False)
    assert judged == [
        (packing.ROWS, 8, 8, threads, ("oneDNN",)),
        (1024, 1024, 2048, threads, ("oneDNN", "ours")),
        (1024, 1024, 2048, threads, ("oneDNN",)),
    ]
