"""What the forward of a training step returns: which tensor is the loss, which are for show, and the way back
to its own type.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from effcompile.core.errors import CaptureError
from effcompile.core.types import Outputs, Value

Path = tuple[Any, ...]
_MEND = (
    "Pass what the model computes its loss from (HuggingFace: labels=...; a Trainer with "
    "label_smoothing_factor or compute_loss_func takes them away: leave those out), or give loss=, a "
    "function loss(outputs, inputs)"
)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for the tensor at a path of the output; for good where that is dropped."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayout:
    """A model's output as one loss and tensors for show.

    Attributes:
        template: the output with a `_Slot` in place of each tensor.
        loss: path of the loss; None when the user's own function computes it.
        shown: paths of the tensors that are returned beside the loss.
        cut_off: index in `shown` → name, for those that required a gradient before they were detached.
        dropped: names of the tensors that are not, with their bytes (0 for an object of a kind that we cannot
            read).
    """

    template: Any
    loss: Path | None
    shown: tuple[Path, ...]
    dropped: Mapping[str, int]
    cut_off: Mapping[int, str]

    @classmethod
    def of(cls, outputs: Outputs, *, own_loss: bool, keep_outputs: bool) -> OutputLayout:
        """Read an output.

        Raises:
            CaptureError: it holds no loss, and the user gave no function that computes one.
        """
        loss = None if own_loss else _loss_path(outputs)
        found = dict(_leaves(outputs, ()))
        tensors = [path for path, leaf in found.items() if isinstance(leaf, torch.Tensor) and path != loss]
        opaque = {_name(path): 0 for path, leaf in found.items() if _is_opaque(leaf)}
        bytes_of = {_name(path): found[path].numel() * found[path].element_size() for path in tensors}
        return cls(
            template=_mapped(
                outputs,
                (),
                lambda path, leaf: (
                    _Slot(path) if isinstance(leaf, torch.Tensor) or _is_opaque(leaf) else leaf
                ),
            ),
            loss=loss,
            shown=tuple(tensors) if keep_outputs else (),
            dropped=opaque if keep_outputs else bytes_of | opaque,
            cut_off={
                i: _name(path) for i, path in enumerate(tensors) if keep_outputs and found[path].requires_grad
            },
        )

    def pick_loss(self, outputs: Outputs) -> Value:
        """The loss that the model itself computed."""
        return None if self.loss is None else _at(outputs, self.loss)

    def pick(self, outputs: Outputs) -> list[torch.Tensor]:
        """The tensors for show."""
        return [_at(outputs, path) for path in self.shown]

    def rebuild(self, loss: object, shown: list[Value]) -> Value:
        """The model's own output type. Dropped fields are left out of mappings and None elsewhere.

        Where the user's function computes the loss, the model has no place for it: the loss alone, or (loss,
        outputs).
        """
        if self.loss is None and not self.shown:
            return loss
        values = dict(zip(self.shown, shown, strict=True))
        if self.loss is not None:
            values[self.loss] = loss
        output = _mapped(
            self.template, (), lambda _, leaf: values.get(leaf.path) if isinstance(leaf, _Slot) else leaf
        )
        return output if self.loss is not None else (loss, output)


def check_loss(loss: object, where: str) -> torch.Tensor:
    """The loss, if one can be differentiated by `loss.backward()`.

    Raises:
        CaptureError: it is no tensor, no scalar, no floating-point number, or no parameter that is trained
            reaches it.
    """
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"{where} is no tensor but {_described(loss)}. {_MEND}.")
    if loss.ndim != 0:
        raise CaptureError(
            f"{where} is no scalar but {_described(loss)}. Reduce it, as in loss.mean(). {_MEND}."
        )
    if not loss.is_floating_point():
        raise CaptureError(
            f"{where} is {_described(loss)}, which has no gradient: the loss must be a floating-point number."
        )
    if not loss.requires_grad:
        raise CaptureError(
            f"{where} depends on no parameter that requires a gradient, so that there is nothing to train. "
            "Unfreeze the parameters that are to be trained (parameter.requires_grad_(True)), and keep the "
            "loss out of torch.no_grad(), detach() and item()."
        )
    return loss


def loss_in(outputs: Outputs) -> torch.Tensor:
    """The loss among what a forward returned.

    Raises:
        CaptureError: there is none.
    """
    return _at(outputs, _loss_path(outputs))


def _loss_path(outputs: Outputs) -> Path:
    """Where the loss is: the output itself, its field `loss`, or the first element of a tuple, or else its
    only trainable scalar; where gradients are disabled, its only scalar.
    """
    if isinstance(outputs, torch.Tensor) and outputs.ndim == 0:
        return ()
    kind = type(outputs).__name__
    if isinstance(outputs, (tuple, list)) and not hasattr(outputs, "loss"):
        if outputs and isinstance(outputs[0], torch.Tensor) and outputs[0].ndim == 0:
            return (0,)
        scalars = [
            at
            for at, part in enumerate(outputs)
            if isinstance(part, torch.Tensor) and part.ndim == 0 and _trainable(part)
        ]
        if len(scalars) == 1:
            return (scalars[0],)
    else:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if isinstance(loss, torch.Tensor):
            return ("loss",)
    fields = ", ".join(
        f"{_name(path)}: {_described(leaf)}"
        for path, leaf in _leaves(outputs, ())
        if isinstance(leaf, torch.Tensor)
    )
    said = (
        _described(outputs)
        if isinstance(outputs, torch.Tensor)
        else f"{kind} ({fields or 'without tensors'})"
    )
    raise CaptureError(f"The forward returned no loss, but {said}. {_MEND}.")


def _trainable(part: torch.Tensor) -> bool:
    return part.requires_grad if torch.is_grad_enabled() else part.is_floating_point()


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _children(value: object) -> dict[Any, Any] | None:
    """Key → part of a container; None for a leaf."""
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, _Slot)):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(vars(value)) if isinstance(getattr(value, "loss", None), (torch.Tensor, _Slot)) else None


def _leaves(value: object, path: Path) -> list[tuple[Path, Any]]:
    children = _children(value)
    if children is None:
        return [(path, value)]
    return [leaf for key, child in children.items() for leaf in _leaves(child, (*path, key))]


def _at(value: Value, path: Path) -> Value:
    for key in path:
        value = value[key] if isinstance(value, Mapping) or isinstance(key, int) else getattr(value, key)
    return value


def _mapped(value: object, path: Path, change: Callable[[Path, Any], Any]) -> Value:
    """A copy of the same type, its leaves changed; a mapping's entries and a tuple's parts that hold nothing
    any more go.
    """
    children = _children(value)
    if children is None:
        return change(path, value)
    parts = {key: _mapped(child, (*path, key), change) for key, child in children.items()}
    gone = {key for key, part in parts.items() if part is None and children[key] is not None}
    if isinstance(value, Mapping):
        return _mapping(type(value), {key: part for key, part in parts.items() if key not in gone})
    if isinstance(value, (tuple, list)):
        return (
            None
            if parts and path and len(gone) == len(parts)
            else _sequence(type(value), list(parts.values()))
        )
    new = copy.copy(value)
    for key, part in parts.items():
        object.__setattr__(new, key, part)
    return new


def _mapping(kind: Callable[..., object], parts: dict[Any, Any]) -> Value:
    fields = dataclasses.is_dataclass(kind)  # HuggingFace's ModelOutput
    return kind(**parts) if fields else kind(parts)


def _sequence(kind: Any, parts: list[Value]) -> Value:
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def _is_opaque(leaf: object) -> bool:
    """An object that may hold tensors and that we cannot take apart, such as a key/value cache."""
    return not isinstance(
        leaf, (torch.Tensor, _Slot, bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
    )


def _name(path: Path) -> str:
    """Readable: `logits`, `hidden_states.0`, `output` for the whole."""
    return ".".join(map(str, path)) or "output"
