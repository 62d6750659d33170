"""Images in a text, as Hugging Face's forward takes them once an encoder has read them: rows of features in
the place of image tokens (`mm_encoder_outputs`, transformers 5.23).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from effcompile.core.types import HFConfig, HFModel, Kwargs, Outputs
from effcompile.ir.program import Program

P = ParamSpec("P")
R = TypeVar("R")

#: Argument of a forward that brings what encoders made of images and videos.
ENCODED = "mm_encoder_outputs"

#: Arguments that tell images' tokens from text: for positions, and for masks.
KINDS = ("token_type_ids", "mm_token_type_ids")
#: Sizes of images, which image encoders and positions are computed of.
SIZES = ("image_grid_thw", "image_sizes")


def token_of(config: HFConfig) -> int | None:
    """The id of a token that stands for a row of an image; None where there is none."""
    found = getattr(config, "image_token_id", None)
    return found if isinstance(found, int) else None


def axes_of(config: HFConfig) -> int:
    """How many axes position ids have: text's, and those of a rotation in sections (time, height, width); 0
    where one counts all.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    sections = rope.get("mrope_section") if isinstance(rope, dict) else None
    return 1 + len(sections) if sections else 0


def kept_positions(model: HFModel, prefix: str) -> frozenset[str]:
    """Places where generate() keeps how far positions lie behind the tokens; a forward that is given
    positions does not read them.
    """
    return frozenset(
        f"{prefix}.{name}.rope_deltas".replace("..", ".")
        for name, module in model.named_modules()
        if hasattr(module, "rope_deltas")
    )


def forgetting(function: Callable[Concatenate[HFModel, P], R]) -> Callable[Concatenate[HFModel, P], R]:
    """A function of a model, which runs while that knows nothing of the positions of a text generated before:
    a forward that is given none counts from them, whatever text it reads.
    """

    @functools.wraps(function)
    def run(model: HFModel, /, *args: P.args, **kwargs: P.kwargs) -> R:
        counting: list[Any] = [part for part in _parts(model) if hasattr(part, "rope_deltas")]
        kept = [part.rope_deltas for part in counting]
        for part in counting:
            part.rope_deltas = None
        try:
            return function(model, *args, **kwargs)
        finally:
            for part, positions in zip(counting, kept, strict=True):
                part.rope_deltas = positions

    return run


def _parts(model: object) -> Iterable[nn.Module]:
    return model.modules() if isinstance(model, nn.Module) else ()


def tensors_of(model: HFModel) -> int:
    """How many tensors a forward takes of images: what stands in the place of their tokens, and what is added
    to that behind layers (deepstack); 0 where it takes none.
    """
    taken = inspect.signature(model.forward).parameters
    if ENCODED not in taken or token_of(model.config) is None:
        return 0
    eye = getattr(model.config, "vision_config", None)
    return 1 + len(getattr(eye, "deepstack_visual_indexes", None) or ())


def seen(tensors: Sequence[torch.Tensor], stacked: bool) -> Outputs:
    """Rows of features (image tokens, width) as an encoder's output.

    `stacked`: the model reads a tensor [1, image tokens, width], not a list.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    rows: Any = tensors[0][None] if stacked else [tensors[0]]
    found: Outputs = BaseModelOutputWithPooling(pooler_output=rows)
    found.deepstack_features = [[each] for each in tensors[1:]]
    return found


@dataclass(frozen=True, slots=True)
class ImageToken:
    """What stands for a row of an image in a text.

    Attributes:
        id: of the token.
        row: (1, width), that it is embedded as where no image is given.
    """

    id: int
    row: torch.Tensor

    @classmethod
    def of(cls, model: HFModel) -> ImageToken:
        """That of a model that has one: as what its forward gives to its language model is."""
        token = token_of(model.config)
        assert token is not None
        ids, read = torch.full((1, 2), token, device=model.device), list[torch.Tensor]()

        def hook(module: nn.Module, args: object, kwargs: Kwargs) -> None:
            if kwargs.get("inputs_embeds") is not None:
                read.append(kwargs["inputs_embeds"])

        hooks = [part.register_forward_pre_hook(hook, with_kwargs=True) for part in model.modules()]
        try:
            with torch.no_grad():
                model(input_ids=ids, use_cache=False)
        finally:
            for each in hooks:
                each.remove()
        with torch.no_grad():
            rows = read[0] if read else model.get_input_embeddings()(ids)
        return cls(token, rows[0, :1].clone())


def drawn(model: HFModel, rows: int, count: int) -> list[torch.Tensor]:
    """What an image encoder might make of images with so many tokens in all (seed 0)."""
    generator, like = torch.Generator().manual_seed(0), next(model.parameters())
    shape = (rows, model.config.get_text_config().hidden_size)
    return [torch.randn(shape, generator=generator).to(like) for _ in range(count)]


def taken_by(model: HFModel, tokens: torch.Tensor) -> Kwargs:
    """In which form a forward takes rows of images, as `Boundary` has it; nothing where it takes none.

    `tokens`: ids (rows, tokens) of a text, to try it with.
    """
    if not (count := tensors_of(model)):
        return {}
    token = token_of(model.config)
    assert token is not None
    tokens = torch.cat([torch.full_like(tokens[:, :2], token), tokens[:, 2:]], dim=1)
    made = drawn(model, 2 * len(tokens), count)
    for stacked in (False, True):
        given = {"input_ids": tokens, ENCODED: {"image": seen(made, stacked)}}
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError, IndexError):
            model(**given, use_cache=False, return_dict=True)
            return {
                "images": count,
                "stacked": stacked,
                "kinds": _kinds(model, given),
                "axes": axes_of(model.config),
            }
    return {}


def _kinds(model: HFModel, given: Kwargs) -> str:
    """The name by which a forward is told images' tokens where its mask depends on them."""
    plain = torch.zeros_like(given["input_ids"])
    told = (given["input_ids"] == token_of(model.config)).to(plain.dtype)
    for name in KINDS:
        if name in inspect.signature(model.forward).parameters:
            without, with_them = (
                model(**given, **{name: kinds}, use_cache=False, return_dict=True).logits
                for kinds in (plain, told)
            )
            if not torch.equal(without, with_them):
                return name
    return ""


@contextlib.contextmanager
def added_in_place(model: HFModel) -> Iterator[None]:
    """Rows that are added to those of image tokens behind layers (Qwen3-VL's deepstack) are, without counting
    these: Hugging Face's own code selects them, and no graph with sizes that depend on values can be saved.
    """
    name = "_deepstack_process"
    within = [vars(module) for module in model.modules() if hasattr(module, name)]
    own = [held.get(name) for held in within]
    for held in within:
        held[name] = _added
    try:
        yield
    finally:
        for held, was in zip(within, own, strict=True):
            del held[name]
            if was is not None:  # an own one, put on by the user
                held[name] = was


def _added(hidden: torch.Tensor, there: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`hidden` (rows, tokens, width) with the rows added where `there` (rows, tokens) is true."""
    return hidden + torch.zeros_like(hidden).masked_scatter(there[..., None], rows.to(hidden.dtype))


def without_unread(program: Program) -> Program:
    """The program without parameters and buffers that its graph does not read: torch.export leaves those of
    an image encoder in the step, of some models, and a step's weights are counted.
    """
    read = {str(node.target) for node in program.graph.find_nodes(op="get_attr")}
    for path, module in program.module.named_modules():
        for table in (module._parameters, module._buffers):
            for name in [name for name in table if f"{path}.{name}".lstrip(".") not in read]:
                del table[name]
    return program


def features(output: Outputs) -> Outputs:
    """Of an encoder's output what takes the place of image tokens, and what is added to that."""
    names = ("pooler_output", "deepstack_features")
    kept: Outputs = type(output)(**{n: output[n] for n in names if output.get(n) is not None})
    return kept


def made_of(rows: Sequence[Sequence[torch.Tensor]]) -> Outputs:
    """An encoder's output of rows of features, image by image: those in the place of image tokens, and those
    that are added behind layers.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    found: Outputs = BaseModelOutputWithPooling()
    found["pooler_output"] = list(rows[0])
    if rows[1:]:
        found["deepstack_features"] = [list(each) for each in rows[1:]]
    return found


def rows_of(output: Outputs) -> list[torch.Tensor]:
    """The rows of features of an encoder's output, of all its images one behind the other."""
    behind = getattr(output, "deepstack_features", None) or ()
    return [_rows(output.pooler_output), *map(_rows, behind)]


def _rows(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    parts = [features] if isinstance(features, torch.Tensor) else list(features)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
