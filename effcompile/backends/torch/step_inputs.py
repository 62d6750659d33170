"""What a call gives a planned step, as the step was captured with, or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from effcompile.core import torch_compat
from effcompile.core.errors import GuardError, InputsError
from effcompile.core.types import Args, Kwargs, Value
from effcompile.ir.step import Step


def held(model: nn.Module, name: str) -> torch.Tensor:
    """The tensor that the model has under a name now; within torch.func.functional_call that is
    no parameter.
    """
    path, _, own = name.rpartition(".")
    value = getattr(model.get_submodule(path), own)
    assert isinstance(value, torch.Tensor), name
    return value


def autocast_of(devices: list[str]) -> tuple[tuple[str, torch.dtype], ...]:
    """(device, dtype) of each autocast that is on."""
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in devices if torch.is_autocast_enabled(device)
    )


def given_tensors(step: Step, args: Args, kwargs: Kwargs, room: int | None) -> list[Value]:
    """The tensors of a call, in the order of the step's inputs; copies of those that lie otherwise than in
    the graph.

    room: bytes that the budget leaves to such copies; None without one.

    Raises:
        GuardError: the inputs are not those that the step was captured for, or their copies take more.
    """
    leaves = step.leaves(args, kwargs)
    direct = {*map(id, args), *map(id, kwargs.values())}
    if room is not None and not direct.issuperset(map(id, leaves)):
        given = set(map(id, pytree.tree_leaves((args, dict(kwargs)))))
        copied = [id(leaf) not in given for leaf in leaves]
        nbytes = sum(leaf.nbytes for leaf, yes in zip(leaves, copied, strict=True) if yes)
        if nbytes > room:
            names = ", ".join(name for name, yes in zip(step.input_names, copied, strict=True) if yes)
            raise GuardError(
                f"At this call {names} has other strides than the example that was planned for. A copy that "
                f"has those takes {nbytes} bytes, and the budget of this plan leaves {room} to such. Plan "
                f"with an example that lies as the batches do, or give {names}.contiguous().",
                place=f"strides of {names}",
            )
    return leaves


def laid_out(node: fx.Node, value: torch.Tensor) -> torch.Tensor:
    """An input with the strides that the step was captured with, for which its views are views; a copy where
    it has others.
    """
    wanted = node.meta["val"].stride()
    if value.stride() == wanted:
        return value
    return torch.empty_strided(value.shape, wanted, dtype=value.dtype, device=value.device).copy_(value)


def fitting(node: fx.Node, name: str, value: torch.Tensor) -> torch.Tensor:
    """The value, if it has the shape, dtype and device that the step was captured with."""
    wanted = node.meta["val"]
    if (value.shape, value.dtype, value.device.type) != (wanted.shape, wanted.dtype, wanted.device.type):
        raise GuardError(
            f"{name} is {value.dtype} {tuple(value.shape)} on {value.device} now; the step was planned for "
            f"{wanted.dtype} {tuple(wanted.shape)} on {wanted.device}. Call effcompile.optimize again.",
            place=f"model.{name}",
            of_model=True,
        )
    return value


def refuse_inference(step: Step, read_again: Iterable[tuple[fx.Node, torch.Tensor]]) -> None:
    """Raises InputsError for a tensor made within inference_mode that the backward reads, as autograd does
    for one that it would save: whether it was changed in between is not counted for it.
    """
    for node, value in read_again:
        if value.is_inference():
            raise InputsError(
                f"{called(step, node)} was made within torch.inference_mode(), and the backward "
                "reads it: inference tensors cannot be saved for backward. Give a clone() of it, or make it "
                "within torch.no_grad()."
            )


def called(step: Step, node: fx.Node) -> str:
    """What a placeholder stands for, by the name that the user gave it."""
    inputs = zip(step.inputs, step.input_names, strict=True)
    return {**step.parameters, **step.buffers, **dict(inputs)}.get(node, node.name)


def refuse_others(consumed: Mapping[str, torch.Tensor], updated: Mapping[str, torch.Tensor]) -> None:
    """Raises InputsError where a hook wants a gradient that goes to the optimizer at once, or that has
    another parameter there.
    """
    for name, parameter in consumed.items():
        if updated.get(name, parameter) is not parameter:
            raise InputsError(
                f"The parameter {name} is another one than the optimizer has, which this plan's backward "
                "hands its gradient to at once: it was replaced. Call effcompile.optimize again, or plan "
                "with --pass states.in_backward=false."
            )
        if torch_compat.has_gradient_hooks(parameter):
            raise InputsError(
                f"The parameter {name} has a hook on its gradient (register_hook, "
                "register_post_accumulate_grad_hook), which this plan's backward hands to the optimizer at "
                "once. Remove the hook, or plan with --pass states.in_backward=false."
            )
