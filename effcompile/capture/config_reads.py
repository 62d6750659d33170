"""Which attributes of its configuration a model's forward reads, recorded while it is captured.

The code behind a forward names many that the captured calls never read (reads.py says no less than they
read): Trainer aligns `bos_token_id` with its tokenizer, and writes `dtype` at a checkpoint. What was not read
cannot change what was captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

#: Reading these may be reading any attribute.
_ALL = frozenset({"__dict__", "to_dict", "to_diff_dict", "__iter__", "items", "keys"})


@dataclass(slots=True, kw_only=True)
class ConfigReads:
    """Configuration → the attributes of it that were read; of objects that are not in it nothing is known.

    Attributes:
        of: `id` of a configuration → itself, so that it stays what its `id` says, and the names.
    """

    of: dict[int, tuple[object, set[str]]] = field(default_factory=dict)

    def may_read(self, holder: object, name: str, *, named: bool) -> bool:
        """Whether the captured calls read this attribute, as far as is known.

        `named`: code behind a forward names it.

        What was read counts without being named: a configuration's properties read what no forward names
        (`_output_attentions`).
        """
        _, names = self.of.get(id(holder), (None, None))
        return named if names is None else name in names or (named and not names.isdisjoint(_ALL))

    def of_copy(self, model: nn.Module, copied: nn.Module) -> ConfigReads:
        """The same of a copy of the model, whose configurations are others."""
        pairs = zip(_configurations(model), _configurations(copied), strict=False)
        return ConfigReads(
            of={id(now): (now, self.of[id(was)][1]) for was, now in pairs if id(was) in self.of}
        )


@contextlib.contextmanager
def recording(model: nn.Module, into: ConfigReads) -> Iterator[None]:
    """Within, what is read of the configurations of a model's modules, and of those inside them,
    is recorded.
    """
    found = _configurations(model)
    kinds = {id(config): type(config) for config in found}
    watched: list[Any] = []
    try:
        for config in found:
            _, names = known = into.of.get(id(config), (config, set()))
            with contextlib.suppress(TypeError):  # a class whose objects cannot take another one
                object.__setattr__(config, "__class__", _watching(type(config), names))
                watched.append(config)
                into.of[id(config)] = known
        yield
    finally:
        for config in watched:
            object.__setattr__(config, "__class__", kinds[id(config)])


def _watching(kind: Any, names: set[str]) -> type:
    """A class like `kind` whose objects tell what is read of them, under the name that it is kept
    under, too.
    """
    other_names: dict[str, str] = getattr(kind, "attribute_map", None) or {}

    def read(self: object, name: str) -> object:
        names.update((name, other_names.get(name, name)))
        return kind.__getattribute__(self, name)

    return type(
        kind.__name__,
        (kind,),
        {"__getattribute__": read, "__module__": kind.__module__, "__qualname__": kind.__qualname__},
    )


def _configurations(model: nn.Module) -> list[Any]:
    """HuggingFace's configurations: what has `to_dict` and stands as `config` in a module, or in
    such a one.
    """
    found: dict[int, Any] = {}
    todo = [vars(module).get("config") for module in model.modules()]
    while todo:
        config = todo.pop()
        if (
            id(config) not in found
            and hasattr(config, "__dict__")
            and callable(getattr(type(config), "to_dict", None))
        ):
            found[id(config)] = config
            todo.extend(vars(config).values())
    return list(found.values())
