"""The written function of a graph: right values, and nothing alive after its last reader."""

import gc
import math
import operator
import weakref
from typing import Any

import pytest
import torch
from torch import fx

from effcompile.backends.torch.boxed import boxed, run_graph

aten = torch.ops.aten


class Watch:
    """Which of the watched tensors are alive each time that `note` runs."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []
        self.watched: dict[str, weakref.ref[torch.Tensor]] = {}

    def make(self, name: str, value: torch.Tensor) -> torch.Tensor:
        made = value + 1
        self.watched[name] = weakref.ref(made)
        return made

    def note(self, value: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(name for name, ref in self.watched.items() if ref() is not None))
        return value.sum()


def test_values_die_after_their_last_reader() -> None:
    watch, graph = Watch(), fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(watch.make, ("a", x))
    b = graph.call_function(watch.make, ("b", a))
    first = graph.call_function(watch.note, (b,))
    c = graph.call_function(watch.make, ("c", b))
    second = graph.call_function(watch.note, (c,))
    third = graph.call_function(watch.note, (first,))
    graph.output((first, second, third))
    given = [torch.zeros(3)]
    values = boxed(graph)(given)
    assert [float(v) for v in values] == [6.0, 9.0, 6.0] and given == []
    assert watch.seen == [("b",), ("c",), ()]


def test_arguments_die_when_read_last_and_unread_ones_at_once() -> None:
    watch, graph = Watch(), fx.Graph()
    x, _unread = graph.placeholder("x"), graph.placeholder("unread")
    first = graph.call_function(watch.note, (x,))
    second = graph.call_function(watch.note, (first,))
    graph.output((second,))
    given = [torch.zeros(3), torch.zeros(3)]
    watch.watched = {"x": weakref.ref(given[0]), "unread": weakref.ref(given[1])}
    boxed(graph)(given)
    assert watch.seen == [("x",), ()]


def test_an_unread_result_dies_at_once_and_a_returned_one_lives() -> None:
    watch, graph = Watch(), fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(watch.make, ("unread", x))
    kept = graph.call_function(watch.make, ("kept", x))
    end = graph.call_function(watch.note, (x,))
    graph.output((kept, end))
    kept_value, _ = boxed(graph)([torch.zeros(2)])
    assert watch.seen == [("kept",)] and watch.watched["kept"]() is kept_value


def test_a_run_that_fails_keeps_nothing() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.mm.default, (x, x)),))
    given = [torch.zeros(2, 3)]
    alive = weakref.ref(given[0])
    with pytest.raises(RuntimeError):
        boxed(graph)(given)
    gc.collect()
    assert given == [] and alive() is None


def returns(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return args, kwargs


ARGUMENTS = [
    (1, -2, 2**70, True, None, 'it\'s "quoted"\n', 0.1, -0.0, 1e-320),
    (math.inf, -math.inf),
    (torch.float32, torch.device("cpu"), torch.strided, torch.contiguous_format),
    ([1, [2, (3,)]], (), [], {"a": [1, (2,)], "b": {}}),
    (slice(None), slice(1, None, 2), slice(-1, None), (slice(0, 3), ..., None)),
    (complex(1, math.inf), b"bytes", range(3)),
]


@pytest.mark.parametrize("args", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_arguments_arrive_as_they_are(args: tuple[Any, ...]) -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(returns, args, {"key": args}),))
    ((found, named),) = boxed(graph)([])
    assert found == args and named == {"key": args}
    assert [type(a) for a in found] == [type(a) for a in args]
    assert [math.copysign(1, a) for a in found if isinstance(a, float)] == [
        math.copysign(1, a) for a in args if isinstance(a, float)
    ]


def test_nan_arrives_as_nan() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(returns, (math.nan,)),))
    ((((found,), _),)) = boxed(graph)([])
    assert math.isnan(found)


def test_nodes_inside_nested_arguments_and_keywords() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    both = graph.call_function(aten.cat.default, ([x, y],), {"dim": 0})
    picked = graph.call_function(operator.getitem, (both, (slice(None, None, 2), 0)))
    named = graph.call_function(returns, (), {"inner": {"x": [x, (y,)]}, "at": slice(picked, None)})
    graph.output((both, None, picked, named))
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    found, nothing, rows, (_, kwargs) = boxed(graph)([a, b])
    assert torch.equal(found, torch.cat([a, b])) and nothing is None and torch.equal(rows, found[::2, 0])
    assert kwargs["inner"]["x"][0] is a and kwargs["inner"]["x"][1][0] is b and kwargs["at"].start is rows


def test_awkward_keyword_names() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(
        (
            graph.call_function(aten.random.default, (x,), {"generator": None}),
            graph.call_function(returns, (), {"from": 1}),
        )
    )
    assert boxed(graph)([torch.ones(2)])[1] == ((), {"from": 1})


def test_no_outputs_no_inputs_and_one_output() -> None:
    empty = fx.Graph()
    empty.output(())
    assert boxed(empty)([]) == ()
    alone = fx.Graph()
    alone.output((alone.placeholder("x"),))
    value = torch.ones(1)
    assert boxed(alone)([value])[0] is value


def test_the_wrong_number_of_values_is_told() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    with pytest.raises(ValueError, match="not enough values"):
        boxed(graph)([])


def test_run_graph_leaves_the_given_list_and_makes_no_gradients() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.exp.default, (x,)),))
    given = [torch.ones(2, requires_grad=True)]
    (found,) = run_graph(graph, given)
    assert len(given) == 1 and not found.requires_grad and torch.equal(found, given[0].detach().exp())
