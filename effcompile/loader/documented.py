"""What a forward's docstring says of its arguments: the kind of each and the names of its dimensions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

#: `labels (`torch.LongTensor` of shape `(batch_size, config.num_mel_bins)`, *optional*):`, as transformers
#: writes them, in a line of its own. Of two shapes, the first.
_ARGUMENT = re.compile(r"^[ \t]+(\w+) \(`([^`\n]*)`([^\n]*)$", re.MULTILINE)
_SHAPE = re.compile(r"of shape `?\(([^`)]*)\)")


@dataclass(frozen=True, slots=True)
class Documented:
    """One argument: `kind` as it is written (`torch.LongTensor`, `list[Dict]`), `dimensions` by name."""

    kind: str
    dimensions: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether its numbers are integers."""
        return "Long" in self.kind or "Int" in self.kind

    @property
    def fractional(self) -> bool:
        """Whether they are not; of a plain `torch.Tensor` neither is said."""
        return any(each in self.kind for each in ("Float", "Double", "Half"))

    def __str__(self) -> str:
        return f"{self.kind} of ({', '.join(self.dimensions)})" if self.dimensions else self.kind


def documented(model: nn.Module) -> dict[str, Documented]:
    """By the argument's name; {} of a forward without a docstring, or with one of another style."""
    found: dict[str, Documented] = {}
    for name, kind, rest in _ARGUMENT.findall(model.forward.__doc__ or ""):
        shape = _SHAPE.search(rest)
        names = [each.strip() for each in shape[1].split(",")] if shape else []
        found.setdefault(name, Documented(kind, tuple(each for each in names if each)))
    return found
