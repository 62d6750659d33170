"""What torch's engines make of a program whose tensors lie on a GPU: calls replayed as CUDA graphs, memory as
its allocator counts it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from effcompile.backends.torch import graphs
from effcompile.backends.torch.lowered import TorchLowered
from effcompile.core import torch_compat_memory
from effcompile.ir.plan import Plan


@dataclass(frozen=True, kw_only=True)
class OnGPU(TorchLowered):
    """Its memory is that of torch's CUDA allocator, with what its graphs hold between calls."""

    def peak_bytes(self, inputs: Sequence[torch.Tensor]) -> int | None:
        self(*inputs)
        with torch_compat_memory.watched_memory("cuda") as peak:
            self(*inputs)
        held = self.run.nbytes if isinstance(self.run, graphs.Replayed) else 0
        return self.weight_bytes + held + peak()


def on_gpu(lowered: TorchLowered, plan: Plan, **told: Any) -> TorchLowered:
    """The same with its calls recorded, where a program's inputs lie on a GPU; `told`: further settings,
    wherever they lie.
    """
    inputs = lowered.program.flat_inputs()
    if not _there(inputs):
        return replace(lowered, settings={**lowered.settings, **told}) if told else lowered
    run = recorded(lowered.run, lowered.program.graph, plan, inputs)
    settings = {
        **lowered.settings,
        **told,
        "CUDA graph": f"none: {run}" if isinstance(run, str) else "whole call",
    }
    settings.pop("threads", None)
    return OnGPU(
        **{**vars(lowered), "run": lowered.run if isinstance(run, str) else run, "settings": settings}
    )


class Recorded:
    """An opened artifact: on a GPU it is recorded at its first call, whose inputs are the example."""

    def __init__(self, run: Callable[..., list[torch.Tensor]], graph: fx.Graph, plan: Plan) -> None:
        self._run, self._graph, self._plan = run, graph, plan
        self._first = threading.Lock()
        self._recorded: graphs.Replayed | str | None = None

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        if not _there(inputs):
            return self._run(*inputs)
        with self._first:
            if self._recorded is None:
                self._recorded = recorded(self._run, self._graph, self._plan, inputs)
        return self._run(*inputs) if isinstance(self._recorded, str) else self._recorded(*inputs)


def recorded(
    run: Callable[..., list[torch.Tensor]], graph: fx.Graph, plan: Plan, inputs: Sequence[torch.Tensor]
) -> graphs.Replayed | str:
    """The calls of a lowered graph as CUDA graphs, or why not."""
    if plan.goal.mode == "generation":
        return "the cache grows with every token, so that no shape comes again"
    most = {} if plan.goal.memory is None else {"most": 1}  # each further one has memory of its own
    return graphs.declines(graph) or graphs.replayed(run, inputs, **most)


def _there(tensors: Sequence[torch.Tensor]) -> bool:
    return bool(tensors) and all(t.is_cuda for t in tensors)
