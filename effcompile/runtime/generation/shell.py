"""A model's class around another forward: all that generate() reads of it is its own, and each
step is ours.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Never

import torch
from torch import nn
from transformers.generation.utils import GenerationMixin

from effcompile.core.errors import GuardError
from effcompile.core.types import HFClass, HFModel, Outputs

Step = Callable[..., Outputs]


def kind_around(model: HFModel, forward: Step, encoder: nn.Module | None) -> HFClass:
    """The class of what is put around a model."""
    return _class(type(model), forward, encoder, model.device, model.dtype)


def kind_inside(model: HFModel, seen: Callable[..., Outputs]) -> HFClass:
    """The class of what is put in the place of its inner model. `seen`: encodes images."""
    kind = type(model.base_model)
    return type(kind.__name__, (kind,), {"get_image_features": staticmethod(seen), "__doc__": kind.__doc__})


def around(model: HFModel, kind: HFClass, inside: HFClass | None = None) -> HFModel:
    """The model as it is now under that class. Attributes that generate() sets are not the model's.

    `inside`: class of its inner model, whose attributes are the model's own: there generate() keeps how far
    positions lie behind tokens.

    Hooks of the model stand in the step's graph; a forward that was put onto the model is what the graph was
    made of.
    """
    made = object.__new__(kind)
    made.__dict__ = {**model.__dict__, **_without_hooks()}
    made.__dict__.pop("forward", None)
    if inside is not None and model.base_model is not model:
        inner = object.__new__(inside)
        inner.__dict__ = model.base_model.__dict__
        made.__dict__["_modules"] = {**model._modules, model.base_model_prefix: inner}
    return made


def of_an_assistant(name: str) -> bool:
    """Whether a larger model's generate() asks for it that lets this one write its drafts."""
    return name in ("device", "dtype") or (not name.startswith("__") and hasattr(GenerationMixin, name))


def _without_hooks() -> dict[str, object]:
    return {name: OrderedDict() for name in vars(nn.Module()) if name.endswith("_hooks")}


def empty(
    kind: HFClass,
    config: Any,
    generation_config: Any,
    forward: Step,
    encoder: nn.Module | None,
    device: torch.device,
    inner: HFModel = None,
) -> nn.Module:
    """The same of a model that is not there: its class and its configs, no weights.

    `device`: of the step's own. `inner`: of a model of images and text, see `inside`; a class with a
    generate() of its own reads settings of its inner modules (Whisper strides), which have no data.
    """
    if inner is None and kind.generate is not GenerationMixin.generate:
        inner = _without_data(kind, config)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    made = kind.__new__(_class(kind, forward, encoder, device, dtype))
    nn.Module.__init__(made)
    made.config, made.generation_config = config, generation_config
    if inner is not None:
        setattr(made, kind.base_model_prefix, inner)
    made.eval()
    return made


def inside(kind: HFClass, config: Any) -> HFModel:
    """The inner model of a model of images and text, without data: generate() calls its methods."""
    inner = _without_data(kind, config)
    inner.get_video_features = _blind
    return inner


def _without_data(kind: HFClass, config: Any) -> HFModel:
    with torch.device("meta"):
        return kind(config).base_model


def _blind(pixel_values_videos: torch.Tensor | None = None, **kwargs: object) -> Never:
    raise GuardError(
        "A planned step takes images and text, and no video. Let the model itself read it.",
        place="inputs['pixel_values_videos']",
    )


def _class(
    kind: HFClass, forward: Step, encoder: nn.Module | None, device: torch.device, dtype: torch.dtype
) -> HFClass:
    """A subclass with another forward, which has the signature of the class's own: generate() reads it, the
    device and the dtype.
    """

    @functools.wraps(kind.forward)
    def stepped(self: nn.Module, *args: object, **kwargs: object) -> Outputs:
        return forward(*args, **kwargs)

    members: dict[str, Any] = {"forward": stepped, "device": device, "dtype": dtype, "__doc__": kind.__doc__}
    if encoder is not None:
        members["get_encoder"] = lambda self, *args, **kwargs: encoder
    return type(kind.__name__, (kind,), members)
