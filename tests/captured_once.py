"""Equal models with equal batches are captured once for all plans of a test process: a captured step does not
change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from generation_models import STEPS
from torch import fx, nn
from torch.utils import _pytree as pytree

from effcompile.capture.generation import GenerationStep
from effcompile.capture.source import Source
from effcompile.capture.state import ModelGuards
from effcompile.compiler.generation import build
from effcompile.estimate.storages import Storages, graph_storages
from effcompile.ir.program import Program
from effcompile.ir.step import Step
from effcompile.search import captured
from effcompile.search.training import operator_costs, work

#: Sources that are kept. Of each key the first, so that what it names by its address is alive, and the last,
#: with all that was captured.
_MOST = 40
_sources: dict[object, tuple[Source, Source]] = {}
#: Of the graphs that were traced last, by their identity, the storages: of a captured one they are asked for
#: by every plan.
_MOST_TRACED = 32
_traced: dict[int, tuple[fx.Graph, Storages]] = {}
#: Graphs that were captured, by their identity, as text.
_texts: dict[int, tuple[fx.Graph, str]] = {}


def _value(tensor: torch.Tensor) -> object:
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    figures = (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
        tensor.storage_offset(),
    )
    return *figures, hashlib.sha256(content).hexdigest()


def _held(module: nn.Module) -> object:
    """What a forward may read of a module beside its tensors and parts, and its hooks."""
    own = {name: value for name, value in vars(module).items() if not isinstance(value, torch.Tensor)}
    plain = [(name, repr(value)) for name, value in own.items() if not name.startswith("_")]
    hooks = [(name, tuple(map(id, value.values()))) for name, value in own.items() if name.endswith("_hooks")]
    return type(module), tuple(plain), tuple(hooks)


def _key(source: Source) -> object | None:
    """Equal for captures of which one can serve; None where that cannot be told."""
    model, (leaves, spec) = source.model, pytree.tree_flatten((source.args, dict(source.kwargs)))
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors = [*(tensor for _, tensor in named), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
    known = all(
        type(t) in (torch.Tensor, nn.Parameter) and t.device.type == "cpu" and t.layout == torch.strided
        for t in tensors
    )
    if not known or torch.is_autocast_enabled("cpu") or any(t.dtype.is_complex for t in tensors):
        return None
    given = tuple(_value(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
    places = [t.data_ptr() for t in tensors]
    shared = tuple(places.index(place) for place in places)
    modules = tuple((name, _held(module)) for name, module in model.named_modules(remove_duplicate=False))
    return (
        spec,
        given,
        shared,
        modules,
        tuple((name, _value(t)) for name, t in named),
        id(source.loss),
        source.keep_outputs,
    )


def _of(model: nn.Module, made: Any) -> Any:
    """What was captured, for an equal model: its guards look at that one."""
    if isinstance(made, Step):
        return replace(made, state=ModelGuards(model, training=True))
    if isinstance(made, Source):
        return replace(made, model=model, made={name: _of(model, value) for name, value in made.made.items()})
    return tuple(_of(model, part) for part in made) if type(made) is tuple else made


def shared_source(**given: Any) -> Source:
    """A source with what was captured of an equal one."""
    source = Source(**given)
    key = _key(source)
    if key is None:
        return source
    first, last = _sources.pop(key, (source, source))
    _unchanged(last)
    found = replace(source, made=_of(source.model, last).made)
    while len(_sources) >= _MOST:
        del _sources[next(iter(_sources))]
    _sources[key] = first, found
    return found


def shared_storages(graph: fx.Graph, given: Callable[[fx.Node], object]) -> Storages:
    """The storages of a graph, traced once."""
    if id(graph) not in _traced:
        while len(_traced) >= _MOST_TRACED:
            del _traced[next(iter(_traced))]
        _traced[id(graph)] = graph, graph_storages(graph, given)
    return _traced[id(graph)][1]


def _unchanged(source: Source) -> None:
    """What was captured reads as it did when it was given on first."""
    for part in (part for made in source.made.values() if type(made) is tuple for part in made):
        if isinstance(part, Step):
            _, first = _texts.setdefault(id(part.graph), (part.graph, str(part.graph)))
            assert str(part.graph) == first, "a plan changed a captured step"


@contextmanager
def captured_once() -> Iterator[None]:
    """Plans within share what is captured; what was captured is as it was afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "Source", shared_source)
        patch.setattr(operator_costs, "graph_storages", shared_storages)
        yield
    for _, source in _sources.values():
        _unchanged(source)
    _texts.clear()
    _traced.clear()


@contextmanager
def programs_once() -> Iterator[None]:
    """Within, the latest model is captured once for all plans of it for inference.

    That is honest, for a capture depends on the model and its example inputs alone, and its graph is never
    edited: passes change copies. What the guards remember is each plan's own.
    """
    latest: list[tuple[nn.Module, Program]] = []
    capture = captured.capture

    def once(model: nn.Module, *args: Any, **kwargs: Any) -> Program:
        if not latest or latest[0][0] is not model:
            latest[:] = [(model, capture(model, *args, **kwargs))]
        return replace(latest[0][1], state=ModelGuards(model, training=False), recovered={})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "capture", once)
        yield


@contextmanager
def steps_once() -> Iterator[None]:
    """Within, the latest model's step of generation is captured once for all plans of it, and one of
    `generation_models.captured` not again; what plans remember of its masks is their own.
    """
    latest: list[tuple[nn.Module, GenerationStep]] = []
    capture = build.capture_step

    def once(model: nn.Module, **given: Any) -> GenerationStep:
        if not latest or latest[0][0] is not model:
            latest[:] = [(model, STEPS.get(id(model)) or capture(model, **given))]
        step = latest[0][1]
        return replace(step, program=replace(step.program, recovered={}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "capture_step", once)
        yield
