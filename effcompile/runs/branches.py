"""The residual branches of a layer: the linears that end them, by the names that models give them, and the
norms that stand at them.
"""

from __future__ import annotations

from torch import nn

from effcompile.core.errors import UsageError

#: Ends of names of the modules whose output is added to the residual stream.
_ENDS = (
    "o_proj", "out_proj", "c_proj", "down_proj", "fc2", "w2", "wo", "output.dense", "dense_4h_to_h",
    "attention.dense", "proj", "down", "linear2", "out",
)  # fmt: skip


def branch_ends(layer: nn.Module) -> list[nn.Module]:
    """The linears that end the layer's branches.

    Raises:
        UsageError: none has a name that is known for that.
    """
    found = [module for name, module in layer.named_modules() if is_linear(module) and _ends(name)]
    if not found:
        names = ", ".join(name for name, module in layer.named_modules() if is_linear(module))
        raise UsageError(
            f"It cannot be told which linears of {type(layer).__name__} end its residual branches: it has "
            f"{names or 'none'}, and known are names that end in {', '.join(_ENDS)}."
        )
    return found


def is_linear(module: nn.Module) -> bool:
    """A linear layer, Hugging Face's Conv1D among them."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def is_norm(module: nn.Module) -> bool:
    """A normalisation with a gain."""
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


def _ends(name: str) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in _ENDS)
