"""`torch.compile(model, backend="effcompile", options={"max_error": 0.01})`: each graph that dynamo captures
is optimized.

A graph that needs gradients is a training step: it is given to AOTAutograd with our partition, within
options={"memory": ...}.

Dynamo passes parameters as inputs of the graph. They become constants of the optimized graph (quantisation
needs their values), and every call checks that they are still the same tensors, unchanged; otherwise the
original graph is run.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from effcompile import compiler
from effcompile.compiler import Executable, Request
from effcompile.core.errors import EffcompileError, UnknownNameError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.stages import stage
from effcompile.core.types import Outputs

#: What `torch.compile(options=...)` is given: goal fields, and what is named here.
Options = Mapping[str, Any]
#: What dynamo hands a graph: tensors, and sizes where they are dynamic.
Example = torch.Tensor | int | torch.SymInt
Step = Callable[..., Sequence[Outputs]]
_OPTIONS = ("target", "backend", "passes", "calibration")
_MOST_SHAPES = 8  # sets of sizes that one dynamic graph is optimized for; more run the original
_PART = re.compile(r"\._(modules|parameters|buffers)\['([^']+)'\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What became of one captured graph: its Executable, its training step, or why the original graph is run
    instead.
    """

    executable: Executable | None = None
    step: Step | None = None
    fallback: str = ""


_compilations: list[Compilation] = []


def compilations() -> tuple[Compilation, ...]:
    """Every graph that torch.compile gave to effcompile in this process, in order; fallbacks among them."""
    return tuple(_compilations)


def dynamo_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Example], *, options: Options | None = None
) -> Step:
    """The torch.compile backend; registered as the entry point `torch_dynamo_backends`.

    Args:
        gm: the graph that dynamo captured; a function of flat tensors (and sizes, when dynamic).
        example_inputs: what it was captured with; parameters are among them.
        options: goal fields (max_error, memory, minimize, reads), target, backend, passes, calibration.

    Returns:
        A function of the same flat inputs. Of a graph that needs gradients it is the planned step, unless the
        options ask for inference; else it is optimized at its first call. Graphs that cannot be planned or
        optimized run as they are, with a warning and an entry in `compilations`.

    Raises:
        UsageError: an option that does not exist or is not allowed.
    """
    request, training = _request(options or {})
    if training and _needs_gradients(example_inputs):
        return _training_step(gm, example_inputs, replace(request.goal, mode="training"))
    if request.training:
        return gm.forward  # an evaluation between the steps
    return torch.compiler.disable(_Graph(gm, request).__call__)


def _request(options: Options) -> tuple[Request, bool]:
    """What is asked for, and whether graphs that need gradients are planned: unless inference is meant.

    Raises:
        UsageError: an option that does not exist, is not allowed, or that training does not take.
    """
    known = [*_OPTIONS, *Goal.__dataclass_fields__]
    for name in options:
        if name not in known:
            raise UnknownNameError("option", name, known)
    goal = Goal.of(**{k: v for k, v in options.items() if k not in _OPTIONS})
    beside = {k: v for k, v in options.items() if k in _OPTIONS}
    if goal.mode == "training" and beside:
        raise UsageError(
            f"options[{next(iter(beside))!r}] is for inference. In training give goal fields only, e.g. "
            "memory."
        )
    return Request(goal=goal, **beside), goal.mode == "training" or ("mode" not in options and not beside)


def _needs_gradients(inputs: Sequence[Example]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


def _training_step(gm: fx.GraphModule, example_inputs: Sequence[Example], goal: Goal) -> Step:
    """The graph's forward and backward as planned; the graph itself, with a warning, where it cannot be."""
    try:
        with stage("plan a graph of torch.compile's"):
            step: Step = compiler.training_backend(gm, example_inputs, goal)
    except EffcompileError as error:
        _compilations.append(Compilation(fallback=str(error)))
        warnings.warn(f"effcompile runs this graph unplanned: {error}", stacklevel=2)
        return gm.forward
    _compilations.append(Compilation(step=step))
    return step


class _Graph:
    """One captured graph: optimized per set of sizes at the first call with it."""

    def __init__(self, gm: fx.GraphModule, request: Request) -> None:
        self.gm, self.request = gm, request
        self.names = _constant_names(gm)
        self.built: dict[tuple[int, ...], tuple[Executable, list[tuple[torch.Tensor, int]]] | None] = {}
        self.warned: set[str] = set()

    def __call__(self, *inputs: Example) -> Sequence[Outputs]:
        if _needs_gradients(inputs):
            return self._original(
                inputs,
                "the call needs gradients, and the options ask for inference (call it under torch.no_grad())",
            )
        sizes = tuple(x for x in inputs if isinstance(x, int))
        if sizes not in self.built:
            if len(self.built) >= _MOST_SHAPES:
                return self._original(inputs, f"it was already optimized for {_MOST_SHAPES} sets of sizes")
            self.built[sizes] = self._build(inputs)
        built = self.built[sizes]
        if built is None:
            return self.gm(*inputs)
        executable, weights = built
        constants = [inputs[i] for i in self.names]
        if any(
            x is not w or x._version != version for x, (w, version) in zip(constants, weights, strict=True)
        ):
            return self._original(
                inputs,
                "its weights are not those that it was optimized with (compile it again: "
                "torch.compiler.reset())",
            )
        try:
            return list(executable(*self._activations(inputs)))
        except EffcompileError as error:
            return self._original(inputs, str(error))

    def _activations(self, inputs: Sequence[Example]) -> list[torch.Tensor]:
        return [x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and i not in self.names]

    def _build(self, inputs: Sequence[Example]) -> tuple[Executable, list[tuple[torch.Tensor, int]]] | None:
        try:
            with stage("take a graph of torch.compile's"):
                model = DynamoGraph(self.gm, inputs, self.names).eval()
            executable = compiler.optimize(model, tuple(self._activations(inputs)), {}, **self.request.asked)
        except EffcompileError as error:
            self._fall_back(str(error))
            return None
        _compilations.append(Compilation(executable=executable))
        return executable, [
            (x, x._version) for x in (inputs[i] for i in self.names) if isinstance(x, torch.Tensor)
        ]

    def _original(self, inputs: Sequence[Example], reason: str) -> Sequence[Outputs]:
        self._fall_back(reason)
        result: Sequence[Outputs] = self.gm(*inputs)
        return result

    def _fall_back(self, reason: str) -> None:
        """Say once per graph and reason that the original graph is run."""
        if reason not in self.warned:
            self.warned.add(reason)
            _compilations.append(Compilation(fallback=reason))
            warnings.warn(f"effcompile runs this graph unoptimized: {reason}", stacklevel=3)


class DynamoGraph(nn.Module):
    """The graph as a module that owns its constants under their names in the user's model: a function of
    activations.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Example], names: Mapping[int, str]) -> None:
        super().__init__()
        self.graph_module = gm
        self.fixed = [None if isinstance(x, torch.Tensor) else x for x in inputs]
        self.names = dict(names)
        for index, name in names.items():
            if isinstance(value := inputs[index], torch.Tensor):
                _register(self, name, value)
        self.free = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and i not in names]

    def forward(self, *activations: torch.Tensor) -> Outputs:
        values: list[Example | None] = list(self.fixed)
        for index, value in zip(self.free, activations, strict=True):
            values[index] = value
        for index, name in self.names.items():
            path, _, leaf = name.rpartition(".")
            values[index] = getattr(self.get_submodule(path), leaf)
        return self.graph_module(*values)


def _register(root: nn.Module, name: str, value: torch.Tensor) -> None:
    *path, leaf = name.split(".")
    owner = root
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    if isinstance(value, nn.Parameter):
        owner.register_parameter(leaf, value)
    else:
        owner.register_buffer(leaf, value)


def _constant_names(gm: fx.GraphModule) -> dict[int, str]:
    """Placeholder index → qualified name, for the graph inputs that are parameters or buffers of the user's
    modules.
    """
    found: dict[int, str] = {}
    for index, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", "")
        parts = _PART.findall(name() if callable(name) else name)
        if parts and parts[-1][0] in ("parameters", "buffers"):
            found[index] = ".".join(part for _, part in parts)
        elif isinstance(node.meta.get("example_value"), nn.Parameter):
            found[index] = str(node.name)
    taken: set[str] = {"graph_module"}
    return {index: _unused(name, taken) for index, name in found.items()}


def _unused(name: str, taken: set[str]) -> str:
    """The name, or the name with a number where it is taken (two models in one graph)."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    taken.add(candidate)
    return candidate
