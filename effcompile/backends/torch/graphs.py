"""CUDA graphs for calls of shapes that come again: what the host says kernel by kernel is said once, and
replayed.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from effcompile.backends.torch.kept import keeping
from effcompile.core import torch_compat_memory
from effcompile.core.torch_compat_aot import draws

__all__ = ["Replayed", "declines", "replayed"]

Run = Callable[..., Sequence[torch.Tensor]]
#: Shapes, strides, dtypes and devices of a call's inputs.
Form = tuple[tuple[object, ...], ...]

#: Calls before a capture: kernels are compiled and tuned in them, libraries make their workspaces.
_WARM = 3
#: Graphs that are kept; a shape is recorded when it comes for the second time.
_MOST = 8
#: Calls of another shape after which it takes the place of the graph that was idle for longest: to record
#: costs some five calls.
_OFTEN = 32
#: Shapes that are remembered.
_REMEMBERED = 1024


def asked() -> str | None:
    """None, or that nobody asked for calls to be recorded."""
    if os.environ.get("EFFCOMPILE_CUDA_GRAPHS", "").lower() in ("on", "1", "yes"):
        return None
    return (
        "EFFCOMPILE_CUDA_GRAPHS=1 records calls (new: one of our own runs on an H100 ended in a "
        "launch failure)"
    )


def declines(graph: fx.Graph) -> str | None:
    """None, or why calls of this graph cannot be replayed."""
    if (reason := asked() or waits(graph)) is not None:
        return reason
    return None if torch.cuda.is_available() else "there is no CUDA here"


def waits(graph: fx.Graph) -> str | None:
    """None, or what of a graph the host waits for, or says anew at every call."""
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        if (
            torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        ) and not _indexed_by_places(node):
            return f"{node.target} waits for the GPU: its result is read on the host"
        if draws(node):
            return f"{node.target} draws random numbers"
    return None


def _indexed_by_places(node: fx.Node) -> bool:
    """Whether it reads at given places: the operator that does so is tagged for the masks that it takes too,
    whose sums it waits for.
    """
    if node.target is not torch.ops.aten.index.Tensor:
        return False
    indices = [index.meta.get("val") for index in node.args[1] if isinstance(index, fx.Node)]  # type: ignore[union-attr]
    return all(
        isinstance(index, torch.Tensor) and index.dtype not in (torch.bool, torch.uint8) for index in indices
    )


def replayed(run: Run, example: Sequence[torch.Tensor], most: int = _MOST) -> Replayed | str:
    """The function, captured now at these inputs; or why CUDA would not capture it (an operator that waits
    for the GPU in its own code).

    Args:
        run: from tensors to tensors, all on one GPU.
        example: inputs of the first graph.
        most: graphs that are kept, the last ones used; each has memory of its own.
    """
    try:
        return Replayed(run, example, most)
    except RuntimeError as error:
        return (
            "it cannot be captured: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
        )


class Replayed:
    """A function of tensors, by graphs that were captured at the shapes of an example and at others when they
    came for the second time.

    Inputs are copied into a graph's own, results are copied out of it: a result stays as it is when the next
    call is made. Calls from several threads and streams take turns, on the GPU too.
    """

    def __init__(self, run: Run, example: Sequence[torch.Tensor], most: int = _MOST) -> None:
        self._run, self._most = run, most
        self._turn = threading.Lock()
        self._graphs: OrderedDict[Form, _Graph] = OrderedDict([(_form(example), _Graph(run, example))])
        self._seen: Counter[Form] = Counter()  # calls of shapes that have no graph
        self._refused: set[Form] = set()

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs hold between calls: memory of their pools, and inputs of their own."""
        return sum(graph.nbytes for graph in self._graphs.values())

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        if not torch.cuda.is_current_stream_capturing():
            with self._turn:
                graph = self._graph_of(inputs)
                if graph is not None:
                    return graph(inputs)
        return list(self._run(*inputs))

    def _graph_of(self, inputs: Sequence[torch.Tensor]) -> _Graph | None:
        form = _form(inputs)
        graph = self._graphs.get(form)
        if graph is not None:
            self._graphs.move_to_end(form)
            return graph
        if (
            self._most == 1
            or form in self._refused
            or (form not in self._seen and len(self._seen) >= _REMEMBERED)
        ):
            return None
        self._seen[form] += 1
        full = len(self._graphs) >= self._most
        return self._recorded(form, inputs) if self._seen[form] >= (_OFTEN if full else 2) else None

    def _recorded(self, form: Form, inputs: Sequence[torch.Tensor]) -> _Graph | None:
        del self._seen[form]
        if len(self._graphs) >= self._most:
            self._graphs.popitem(last=False)
        try:
            self._graphs[form] = _Graph(self._run, inputs)
        except RuntimeError:
            # no memory for another graph, or CUDA does not capture it at this shape: kernel by kernel, then
            self._refused.add(form)
        return self._graphs.get(form)


class _Graph:
    """One recorded call: its inputs, its outputs and what it reads beside them."""

    def __init__(self, run: Run, example: Sequence[torch.Tensor]) -> None:
        self._done: Any = None
        before = _held()
        with (
            torch.cuda.device(_index(example)),
            torch.inference_mode(False),
            torch.no_grad(),
            keeping() as self._read,
        ):
            # in inference mode they could be written in that mode alone
            self._inputs = [t.clone() for t in example]
            self._graph, self._outputs = captured(run, self._inputs)
        self.nbytes = max(0, _held() - before)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.cuda.device(_index(self._inputs)):
            if self._done is not None:
                # the last call may be under way on another stream
                torch.cuda.current_stream().wait_event(self._done)
            for own, given in zip(self._inputs, inputs, strict=True):
                own.copy_(given)
            self._graph.replay()
            results = [output.clone() for output in self._outputs]
            self._done = torch.cuda.Event()
            self._done.record()
            return results


def captured(run: Run, inputs: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """One call's graph and outputs, recorded after some calls on a stream of their own (as torch.cuda.graph's
    documentation asks).

    Workspaces of cuBLAS are kept per stream by torch, and all recordings are on one stream: a graph would go
    on to write where an earlier one's pool lay when that was given back. So they are forgotten before, for a
    graph to have its own in its own pool, and behind.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            run(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch_compat_memory.forget_workspaces()
    try:
        with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local"):
            outputs = list(run(*inputs))
    finally:
        torch_compat_memory.forget_workspaces()
    return graph, outputs


def _held() -> int:
    """Bytes that torch's allocator holds from the device, without those that it could give back."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _index(inputs: Sequence[torch.Tensor]) -> int:
    """The GPU's number; -1, which stands for none, without inputs."""
    return inputs[0].get_device() if inputs else -1


def _form(inputs: Sequence[torch.Tensor]) -> Form:
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs)
