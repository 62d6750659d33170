"""The user's inputs of a training step: what of them is a tensor of the graph, and what was fixed
at capture.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.utils import _pytree as pytree

from effcompile.capture.calls import CallChecks
from effcompile.capture.known_values import Fixed
from effcompile.core import gpu
from effcompile.core.errors import GuardError, InputsError, clipped
from effcompile.core.types import Args, Inputs, Kwargs, Value
from effcompile.ir.guards import Guard
from effcompile.ir.values import check_counts, check_values, counted

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


class StepInputs:
    """How to read (args, kwargs) as the flat tensors of a step.

    Keywords that the forward does not take are for the user's loss.
    """

    def __init__(self, model: nn.Module, args: Sequence[object], kwargs: Kwargs) -> None:
        self._model = type(model).__name__
        self.call = CallChecks(model.forward, self._model, args, kwargs, by_name=True)
        for place, value in self.call.values:
            if not isinstance(value, _PLAIN):
                raise InputsError(
                    f"{place} is a {type(value).__name__}. What it holds would be fixed in the graph: "
                    "give tensors, plain values, or tuples, lists and dicts of them."
                )
        if empty := next(
            (place for place, tensor in self.call.tensors if tensor.dim() and not len(tensor)), None
        ):
            raise InputsError(
                f"{empty} is an empty batch: its first axis is 0 long. What a step makes of nothing could "
                "not be compared with anything, and shapes are fixed at capture. Give example inputs of at "
                "least one example."
            )
        self._kinds = [_kind(tensor) for _, tensor in self.call.tensors]
        self._differentiated = [tensor.requires_grad for _, tensor in self.call.tensors]
        self._values: dict[int, torch.Tensor] = {}
        self._counts: dict[int, tuple[tuple[int, int], ...]] = {}
        # as the capture has them
        self._strides = [tensor.detach().clone().stride() for _, tensor in self.call.tensors]

    @property
    def named(self) -> list[tuple[str, torch.Tensor]]:
        """The example's tensors in the order of `leaves`, by the place where they stand."""
        return [(str(place), tensor) for place, tensor in self.call.tensors]

    def fix(self, fixed: Fixed) -> None:
        """Refuse other values of these inputs than the example's, or another number of some."""
        for at, (name, tensor) in enumerate(self.named):
            if name in fixed.values:
                self._values[at] = tensor.detach().clone()
            if name in fixed.counts:
                self._counts[at] = fixed.counts[name]

    @property
    def copied_bytes(self) -> int:
        """Of the example's tensors that lie otherwise than the capture has them (expanded, cut out of a
        larger one): what `leaves` gives is a copy, beside the user's own.
        """
        return sum(
            gpu.rounded(tensor.nbytes) if tensor.is_cuda else tensor.nbytes
            for (_, tensor), strides in zip(self.call.tensors, self._strides, strict=True)
            if tensor.stride() != strides
        )

    def leaves(self, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
        """The tensors, in the order of the graph's inputs, with the strides of the capture.

        Raises:
            GuardError: an input is missing or new, or has another shape, dtype, device or (where it is no
                tensor) value.
        """
        found = self.call.take(args, kwargs)
        for at, (tensor, kind) in enumerate(zip(found, self._kinds, strict=True)):
            if (tensor.shape, tensor.dtype, tensor.device, tensor.layout) != kind:
                self._refuse(at, tensor)
            if tensor.requires_grad and not self._differentiated[at]:
                self._refuse_gradient(at)
            if tensor.stride() != self._strides[at]:
                found[at] = _strided(tensor, self._strides[at])
        for at, planned in self._values.items():
            check_values(str(self.call.tensors[at][0]), found[at], planned)
        for at, counts in self._counts.items():
            check_counts(str(self.call.tensors[at][0]), found[at], counts)
        return found

    def forward_part(self, args: Args, kwargs: Kwargs) -> Inputs:
        """The inputs without those that only the user's loss can take."""
        known = self.call.parameters
        taken = args if known.has_rest else args[: len(known.positional)]
        return taken, {
            name: value for name, value in kwargs.items() if known.named is None or name in known.named
        }

    def listed(self) -> Iterator[Guard]:
        """What is checked of the arguments."""
        for (place, _), kind in zip(self.call.tensors, self._kinds, strict=True):
            yield Guard(kind="input", place=place.guarded, expected=_text(kind))
        for at, planned in self._values.items():
            yield Guard(
                kind="input",
                place=f"{self.call.tensors[at][0].guarded}.values",
                expected=clipped(str(planned.tolist())),
            )
        for at, counts in self._counts.items():
            where = f"{self.call.tensors[at][0].guarded}.values"
            yield Guard(kind="input", place=where, expected=counted(counts))
        yield from self.call.listed()

    def _refuse(self, at: int, tensor: torch.Tensor) -> None:
        place, kind = self.call.tensors[at][0], self._kinds[at]
        raise GuardError(
            f"The training step of {self._model} was captured for {place} = {_text(kind)}, but got "
            f"{_text(_kind(tensor))}. Shapes, dtypes and plain values are fixed at capture: drop the last "
            "batch (DataLoader(drop_last=True); HuggingFace's "
            "TrainingArguments(dataloader_drop_last=True)) or pad it, or leave `inputs` out of "
            "effcompile.optimize, which then plans each shape.",
            place=place.guarded,
        )

    def _refuse_gradient(self, at: int) -> None:
        place = self.call.tensors[at][0]
        raise GuardError(
            f"{place} requires a gradient at this call and did not when the training step of {self._model} "
            "was captured, which makes none for it. Call effcompile.optimize again with inputs whose "
            f"{place} requires one, or give {place}.detach() if what made it is not trained through this "
            "loss.",
            place=place.guarded,
        )


def after_pre_hooks(model: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, dict[str, Value]]:
    """What the forward is given: the outermost module's own pre-hooks run before a planned step, too, at its
    own call.
    """
    given = dict(kwargs)
    for number, hook in list(model._forward_pre_hooks.items()):
        if number in model._forward_pre_hooks_with_kwargs:
            args, given = hook(model, args, given) or (args, given)
        elif (result := hook(model, args)) is not None:
            args = result if isinstance(result, tuple) else (result,)
    return args, given


_Kind = tuple[torch.Size, torch.dtype, torch.device, torch.layout]


def _kind(tensor: torch.Tensor) -> _Kind:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _text(kind: _Kind) -> str:
    shape, dtype, device, layout = kind
    where = (
        ""
        if device.type == "cpu" and layout is torch.strided
        else f" on {device}"
        if layout is torch.strided
        else f" {layout}"
    )
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}{where}"


def _strided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A copy with these strides, which views in the graph rely on."""
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


Refill = Callable[[Sequence[torch.Tensor]], Inputs]


def split_tensors(inputs: StepInputs, args: Args, kwargs: Kwargs) -> tuple[list[torch.Tensor], Refill]:
    """Copies of the tensors in the order of `inputs.leaves`, and the way back from such a list to (args,
    kwargs).

    Copies, for one tensor given twice (labels=input_ids) would become one input of the graph.
    """
    flat, spec = pytree.tree_flatten((args, dict(kwargs)))
    stand_ins = [torch.empty(0) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
    at = {
        id(stand_in): number
        for number, stand_in in enumerate(stand_ins)
        if isinstance(stand_in, torch.Tensor)
    }
    stand_args, stand_kwargs = pytree.tree_unflatten(stand_ins, spec)
    order = [at[id(found)] for found in inputs.call.take(stand_args, stand_kwargs)]

    def refill(tensors: Sequence[torch.Tensor]) -> Inputs:
        leaves = list(flat)
        for index, tensor in zip(order, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return args, kwargs

    return [flat[index].detach().clone().requires_grad_(flat[index].requires_grad) for index in order], refill
