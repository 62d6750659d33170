"""What an operator does with memory is remembered by the layouts of its arguments, and told alike the second
time.
"""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from effcompile.estimate import layouts
from effcompile.estimate.storages import Storages, graph_storages

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "REMEMBERED", {})
    monkeypatch.setattr("effcompile.estimate.storages.REMEMBERED", layouts.REMEMBERED)


def traced(build: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node], *given: Tensor) -> Storages:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output(build(graph, a, b))
    values = iter(given)
    return graph_storages(graph, lambda _: next(values))


def told(found: Storages) -> list[tuple[object, ...]]:
    """By node, as node's of two graphs are never equal."""
    nodes: list[tuple[object, ...]] = [
        (n.name, found.of[n], found.made[n], found.workspace[n], n in found.written) for n in found.of
    ]
    return [*nodes, (dict(found.nbytes), found.fixed)]


def block(graph: fx.Graph, x: fx.Node, w: fx.Node) -> fx.Node:
    """A product, views of it, a copy that is none, several results, a write in place, and a result of another
    type on the same storage.
    """
    y = graph.call_function(aten.mm.default, (x, w))
    t = graph.call_function(aten.t.default, (y,))
    same = graph.call_function(aten.reshape.default, (y, [-1]))
    copied = graph.call_function(aten.reshape.default, (t, [-1]))
    halves = graph.call_function(aten.split.Tensor, (y, 2))
    first = graph.call_function(operator.getitem, (halves, 0))
    norm = graph.call_function(aten.native_layer_norm.default, (y, [4], None, None, 1e-5))
    mean = graph.call_function(operator.getitem, (norm, 1))
    graph.call_function(aten.add_.Tensor, (y, 1.0))
    bits = graph.call_function(aten.view.dtype, (first, torch.int32))
    total = graph.call_function(aten.add.Tensor, (same, copied))
    flat = [graph.call_function(aten.reshape.default, (part, [-1])) for part in (total, mean, bits)]
    return graph.call_function(aten.cat.default, (flat,))


def twice(graph: fx.Graph, x: fx.Node, w: fx.Node) -> fx.Node:
    block(graph, x, w)
    return block(graph, x, w)


def test_a_second_run_tells_the_same_without_running_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    first = told(traced(twice, x, w))
    monkeypatch.setattr("effcompile.estimate.storages.Allocations", None)
    assert told(traced(twice, x, w)) == first


def test_storages_are_those_of_a_real_run() -> None:
    """The second block is looked up: who shares a storage there is seen on real tensors."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output(twice(graph, a, b))
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    values = iter((x, w))
    found = graph_storages(graph, lambda _: next(values))
    real: dict[fx.Node, object] = {}

    class Kept(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            real[n] = super().run_node(n)
            return real[n]

    Kept(fx.GraphModule({}, graph), garbage_collect_values=False).run(x.clone(), w)
    tensors = {n: v for n, v in real.items() if isinstance(v, Tensor)}
    for one, value in tensors.items():
        for other, its in tensors.items():
            shared = value.untyped_storage().data_ptr() == its.untyped_storage().data_ptr()
            assert shared == bool(set(found.of[one]) & set(found.of[other])), (one, other)
        assert found.nbytes[found.of[one][0]] == value.untyped_storage().nbytes(), one


def test_other_settings_and_other_constants_are_other_keys() -> None:
    x = torch.randn(4, 4)

    def summed(value: object) -> Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]:
        return lambda graph, a, b: graph.call_function(aten.sum.dim_IntList, (a, [0], value))

    assert told(traced(summed(True), x, x))[2][1:3] == told(traced(summed(1), x, x))[2][1:3]
    known = len(layouts.REMEMBERED)
    traced(summed(False), x, x)
    with torch.autocast("cpu", torch.bfloat16):
        traced(summed(False), x, x)
    assert (known, len(layouts.REMEMBERED)) == (2, 4)


def test_a_layout_changed_in_place_is_followed() -> None:
    """What reads the tensor afterwards sees it as it is then, on both runs."""

    def turned(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
        y = graph.call_function(aten.add.Tensor, (a, 1.0))
        graph.call_function(aten.transpose_.default, (y, 0, 1))
        return graph.call_function(aten.mm.default, (y, b))

    for _ in range(2):
        found = traced(turned, torch.randn(3, 4), torch.randn(3, 5))
        assert found.nbytes[max(found.nbytes)] == 4 * 5 * 4


def test_what_depends_on_data_is_not_remembered() -> None:
    """Its size is what capture saw, of each node its own."""
    for rows in (2, 3):
        graph = fx.Graph()
        a = graph.placeholder("a")
        found = graph.call_function(aten.nonzero.default, (a,))
        found.meta["val"] = torch.empty(rows, 1, dtype=torch.int64)
        graph.output(found)
        told_of = graph_storages(graph, lambda _: torch.zeros(4))
        assert told_of.nbytes[told_of.of[found][0]] == rows * 8
