"""The image encoder of a vision-language model as a graph: one image, at the sizes of an example, to rows of
features. Several images are encoded one after the other, which needs the memory of one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from effcompile.capture import images
from effcompile.capture.inference import capture
from effcompile.capture.mends import evaluating
from effcompile.capture.verify import relative_error
from effcompile.core.errors import EffcompileError
from effcompile.core.stages import first_line
from effcompile.core.types import HFModel, Value
from effcompile.ir.program import Program

#: Rows of an image alone differ by so much at the most from those beside another one: rounding.
_ALIKE = 1e-4


class EyeModule(nn.Module):
    """The image encoder of a model, its projection, and what merges patches."""

    def __init__(self, model: HFModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with _NonePadding():
            output = self.model.base_model.get_image_features(**given, return_dict=True)
        return tuple(images.rows_of(output))


class _NonePadding(TorchFunctionMode):
    """One image is none that pads a batch: where a model selects the others (Idefics 3, SmolVLM), it is one
    of them, and the graph's sizes do not follow from what it shows.
    """

    def __torch_function__(self, func: Value, types: object, args: Value = (), kwargs: Value = None) -> Value:
        return (
            args[0] if func is torch.Tensor.__getitem__ and _is_one(*args) else func(*args, **(kwargs or {}))
        )


def _is_one(whole: torch.Tensor, which: object) -> bool:
    """Whether one image is asked for by a mask over one."""
    return (
        isinstance(which, torch.Tensor)
        and which.dtype is torch.bool
        and which.shape == whole.shape[:1] == (1,)
    )


def capture_eye(model: HFModel, given: Mapping[str, torch.Tensor], several: bool) -> Program | str:
    """Its graph for images of these sizes, or why it stays as it stands in the model.

    Args:
        model: left as it was.
        given: one image, as the encoder takes it.
        several: whether these rows of features are those that it has beside other images.
    """
    if not several:
        return "it does not encode an image alone as it does beside others"
    kind = type(type(model).__name__, (EyeModule,), {})  # errors name the user's class
    try:
        with evaluating(model), torch.no_grad():
            wanted = kind(model)(**given)
            program = capture(kind(model), (), dict(given), dynamic=False)
            found = program.module(*program.flat_inputs())
    except (EffcompileError, RuntimeError, ValueError, TypeError) as error:
        return first_line(error)
    if any(isinstance(size, str) for spec in (*program.inputs, *program.outputs) for size in spec.shape):
        return "its sizes follow from what an image shows"
    if len(found) != len(wanted) or not all(map(alike, found, wanted)):
        return "what was captured computes something else"
    return images.without_unread(program)


def alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two tensors differ by rounding at the most."""
    return found.shape == wanted.shape and relative_error(found, wanted) <= _ALIKE
