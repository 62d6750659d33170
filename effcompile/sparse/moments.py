"""The optimizer's side of a moving pattern: its state tensors of a weight's shape follow the weight, whatever
the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from effcompile.core.errors import UsageError

__all__ = ["Change", "check", "edit", "replace", "scale_learning_rates"]

#: Changes a tensor of a weight's shape in place; what is new in it gets the value.
Change = Callable[[Tensor, float], None]

#: State that does not begin at zero: (optimizer, entry) → the hyperparameter that it begins with.
_BEGINS_AT = {("Rprop", "step_size"): "lr", ("Adagrad", "sum"): "initial_accumulator_value"}
_REFUSED = {
    "LBFGS": "it keeps its history of all weights as one vector, in which new weights cannot be told apart",
    "SparseAdam": "it takes sparse gradients only, and those of linear layers are not",
}


def check(optimizer: Optimizer, weights: Mapping[str, Tensor]) -> None:
    """Raise UsageError for an optimizer that cannot follow a pattern, or that does not train a weight of
    ours.
    """
    kind = type(optimizer).__name__
    if kind in _REFUSED:
        raise UsageError(
            f"{kind} cannot train under a moving pattern: {_REFUSED[kind]}. Use any other, such as AdamW "
            "or SGD."
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, weight in weights.items():
        if id(weight) not in held:
            raise UsageError(
                f"The optimizer does not train the weight of {name!r}. Add it to a param group, or leave "
                "it out of `layers`."
            )


def edit(optimizer: Optimizer, parameter: Tensor, change: Change) -> None:
    """Apply a change to every state tensor of the parameter's shape, and to what is kept per block of stacked
    ones.

    Step counts, and factored moments of a matrix (Adafactor), are left as they are.
    """
    group = _group(optimizer, parameter)
    for entry, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and (value.shape == parameter.shape or _per_block(value, parameter)):
            begins = _BEGINS_AT.get((type(optimizer).__name__, entry))
            change(value, float(group[begins]) if begins else 0.0)


def replace(
    optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter, convert: Callable[[Tensor], Tensor]
) -> None:
    """Put `new` where the optimizer held `old`, state tensors of its shape converted.

    Where there is other state that depends on the shape (factored moments), the optimizer starts anew for
    this parameter.
    """
    group = _group(optimizer, old)
    group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    state: dict[str, Any] = optimizer.state.pop(old, {})
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
    if state and all(value.shape == old.shape for value in tensors):
        optimizer.state[new] = {
            entry: convert(value) if _one_of(value, tensors) else value for entry, value in state.items()
        }


def _per_block(value: Tensor, parameter: Tensor) -> bool:
    """True for a factored moment of blocks (Z, b, b): (Z, b, 1) or (Z, 1, b), which moves with its block."""
    return value.dim() == parameter.dim() == 3 and value.shape[0] == parameter.shape[0]


def _one_of(value: object, tensors: list[Tensor]) -> bool:
    return any(value is tensor for tensor in tensors)


def _group(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    return next(
        group for group in optimizer.param_groups if any(held is parameter for held in group["params"])
    )


def scale_learning_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiply the rate of every param group.

    Raises:
        UsageError: a scheduler holds the rates already, and would put the old ones back.
    """
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UsageError(
            "A scheduler was made on this optimizer and would undo this. Call scale_learning_rates() before "
            "making it, or put learning_rate_factor into the scheduler's lambda."
        )
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
