"""What a captured graph took for granted of its model, as facts, and the lists by which a call checks them.

A graph has as constants what the forward read: attributes, globals, class attributes, variables of enclosing
functions (reads.py says which are named), the modules' tree, hooks, and in inference the weights. `Snapshot`
walks a model and notes each as a fact, and on the lists of checklist.py where it stands.
"""

from __future__ import annotations

import enum
import functools
import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
from torch import nn

from effcompile.capture import holders, whose_code
from effcompile.capture import reads as code
from effcompile.capture.checklist import Checklist
from effcompile.capture.facts import PLAIN, SETTINGS, Fact, settings, settings_and_autocast
from effcompile.capture.tensors import state_of
from effcompile.core import torch_compat
from effcompile.core.dispatch import method_by_type
from effcompile.ir.guards import Kind

#: Where hooks come from that HuggingFace puts into a model at the first call that asks for its hidden states,
#: and that say so. In a call that does not ask they do nothing.
_COLLECTING, _COLLECTS = "transformers.utils.output_capturing", "_output_capturing_hooks_installed"
#: What every module has, and what a planned one has beside.
_OWN = frozenset(vars(nn.Module())) | {"_effcompile_fallback", "_effcompile_offers", _COLLECTS}
_TABLES = ("_modules", "_parameters", "_buffers")
_FORWARD_HOOKS, _BACKWARD_HOOKS = (
    ("_forward_hooks", "_forward_pre_hooks"),
    ("_backward_hooks", "_backward_pre_hooks"),
)
_DEEPEST = 12  # objects within objects that are looked into


class Snapshot:
    """The facts of a model, and the lists by which they are checked.

    Args:
        roots: the model, and other objects that stand for it, by name.
        reads: what its code names.
        training: a step that reads the parameters at each call; otherwise they are constants of the graph.
        without: places that are left out.
        beside: what is called beside the model, by name.
    """

    def __init__(
        self, roots: Mapping[str, nn.Module], reads: code.Reads, *, training: bool,
        without: Collection[str] = (), beside: Mapping[str, object] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.facts: dict[str, Fact] = {}
        self._reads, self._train, self._without = reads, training, without
        self._first_names: dict[int, str] = {}
        self._seen: set[int] = set()
        self._roots = tuple(roots.values())
        self._lists = Checklist(self._roots[0])
        for number, (name, root) in enumerate(roots.items()):
            if number == 0:
                self._module(root, name)
            else:
                self._watch_attributes(root, name)
        for name, value in beside.items():
            self._value(value, name, "global", 0)
        self._classes()
        self._functions()
        self._variables()
        self._settings()
        self._lists.close()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those whose values are constants of the graph."""
        return list(self._lists.tensors.values())

    def unchanged(self) -> bool:
        """Whether every object is the one that it was, and no tensor was changed."""
        return self._lists.unchanged()

    # ------------------------------------------------------------------ modules

    def _module(self, module: nn.Module, place: str) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        self._lists.modules.append(module)
        self.facts[f"{place}.__class__"] = Fact("class", type(module))
        root = module in self._roots
        self._watch_attributes(module, place)
        if not root:
            self._mode(module, place)
        self._hooks(module, place, outermost=root)
        for table in (module._parameters, module._buffers):
            self._lists.table(table)
            for name, tensor in table.items():
                self._weight(tensor, f"{place}.{name}", trained=table is module._parameters)
        self._lists.table(module._modules)
        for name, child in module._modules.items():
            self.facts[f"{place}.{name}"] = Fact("module", child)
            if child is not None:
                self._module(child, f"{place}.{name}")

    def _watch_attributes(self, module: nn.Module, place: str) -> None:
        held = vars(module)
        # what is left out of a model is left out of its planned form
        known_as = "model" if module in self._roots else place
        read = [key for key in held if key not in _OWN and self._reads_attribute(module, key)]
        keys = [key for key in read if f"{known_as}.{key}" not in self._without]
        mode = ["training"] if self._train and module not in self._roots else []
        self._lists.watch(holders.getter((*_TABLES, *_FORWARD_HOOKS, *mode, *keys)), held)
        self._lists.sized.append(held)
        for key in keys:
            if self._train and isinstance(module, nn.RNNBase) and key.startswith("_flat_weight"):
                self._flat_weights(module, f"{place}._flat_weights")
            else:
                self._value(held[key], f"{place}.{key}", "attribute", 0)

    def _flat_weights(self, module: nn.RNNBase, place: str) -> None:
        """The weights that nn.GRU and its like list, with their names and references to them, too: a step
        reads them at each call. What any other list holds is a constant of the graph.
        """
        own = {id(tensor): name for name, tensor in module._parameters.items()}
        self._lists.watch(tuple, module._flat_weights)
        for number, tensor in enumerate(module._flat_weights):
            where = f"{place}[{number}]"
            if id(tensor) in own:
                self.facts[where] = Fact("weight", f"tied to {own[id(tensor)]}")
            else:
                self._value(tensor, where, "attribute", 1)

    def _mode(self, module: nn.Module, place: str) -> None:
        """In training the module's own flag; in inference that it is not in training mode where the model is
        in evaluation mode.
        """
        outermost = self._roots[0].training
        if self._train:
            self.facts[f"{place}.training"] = Fact("mode", module.training)
            return
        self.facts[f"{place}.training"] = Fact("mode", module.training and not outermost)
        if module.training == outermost:
            self._lists.evaluating.append(vars(module))

    def _reads_attribute(self, module: nn.Module, key: str) -> bool:
        """Whether code names it, or might make its name.

        What holds other things is looked into only where it is named.
        """
        if key in self._reads.names:
            return True
        return (
            self._reads.by_name
            and not whose_code.is_of_torch(type(module))
            and isinstance(vars(module)[key], PLAIN | torch.Tensor)
        )

    def _hooks(self, module: nn.Module, place: str, *, outermost: bool) -> None:
        """Hooks inside the graph.

        Those of a planned step's outermost module run around it, at its own call.
        """
        if outermost and self._train:
            return
        for name in (*_FORWARD_HOOKS, *(_BACKWARD_HOOKS if self._train else ())):
            self._hook_table(vars(module)[name], f"{place}.{name.strip('_')}")

    def _hook_table(self, table: Mapping[int, Any], place: str) -> None:
        self._lists.table(table)
        for number, hook in table.items():
            if getattr(hook, "__module__", "") != _COLLECTING:
                self.facts[f"{place}[{number}]"] = Fact("hook", hook)

    def _weight(self, tensor: torch.Tensor | None, place: str, *, trained: bool) -> None:
        if tensor is None or place in self._without:
            self.facts[place] = Fact("weight", None)
            return
        first = self._first_names.setdefault(id(tensor), place)
        if not self._train:
            self._tensor(tensor, place, "weight")
            return
        self.facts[place] = Fact("weight", "its own" if first == place else f"tied to {first}")
        if trained:
            self.facts[f"{place}.requires_grad"] = Fact("weight", tensor.requires_grad)
            if not tensor.requires_grad:
                self._lists.frozen.append(tensor)

    # ------------------------------------------------------------------ values

    @method_by_type
    def _value(self, value: object, place: str, kind: Kind, depth: int) -> None:
        """Any other object: itself, and of what it holds that which code names."""
        self.facts[place] = Fact(kind, value)
        known = (
            whose_code.is_plain_code(type(value))
            or whose_code.is_of_torch(type(value))
            or (callable(value) and not whose_code.is_own(type(value)))
        )
        if (
            known
            or holders.is_function(value)
            or depth >= _DEEPEST
            or id(value) in self._seen
            or place in self._without
        ):
            return
        self._seen.add(id(value))
        if hasattr(value, "__dict__"):
            held = vars(value)
            keys = self._named_of(value, held, place)
            self._lists.watch(holders.getter(keys), held)
            self._lists.sized.append(held)
            for key in keys:
                self._value(held[key], f"{place}.{key}", kind, depth + 1)
        if keys := self._named_of(value, holders.slots_of(value), place):
            self._lists.watch(lambda holder: tuple(getattr(holder, key) for key in keys), value)
            for key in keys:
                self._value(getattr(value, key), f"{place}.{key}", kind, depth + 1)

    def _named_of(self, value: object, keys: Iterable[str], place: str) -> tuple[str, ...]:
        """Attributes of an object that code names; all of them where its class finds them by names made at
        run time.
        """
        kind = type(value)
        every = whose_code.is_own(kind) and any(
            name in vars(base) for base in kind.__mro__[:-1] for name in code.FINDERS
        )
        seen = self._reads.configurations
        read = (key for key in keys if every or seen.may_read(value, key, named=key in self._reads.names))
        return tuple(key for key in read if f"{place}.{key}" not in self._without)

    @_value.register
    def _(self, value: PLAIN, place: str, kind: Kind, depth: int) -> None:
        self.facts[place] = Fact(kind, value)

    @_value.register
    def _(self, value: torch.Tensor, place: str, kind: Kind, depth: int) -> None:
        self._tensor(value, place, "tensor" if kind == "attribute" else kind)

    @_value.register
    def _(self, value: nn.Module, place: str, kind: Kind, depth: int) -> None:
        self.facts[place] = Fact(kind, value)
        self._module(value, place)

    @_value.register
    def _(self, value: Mapping, place: str, kind: Kind, depth: int) -> None:  # type: ignore[type-arg] # dispatches on it
        self._contents(
            value, [(f"{place}[{key!r}]", item) for key, item in value.items()], place, kind, depth
        )

    @_value.register
    def _(self, value: holders.Memory, place: str, kind: Kind, depth: int) -> None:
        self.facts[place] = Fact(kind, value, (holders.contents(value),))
        self._lists.memory.append(value)

    @_value.register
    def _(self, value: functools.partial, place: str, kind: Kind, depth: int) -> None:  # type: ignore[type-arg] # dispatches on it
        self.facts[place] = Fact(kind, value)
        for name, part in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
            self._value(part, f"{place}.{name}", kind, depth + 1)

    @_value.register
    def _(self, value: ContextVar, place: str, kind: Kind, depth: int) -> None:  # type: ignore[type-arg] # dispatches on it
        self._lists.watch(holders.in_context, value)
        self._value(value.get(None), f"{place}.get()", kind, depth + 1)

    @_value.register
    def _(self, value: threading.local, place: str, kind: Kind, depth: int) -> None:
        """What the thread that calls has there, which may be another one than planned."""
        held = vars(value)
        keys = self._named_of(value, held, place)
        self._lists.watch(holders.in_thread(keys), value)
        for key in keys:
            self._value(held[key], f"{place}.{key}", kind, depth + 1)

    @_value.register
    def _(self, value: MethodType, place: str, kind: Kind, depth: int) -> None:
        self.facts[place] = Fact(kind, value)
        if not isinstance(value.__self__, nn.Module | type):
            self._value(value.__self__, f"{place}.__self__", kind, depth + 1)

    @_value.register
    # as above
    def _(self, value: list | tuple | set | frozenset | deque, place: str, kind: Kind, depth: int) -> None:  # type: ignore[type-arg]
        self._contents(value, [(f"{place}[{i}]", item) for i, item in enumerate(value)], place, kind, depth)

    def _contents(
        self, value: object, items: Sequence[tuple[str, object]], place: str, kind: Kind, depth: int
    ) -> None:
        """A container may be another object with equal contents; of a very large one only the length is
        looked at.
        """
        if place in self._without:
            return
        self.facts[f"len({place})"] = Fact(kind, len(items))
        self._lists.sized.append(value)
        if len(items) > code.LONGEST or depth >= _DEEPEST or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._lists.watch(holders.mapped if isinstance(value, Mapping) else tuple, value)
        for where, item in items:
            self._value(item, where, kind, depth + 1)

    def _tensor(self, tensor: torch.Tensor, place: str, kind: Kind) -> None:
        self._lists.tensors[id(tensor)] = tensor
        self.facts[place] = Fact(kind, tensor, state_of(tensor))

    # ------------------------------------------------------------------ what stands outside of the model

    def _classes(self) -> None:
        """Of classes whatever code names: methods, and attributes that an instance may hide."""
        for kind in self._reads.kinds:
            held = vars(kind)
            self._named(
                held,
                self._reads.names,
                f"{kind.__qualname__}.",
                "class",
                installed=whose_code.is_installed(holders.file_of(kind)),
            )
            if whose_code.is_own(kind):
                self._lists.sized.append(held)

    def _functions(self) -> None:
        """Of the user's own functions: the code, what an argument is where it is left out, attributes; and
        the environment.
        """
        for function in self._reads.functions:
            name = function.__qualname__
            self._lists.watch(holders.parts_of, function)
            self.facts[f"{name}.__code__"] = Fact("global", function.__code__)
            for argument, value in holders.defaults_of(function):
                self._value(value, f"{argument} of {name}", "global", 1)
            keys = tuple(
                key
                for key in vars(function)
                if key in self._reads.names and f"{name}.{key}" not in self._without
            )
            self._lists.watch(holders.getter(keys), vars(function))
            for key in keys:
                self._value(vars(function)[key], f"{name}.{key}", "global", 1)
        names = sorted(self._reads.environment)
        self._lists.watch(holders.in_environment, names)
        for name, text in zip(names, holders.in_environment(names), strict=True):
            if text is not None:
                self.facts[f"os.environ[{name!r}]"] = Fact("global", text)

    def _variables(self) -> None:
        for name, (space, names) in self._reads.variables.items():
            self._named(
                space,
                names,
                f"{name}.",
                "global",
                installed=whose_code.is_installed(str(space.get("__file__", ""))),
            )
        for (function, name), cell in self._reads.cells.items():
            place = f"{name} in {function}"
            if place not in self._without:
                self._lists.watch(holders.in_cell, cell)
                self._value(cell.cell_contents, place, "global", 0)

    def _named(
        self, space: Mapping[str, object], names: Collection[str], prefix: str, kind: Kind, *, installed: bool
    ) -> None:
        """Values of a namespace.

        In installed packages what is not a value, a tensor or a function is taken as it is.
        """
        allowed: Any = PLAIN | torch.Tensor | FunctionType | BuiltinFunctionType if installed else object
        there = [
            n
            for n in space
            if n in names and f"{prefix}{n}" not in self._without and isinstance(space[n], allowed)
        ]
        there = [
            n
            for n in there
            if not isinstance(space[n], type(enum) | type | nn.Module) or isinstance(space[n], nn.Module)
        ]
        if there:
            self._lists.watch(holders.getter(tuple(there)), space)
        for name in there:
            self._value(space[name], f"{prefix}{name}", kind, 1)

    def _settings(self) -> None:
        """torch's own switches that change what operators are run, and hooks on all modules."""
        for table in torch_compat.global_module_hooks():
            self._hook_table(table, "torch.nn.modules.module hooks")
        if self._reads.minds_gradients:
            self._lists.watch(lambda _: (torch.is_grad_enabled(),), None)
            self.facts["torch.is_grad_enabled()"] = Fact("setting", torch.is_grad_enabled())
        read = settings if self._train else settings_and_autocast
        self._lists.watch(read, None)
        for name, value in zip(SETTINGS, read(None), strict=False):
            self.facts[name] = Fact("setting", value)
