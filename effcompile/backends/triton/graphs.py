"""One CUDA graph for calls of unchanging shapes: what the host says kernel by kernel is said once, and replayed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["Replayed", "declines", "replayed"]

Run = Callable[..., Sequence[torch.Tensor]]

#: Calls before a capture: kernels are compiled and tuned in them, libraries make their workspaces.
_WARM = 3


def declines(graph: fx.Graph, *, fixed: bool) -> str | None:
    """None, or why calls of this graph cannot be replayed. `fixed`: no axis of its inputs is dynamic."""
    if os.environ.get("EFFCOMPILE_CUDA_GRAPHS", "").lower() in ("off", "0", "no"):
        return "EFFCOMPILE_CUDA_GRAPHS is off"
    if not fixed:
        return "axes of its inputs are dynamic"
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            return f"{node.target} waits for the GPU: its result is read on the host"
        if torch.Tag.nondeterministic_seeded in tags:
            return f"{node.target} draws random numbers"
    if not torch.cuda.is_available():
        return "there is no CUDA here"
    return None


def replayed(run: Run, example: Sequence[torch.Tensor]) -> Replayed | str:
    """The function, captured now at these inputs; or why CUDA would not capture it (an operator that waits for the GPU in its own code)."""
    try:
        return Replayed(run, example)
    except RuntimeError as error:
        return f"it cannot be captured: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"


class Replayed:
    """A function of tensors as a graph, captured at the shapes of an example; other shapes run kernel by kernel.

    Inputs are copied into the graph's own, results are copied out of it: a result stays as it is when the next call is made. The graph
    has a pool of memory of its own, which it keeps.
    """

    def __init__(self, run: Run, example: Sequence[torch.Tensor]) -> None:
        self._run = run
        self._form = [(t.shape, t.stride(), t.dtype, t.device) for t in example]
        self._inputs = [t.clone() for t in example]
        self._graph, self._outputs = self._captured()

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        if [(t.shape, t.stride(), t.dtype, t.device) for t in inputs] != self._form:
            return list(self._run(*inputs))
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return [output.clone() for output in self._outputs]

    @torch.no_grad()
    def _captured(self) -> tuple[Any, list[torch.Tensor]]:
        """One call's graph and outputs, recorded after some calls on a stream of their own (as torch.cuda.graph's documentation asks)."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                self._run(*self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
            outputs = list(self._run(*self._inputs))
        return graph, outputs
