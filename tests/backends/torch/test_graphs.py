"""When calls are replayed as a CUDA graph, and that a replay is a call: with torch's graph played by hand,
for there is no GPU here.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from effcompile.backends.torch import graphs, on_gpu
from effcompile.backends.torch.kept import keep, keeping
from effcompile.core.goal import Goal

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFCOMPILE_CUDA_GRAPHS", "1")


def graph(*targets: Any) -> fx.Graph:
    made = fx.Graph()
    x = made.placeholder("x")
    for target in targets:
        x = made.call_function(target, (x,))
    made.output(x)
    return made


def test_declined_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = graph(aten.relu.default)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert graphs.declines(plain) == "there is no CUDA here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert graphs.declines(plain) is None
    assert "waits for the GPU" in (graphs.declines(graph(aten._local_scalar_dense.default)) or "")
    assert "waits for the GPU" in (graphs.declines(graph(aten.nonzero.default)) or "")
    assert "random" in (graphs.declines(graph(aten.bernoulli.default)) or "")
    monkeypatch.delenv("EFFCOMPILE_CUDA_GRAPHS")
    assert "EFFCOMPILE_CUDA_GRAPHS=1" in (graphs.declines(plain) or "")


@pytest.mark.parametrize(
    ("index", "declined"), [(torch.arange(2), False), (torch.tensor([True, False]), True)]
)
def test_reading_at_places_is_no_wait_and_under_a_mask_it_is(
    index: torch.Tensor, declined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = fx.Graph()
    x, i = made.placeholder("x"), made.placeholder("i")
    i.meta["val"] = index
    made.output(made.call_function(aten.index.Tensor, (x, [None, i])))
    assert (graphs.declines(made) is not None) is declined


class Tape:
    """A CUDA graph by hand: what was recorded is a function of the same input tensors, run into the same
    outputs.
    """

    def __init__(self) -> None:
        self.replays = 0
        self.again: Any = None

    def replay(self) -> None:
        self.replays += 1
        self.again()


class Model:
    """Doubles its input, in new memory at each call but in the recorded one's when replayed."""

    def __init__(self) -> None:
        self.calls = 0
        self.tape: Tape | None = None

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.calls += 1
        out = 2 * x
        if self.tape is not None and self.tape.again is None:
            self.tape.again = lambda: out.copy_(2 * x)
        return [out]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = Model()

    class Stream:
        def wait_stream(self, other: Any) -> None: ...
        def wait_event(self, other: Any) -> None:
            assert isinstance(other, Event) and other.recorded

    class Event:
        recorded = False

        def record(self) -> None:
            self.recorded = True

    @contextlib.contextmanager
    def recording(tape: Tape, pool: Any, capture_error_mode: str) -> Iterator[None]:
        model.tape = tape
        yield
        model.tape = None

    by_hand = {
        "Stream": Stream, "Event": Event, "current_stream": Stream,
        "stream": lambda _: contextlib.nullcontext(), "CUDAGraph": Tape, "graph": recording,
        "graph_pool_handle": lambda: None, "memory_reserved": lambda: 0, "synchronize": lambda: None,
        "empty_cache": lambda: None, "is_current_stream_capturing": lambda: False,
    }  # fmt: skip
    for name, value in by_hand.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return model


def test_a_replay_is_a_call(played: Model) -> None:
    example = torch.ones(2, 3)
    run = graphs.replayed(played, [example])
    assert isinstance(run, graphs.Replayed)
    first, second = run(example)[0], run(torch.full((2, 3), 5.0))[0]
    assert first.eq(2).all(), "a later call changed an earlier result"
    assert second.eq(10).all()
    calls = played.calls
    assert run(torch.full((2, 3), -1.0))[0].eq(-2).all()
    assert played.calls == calls, "the model ran instead of its graph"


def test_what_cuda_does_not_capture_is_told(played: Model) -> None:
    def waits(x: torch.Tensor) -> list[torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    assert (
        graphs.replayed(waits, [torch.ones(2)])
        == "it cannot be captured: operation not permitted when stream is capturing"
    )


def test_another_shape_is_recorded_when_it_comes_again(played: Model) -> None:
    run = graphs.replayed(played, [torch.ones(2, 3)])
    assert isinstance(run, graphs.Replayed)
    for other in (torch.ones(4, 3), torch.ones(3, 2).t(), torch.ones(2, 3, dtype=torch.float64)):
        calls = played.calls
        assert torch.equal(run(other)[0], 2 * other)
        assert played.calls == calls + 1
        assert torch.equal(run(3 * other)[0], 6 * other)
        recorded = played.calls
        assert torch.equal(run(5 * other)[0], 10 * other)
        assert played.calls == recorded, "the model ran instead of its graph"


def test_only_the_last_shapes_are_kept(played: Model) -> None:
    run = graphs.replayed(played, [torch.ones(1)], most=2)
    assert isinstance(run, graphs.Replayed)
    for size in (2, 2, 3, 3, 1):
        assert torch.equal(run(torch.ones(size))[0], torch.full((size,), 2.0))
    calls = played.calls
    run(torch.ones(2)), run(torch.ones(1))
    assert played.calls == calls, "a shape that came twice took the place of one that is used"
    for _ in range(40):
        assert torch.equal(run(torch.ones(3))[0], torch.full((3,), 2.0))
    calls = played.calls
    run(torch.ones(3)), run(torch.ones(1))
    assert played.calls == calls, "what is called all the time has no graph"
    assert len(run._graphs) == 2
    alone = graphs.replayed(played, [torch.ones(1)], most=1)
    assert isinstance(alone, graphs.Replayed)
    held = alone.nbytes
    for _ in range(3):
        assert torch.equal(alone(torch.ones(4))[0], torch.full((4,), 2.0))
    calls = played.calls
    assert alone(torch.ones(1))[0].eq(2).all() and played.calls == calls, "the only graph gave way"
    assert alone.nbytes == held


def test_what_is_recorded_in_inference_mode_is_replayed_outside_of_it(played: Model) -> None:
    with torch.inference_mode():
        run = graphs.replayed(played, [torch.ones(2)])
        assert isinstance(run, graphs.Replayed)
    assert run(torch.full((2,), 3.0))[0].eq(6).all()


def test_a_recording_has_workspaces_of_its_own(played: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that torch keeps per stream may lie in another graph's pool, which goes with that graph."""
    said: list[str] = []
    plain = torch.cuda.graph

    @contextlib.contextmanager
    def recording(*args: Any, **asked: Any) -> Iterator[None]:
        said.append("begin")
        with plain(*args, **asked):
            yield
        said.append("end")

    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(graphs.torch_compat_memory, "forget_workspaces", lambda: said.append("forget"))
    graphs.replayed(played, [torch.ones(2)])
    assert said == ["forget", "begin", "end", "forget"]


@pytest.mark.parametrize(("dropped", "declined"), [(0.0, False), (0.1, True)])
def test_an_attention_that_drops_nothing_draws_nothing(
    dropped: float, declined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = fx.Graph()
    x = made.placeholder("x")
    made.output(made.call_function(aten.scaled_dot_product_attention.default, (x, x, x, None, dropped)))
    assert (graphs.declines(made) is not None) is declined


def test_threads_take_turns(played: Model) -> None:
    """Static inputs are one for all calls: without turns a thread would read what another one wrote."""
    run = graphs.replayed(played, [torch.ones(64, 64)])
    assert isinstance(run, graphs.Replayed)

    def calls(value: float) -> bool:
        return all(bool(run(torch.full((64, 64), value))[0].eq(2 * value).all()) for _ in range(200))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(calls, range(6)))


def test_what_a_recorded_kernel_reads_outlives_the_cache_that_owned_it() -> None:
    lists = [torch.ones(3)]
    alive = weakref.ref(lists[0])
    with keeping() as kept:
        assert keep(lists) is lists
    lists.clear()
    assert alive() is kept[0]
    assert keep([torch.ones(1)]) and len(kept) == 1, "kept after the recording"


def test_an_opened_artifact_is_recorded_at_its_first_call(
    played: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan = SimpleNamespace(goal=Goal())
    here = on_gpu.Recorded(played, graph(aten.relu.default), plan)  # type: ignore[arg-type]
    assert here(torch.ones(2))[0].eq(2).all() and played.calls == 1, "recorded on a CPU"
    monkeypatch.setattr(on_gpu, "_there", lambda tensors: True)
    there = on_gpu.Recorded(played, graph(aten.relu.default), plan)  # type: ignore[arg-type]
    assert there(torch.ones(2))[0].eq(2).all()
    calls = played.calls
    assert there(torch.full((2,), 4.0))[0].eq(8).all() and played.calls == calls
    drawn = on_gpu.Recorded(played, graph(aten.bernoulli.default), plan)  # type: ignore[arg-type]
    assert drawn(torch.ones(2))[0].eq(2).all() and played.calls == calls + 1
