"""When calls are replayed as a CUDA graph, and that a replay is a call: with torch's graph played by hand, for there is no GPU here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from effcompile.backends.triton import graphs

aten = torch.ops.aten


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
    assert graphs.declines(plain, fixed=True) == "there is no CUDA here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert graphs.declines(plain, fixed=True) is None
    assert "dynamic" in (graphs.declines(plain, fixed=False) or "")
    assert "waits for the GPU" in (graphs.declines(graph(aten._local_scalar_dense.default), fixed=True) or "")
    assert "waits for the GPU" in (graphs.declines(graph(aten.nonzero.default), fixed=True) or "")
    assert "random" in (graphs.declines(graph(aten.bernoulli.default), fixed=True) or "")
    monkeypatch.setenv("EFFCOMPILE_CUDA_GRAPHS", "off")
    assert "off" in (graphs.declines(plain, fixed=True) or "")


class Tape:
    """A CUDA graph by hand: what was recorded is a function of the same input tensors, run into the same outputs."""

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

    @contextlib.contextmanager
    def recording(tape: Tape, pool: Any) -> Iterator[None]:
        model.tape = tape
        yield
        model.tape = None

    for name, value in {"Stream": Stream, "current_stream": Stream, "stream": lambda _: contextlib.nullcontext(), "CUDAGraph": Tape,
                        "graph": recording, "graph_pool_handle": lambda: None}.items():  # fmt: skip
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

    assert graphs.replayed(waits, [torch.ones(2)]) == "it cannot be captured: operation not permitted when stream is capturing"


def test_other_shapes_run_by_themselves(played: Model) -> None:
    run = graphs.replayed(played, [torch.ones(2, 3)])
    assert isinstance(run, graphs.Replayed)
    for other in (torch.ones(4, 3), torch.ones(3, 2).t(), torch.ones(2, 3, dtype=torch.float64)):
        calls = played.calls
        assert torch.equal(run(other)[0], 2 * other)
        assert played.calls == calls + 1
