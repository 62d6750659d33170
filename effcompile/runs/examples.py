"""How many examples a stage's inputs hold, and how long one is."""

from __future__ import annotations

from torch import Tensor

from effcompile.core.types import Example
from effcompile.loader.loaded import as_inputs
from effcompile.passes.training.microbatch import examples_in


def examples_of(example: Example) -> int:
    """Examples in a stage's inputs."""
    return examples_in(*as_inputs(example))


def units_of(example: Example) -> int:
    """Tokens, or patches, of one example: entries of its first integer tensor; 0 where there is none."""
    args, kwargs = as_inputs(example)
    found = next(
        (
            v
            for v in (*args, *kwargs.values())
            if isinstance(v, Tensor) and v.dim() > 1 and not v.is_floating_point()
        ),
        None,
    )
    return 0 if found is None else int(found[0].numel())
