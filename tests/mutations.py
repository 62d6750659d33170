"""A small model that reads state of every kind, and one change of each: what a plan must notice.

No code is shared with the guards.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize, prune

SCALE = 1.0
SHIFT = torch.zeros(16)
SWITCHES = {"double": False}
CONTEXT = ContextVar("CONTEXT", default=1.0)
THREAD = threading.local()
THREAD.gain = 1.0


def helper(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.hardtanh(x, -1e4, 1e4) * SCALE * CONTEXT.get() * THREAD.gain + SHIFT


def enclosing(gain: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x * gain

    def change(value: float) -> None:
        nonlocal gain
        gain = value

    return multiply, change


class Times:
    """Called as it is, or by its method."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def by(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Slotted:
    __slots__ = ("gain", "gains")

    def __init__(self) -> None:
        self.gain, self.gains = 1.0, [1.0]


class Looked:
    """Finds its attributes by names that no code has."""

    def __init__(self) -> None:
        self.held = {"gain": 1.0}

    def __getattr__(self, name: str) -> float:
        if name not in vars(self).get("held", ()):
            raise AttributeError(name)
        return float(vars(self)["held"][name])


class Described:
    def __init__(self) -> None:
        self.value = 1.0

    def __get__(self, instance: object, owner: type) -> float:
        return self.value


class Shared:
    described = Described()


DEFAULTS = {"gain": 1.0}
ENVIRONMENT = "EFFCOMPILE_GAIN_OF_A_TEST"


def by_default(x: torch.Tensor, held: dict[str, float] = DEFAULTS) -> torch.Tensor:
    return x * held["gain"] * by_default.gain * float(os.environ.get(ENVIRONMENT, "1"))  # type: ignore[attr-defined]


by_default.gain = 1.0  # type: ignore[attr-defined]


class Held(nn.Module):
    """Reads values of objects of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.method, self.part = (
            Times(),
            Times().by,
            partial(nn.functional.leaky_relu, negative_slope=0.5),
        )
        self.slotted, self.looked, self.ring, self.array = (
            Slotted(),
            Looked(),
            deque([1.0, 2.0]),
            numpy.ones(2),
        )
        self.among, self.bytes, self.shared = {"a": Times()}, bytearray(b"\x01"), Shared()
        self.long = [1.0] * 2000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (
            self.part(self.method(self.times(x)))
            * self.slotted.gain
            * self.slotted.gains[0]
            * self.looked.gain
        )
        return by_default(
            x
            * self.ring[0]
            * float(self.array[1])
            * self.among["a"].factor
            * self.bytes[0]
            * self.long[1500]
            * self.shared.described
        )


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.scaling = {"default": 1.0}
        self.offset = torch.zeros(16)
        self.options = SimpleNamespace(kind="relu", unused=1)
        self.widths = [1.0, 1.0]
        self.held = Held()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.held(self.up(x)) * self.scaling["default"] + self.offset
        y = torch.relu(y) if self.options.kind == "relu" else torch.tanh(y)
        return y * self.widths[0] * self.widths[1] * len(self.widths) / 2


class Model(nn.Module):
    """Ids to logits; with labels, the loss."""

    power = 1.0

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner, self.drop = nn.Embedding(24, 16), Inner(), nn.Dropout(dropout)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(16))
        self.temperature, self.normed, self.repeats, self.calls = 1.0, True, 2, 0
        self.gain, self.change_gain = enclosing(1.0)
        self.note = "nothing"

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor | None = None, alpha: float = 1.0
    ) -> torch.Tensor:
        self.calls += 1
        hidden = self.embed(ids)
        for _ in range(self.repeats):
            hidden = self.inner(hidden)
        hidden = self.norm(hidden) if self.normed else hidden
        hidden = helper(self.drop(hidden) * self.mask * self.power)
        logits = self.head(self.gain(hidden)) / self.temperature * alpha * getattr(self, "extra_gain", 1.0)
        logits = logits * 2 if SWITCHES["double"] else logits
        return (
            logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        )


Undo = Callable[[], object]
Mutation = Callable[[Model], Undo]
_MISSING = object()


def attribute(path: str, value: Any) -> Mutation:
    """Sets an attribute of a part of the model; undone by the very object that was there."""
    *parts, name = path.split(".")

    def mutate(model: Model) -> Undo:
        owner: Any = model
        for part in parts:
            owner = getattr(owner, part)
        registered = {**owner._modules, **owner._buffers} if isinstance(owner, nn.Module) else {}
        before = registered.get(
            name, vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else getattr(owner, name)
        )
        setattr(owner, name, value() if callable(value) else value)
        return lambda: delattr(owner, name) if before is _MISSING else setattr(owner, name, before)

    return mutate


def grown(model: Model) -> Undo:
    model.inner.widths.append(1.0)
    return lambda: model.inner.widths.pop()


def item(container: Callable[[Model], Any], key: Any, value: Any) -> Mutation:
    def mutate(model: Model) -> Undo:
        held = container(model)
        before = held[key]
        held[key] = value
        return lambda: held.__setitem__(key, before)

    return mutate


def hook(register: Callable[[Model], Any]) -> Mutation:
    def mutate(model: Model) -> Undo:
        handle = register(model)
        return lambda: handle.remove()

    return mutate


def variable(name: str, value: Callable[[], Any]) -> Mutation:
    """A global of this file."""

    def mutate(model: Model) -> Undo:
        before = globals()[name]
        globals()[name] = value()
        return lambda: globals().__setitem__(name, before)

    return mutate


def class_attribute(kind: type, name: str, value: Any) -> Mutation:
    def mutate(model: Model) -> Undo:
        before = vars(kind)[name]
        setattr(kind, name, value)
        return lambda: setattr(kind, name, before)

    return mutate


def gain(model: Model) -> Undo:
    model.change_gain(3.0)
    return lambda: model.change_gain(1.0)


def untied(model: Model) -> Undo:
    before = model.head.weight
    model.head.weight = nn.Parameter(before.detach() * 2)
    return lambda: setattr(model.head, "weight", before)


def another_class(model: Model) -> Undo:
    model.norm.__class__ = nn.Identity
    return lambda: setattr(model.norm, "__class__", nn.LayerNorm)


def deleted(model: Model) -> Undo:
    before = model._modules.pop("drop")
    return lambda: model.__setattr__("drop", before)


def default_dtype(model: Model) -> Undo:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def mode_of_dropout(model: Model) -> Undo:
    before = model.drop.training
    model.drop.training = not before
    return lambda: model.drop.train(before)


def pruned(model: Model) -> Undo:
    before = model.inner.up.weight
    prune.l1_unstructured(model.inner.up, "weight", amount=0.5)

    def undo() -> None:
        prune.remove(model.inner.up, "weight")
        model.inner.up.weight = before

    return undo


def parametrized(model: Model) -> Undo:
    before = model.inner.up.weight.detach().clone()
    parametrize.register_parametrization(model.inner.up, "weight", nn.Tanh())

    def undo() -> None:
        parametrize.remove_parametrizations(model.inner.up, "weight", leave_parametrized=False)
        with torch.no_grad():
            model.inner.up.weight.copy_(before)

    return undo


def environment(model: Model) -> Undo:
    os.environ[ENVIRONMENT] = "2"
    return lambda: os.environ.pop(ENVIRONMENT)


def turned(model: Model) -> Undo:
    model.inner.held.ring.rotate(1)
    return lambda: model.inner.held.ring.rotate(1)


def in_context(model: Model) -> Undo:
    token = CONTEXT.set(2.0)
    return lambda: CONTEXT.reset(token)


def default_of_a_function(model: Model) -> Undo:
    by_default.__defaults__ = ({"gain": 2.0},)
    return lambda: setattr(by_default, "__defaults__", (DEFAULTS,))


def code_of_a_function(model: Model) -> Undo:
    before = by_default.__code__
    by_default.__code__ = (lambda x, held: x * 2).__code__
    return lambda: setattr(by_default, "__code__", before)


def _times(factor: float) -> Callable[..., Any]:
    return lambda module, given, result: result * factor


#: Changes that can be taken back, so that the plan holds again.
REVERSIBLE: dict[str, Mutation] = {
    "float attribute": attribute("temperature", 2.0),
    "negative": attribute("temperature", -1.0),
    "bool attribute": attribute("normed", False),
    "1 for True": attribute("normed", 1),
    "int attribute": attribute("repeats", 1),
    "an attribute read by getattr with a default": attribute("extra_gain", 3.0),
    "Dropout.p": attribute("drop.p", 0.9),
    "eps": attribute("norm.eps", 1.0),
    "a dict's item": item(lambda m: m.inner.scaling, "default", 2.0),
    "another dict": attribute("inner.scaling", lambda: {"default": 2.0}),
    "a list's item": item(lambda m: m.inner.widths, 1, 2.0),
    "a list that grows": grown,
    "an object's attribute": attribute("inner.options.kind", "tanh"),
    "another tensor that is no buffer": attribute("inner.offset", lambda: torch.ones(16)),
    "a class attribute": class_attribute(Model, "power", 2.0),
    "an attribute over a class attribute": attribute("power", 2.0),
    "a global float": variable("SCALE", lambda: 2.0),
    "a global tensor": variable("SHIFT", lambda: torch.ones(16)),
    "a global dict": item(lambda m: SWITCHES, "double", True),
    "a global function": variable("helper", lambda: lambda x: x * 2),
    "a variable of an enclosing function": gain,
    "a forward hook": hook(lambda m: m.inner.register_forward_hook(_times(2.0))),
    "a forward pre-hook": hook(
        lambda m: m.norm.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    ),
    "a hook on the outermost module": hook(lambda m: m.register_forward_hook(_times(2.0))),
    "a hook on all modules": hook(
        lambda m: torch_module.register_module_forward_hook(
            lambda module, _, y: y * 1.5 if isinstance(module, nn.LayerNorm) else None
        )
    ),
    "a backward hook": hook(
        lambda m: m.norm.register_full_backward_hook(lambda module, into, _: tuple(g * 2 for g in into))
    ),
    "another submodule": attribute("norm", nn.Identity),
    "another forward of an instance": attribute("inner.forward", lambda: lambda x: x),
    "another forward of a class": class_attribute(Inner, "forward", lambda self, x: x),
    "another class of a submodule": another_class,
    "a submodule that is gone": deleted,
    "weights untied": untied,
    "another buffer": attribute("mask", lambda: torch.full((16,), 2.0)),
    "the default dtype": default_dtype,
    "the mode of a submodule": mode_of_dropout,
    "an attribute of a callable object": attribute("inner.held.times.factor", 2.0),
    "an attribute of a bound method's object": attribute("inner.held.method.__self__.factor", 2.0),
    "a keyword of a partial": item(lambda m: m.inner.held.part.keywords, "negative_slope", 0.1),
    "a slot": attribute("inner.held.slotted.gain", 2.0),
    "an item of a slot's list": item(lambda m: m.inner.held.slotted.gains, 0, 2.0),
    "what __getattr__ finds": item(lambda m: m.inner.held.looked.held, "gain", 2.0),
    "a deque that is turned": turned,
    "an element of a NumPy array": item(lambda m: m.inner.held.array, 1, 2.0),
    "an object in a dict": attribute("inner.held.among", lambda: {"a": SimpleNamespace(factor=2.0)}),
    "an attribute of an object in a dict": lambda m: attribute("factor", 2.0)(m.inner.held.among["a"]),  # type: ignore[arg-type]
    "a byte": item(lambda m: m.inner.held.bytes, 0, 2),
    "an item of a long list": item(lambda m: m.inner.held.long, 1500, 2.0),
    "an attribute of a descriptor": lambda m: attribute("value", 2.0)(vars(Shared)["described"]),
    "the default of an argument, in place": item(lambda m: DEFAULTS, "gain", 2.0),
    "the default of an argument": default_of_a_function,
    "an attribute of a function": lambda m: attribute("gain", 2.0)(by_default),  # type: ignore[arg-type]
    "the code of a function": code_of_a_function,
    "a variable of the environment": environment,
    "a variable of the context": in_context,
    "a value of the thread": lambda m: attribute("gain", 2.0)(THREAD),  # type: ignore[arg-type]
    "a function of torch": lambda m: attribute("hardtanh", lambda: lambda x, *_: x * 2)(nn.functional),  # type: ignore[arg-type]
}


def _in_place(tensor: Callable[[Model], torch.Tensor]) -> Mutation:
    def mutate(model: Model) -> Undo:
        with torch.no_grad():
            tensor(model).mul_(2).add_(1)
        return lambda: None

    return mutate


def stepped(model: Model) -> Undo:
    model.inner.up.weight.grad = torch.ones_like(model.inner.up.weight)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return lambda: None


def loaded(model: Model, *, assign: bool = False) -> Undo:
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()}, assign=assign)
    return lambda: None


#: Changes of weights, after which a plan for inference never holds again, and a planned step goes on.
WEIGHTS: dict[str, Mutation] = {
    "an optimizer's step": stepped,
    "in place under no_grad": _in_place(lambda m: m.inner.up.weight),
    "in place through .data": _in_place(lambda m: m.inner.up.weight.data),
    "another .data": lambda m: setattr(m.inner.up.weight, "data", torch.randn(16, 16)) or (lambda: None),
    "load_state_dict": loaded,
    "load_state_dict(assign=True)": lambda m: loaded(m, assign=True),
    "a buffer in place": _in_place(lambda m: m.mask),
}

#: Changes that cannot be taken back and that no plan survives.
LASTING: dict[str, Mutation] = {
    "a tensor that is no buffer, in place": _in_place(lambda m: m.inner.offset),
    "a tensor that is no buffer, through .data": _in_place(lambda m: m.inner.offset.data),
    "pruned": pruned,
    "parametrized": parametrized,
}

#: Changes that nothing notices but a guard that says too much.
HARMLESS: dict[str, Mutation] = {
    "an equal float": attribute("temperature", lambda: float("1")),
    "an attribute that no code names": attribute("epoch", 3),
    "an existing attribute that no code names": attribute("note", "another"),
    "what no code names of an object": attribute("inner.options.unused", 2),
    "an equal dict": attribute("inner.scaling", lambda: {"default": 1.0}),
    "a counter of the forward itself": attribute("calls", 100),
    "a gradient": attribute("embed.weight.grad", lambda: torch.ones(24, 16)),
}
