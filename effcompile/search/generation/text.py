"""Texts to measure errors on: the user's, or what the model itself writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from effcompile.capture.caches import cache_name, leaves_of, new_cache
from effcompile.capture.generation import GenerationStep, encoder_output
from effcompile.capture.mends import evaluating
from effcompile.core.errors import InputsError
from effcompile.core.types import Args, HFModel, Inputs, Kwargs
from effcompile.ir.cache import CacheLayout, Growth
from effcompile.ops.few_rows import ByFewRows
from effcompile.runtime.generation.images import between

#: Rows and tokens of text that the model writes: enough to price options with, little to wait for.
_ROWS, _TOKENS = 4, 48
#: Of them those of each row that errors of options are measured on: rows are draws of their own, and
#: twice as many tokens take twice as long. What was decided is compared on all.
_SENSED = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationText:
    """A text to measure errors on.

    Attributes:
        tokens: ids (rows, tokens); of an encoder-decoder the decoder's.
        extra: what the model's forward takes beside them: an encoder's output, and its mask.
        source: what the encoder is given, by name and in its order.
        cross: what a step caches of that output, leaf by leaf.
        images: rows for its image tokens, as a step takes them.
        image_token: the id of those; `extra` has what the model's forward takes of them.
        kinds: which tokens are images', where a step is told.
        pictures: what the image encoder is given; `first`: of the first image alone.
        uncut: the tokens that these images are of, where `tokens` are fewer.
        whole: options' errors are measured on all of it.
    """

    tokens: torch.Tensor
    extra: Kwargs = field(default_factory=dict)
    source: Mapping[str, torch.Tensor] = field(default_factory=dict)
    cross: tuple[torch.Tensor, ...] = ()
    images: tuple[torch.Tensor, ...] = ()
    image_token: int = -1
    kinds: torch.Tensor | None = None
    pictures: Kwargs = field(default_factory=dict)
    first: Mapping[str, torch.Tensor] = field(default_factory=dict)
    uncut: torch.Tensor | None = None
    whole: bool = True

    def beginning(self, tokens: int) -> CalibrationText:
        """The first tokens of each row."""
        images = between(self.tokens, self.image_token, self.images, 0, tokens)
        kinds = None if self.kinds is None else self.kinds[:, :tokens]
        return replace(self, tokens=self.tokens[:, :tokens], images=tuple(images), kinds=kinds)


def calibration_texts(
    model: HFModel, step: GenerationStep, given: Sequence[Inputs] | None, context: int
) -> tuple[list[CalibrationText], str]:
    """A text for each input, and where they are from.

    Of an encoder-decoder an input has what its encoder takes; without `decoder_input_ids` or `labels` the
    model writes the text behind it.

    Raises:
        InputsError: an input of the user's without token ids, or with fewer than two of a row.
    """
    if given:
        read = _translated if model.config.is_encoder_decoder else _continued
        texts = [read(model, step, args, kwargs, at, context) for at, (args, kwargs) in enumerate(given)]
        behind = any(
            kwargs.get(name) is not None for _, kwargs in given for name in ("decoder_input_ids", "labels")
        )
        count = sum(text.tokens.numel() for text in texts)
        if model.config.is_encoder_decoder and not behind:
            return (
                texts,
                f"{count} tokens that the model itself writes behind the user's inputs (sampled, seed 0)",
            )
        return texts, f"the user's: {count} tokens"
    tokens, vocabulary = min(_TOKENS, context), model.config.get_text_config(decoder=True).vocab_size
    seen = min(tokens, _SENSED)
    drawn = torch.randint(
        min(3, vocabulary - 1),
        vocabulary,
        (_ROWS, 1 if step.encoder is None else tokens),
        generator=torch.Generator().manual_seed(0),
    ).to(model.device)
    if step.encoder is None:
        written = _written(model, drawn, tokens, {})
        said = f"{_ROWS} rows of {seen} tokens that the model itself writes (sampled, seed 0)"
        return [CalibrationText(tokens=written, whole=False)], said
    source = {name: value[:1].expand(_ROWS, *value.shape[1:]) for name, value in step.encoder.kwargs.items()}
    made = _behind(model, step, drawn, source)
    return [replace(made, whole=False)], f"{_ROWS} rows of {seen} random tokens (seed 0)"


def longest_source(texts: Sequence[CalibrationText]) -> Mapping[str, torch.Tensor]:
    """What the encoder is given of the longest; nothing where there is none."""
    sources = [text.source for text in texts if text.source]
    return max(sources, key=lambda source: next(iter(source.values()))[0].numel(), default={})


def sensed(texts: Sequence[CalibrationText]) -> list[CalibrationText]:
    """What options' errors are measured on: of those that are not the user's the beginnings."""
    return [text if text.whole else text.beginning(_SENSED) for text in texts]


def _continued(
    model: HFModel, step: GenerationStep, args: Args, kwargs: Kwargs, at: int, context: int
) -> CalibrationText:
    found = next(
        (kwargs[name] for name in ("input_ids", "decoder_input_ids") if name in kwargs),
        args[0] if args else None,
    )
    return CalibrationText(tokens=_ids(found, "input_ids", at)[:, :context])


def _translated(
    model: HFModel, step: GenerationStep, args: Args, kwargs: Kwargs, at: int, context: int
) -> CalibrationText:
    """What an encoder is given, and the text behind it: the user's, or the model's own."""
    assert step.encoder is not None  # the model has one
    main, taken = model.main_input_name, step.encoder.kwargs
    given: Mapping[str, Any] = {**({main: args[0]} if args else {}), **kwargs}
    source = given.get(main)
    like = taken[main]
    if (
        not isinstance(source, torch.Tensor)
        or source.dim() != like.dim()
        or source.is_floating_point() != like.is_floating_point()
    ):
        raise InputsError(
            f"calibration[{at}] has no {main} for the encoder, as a tensor of {like.dim()} dimensions. Give "
            f"{{{main!r}: …}}, and the text behind it as 'decoder_input_ids' or 'labels' if there is one."
        )
    mask = given.get("attention_mask")
    brought = {main: source, "attention_mask": torch.ones_like(source) if mask is None else mask}
    inputs = {name: brought[name] for name in taken}
    if given.get("decoder_input_ids") is not None:
        tokens = _ids(given["decoder_input_ids"], "decoder_input_ids", at)
    elif given.get("labels") is not None:
        tokens = _shifted(model, _ids(given["labels"], "labels", at))
    else:
        first = source.new_full((len(source), 1), _start(model), dtype=torch.int64)
        tokens = _written(model, first, min(_TOKENS, context), _encoded(model, step, inputs))
    if len(tokens) != len(source):
        raise InputsError(
            f"calibration[{at}] has {len(source)} rows of {main} and {len(tokens)} of the text behind it. "
            "Give as many."
        )
    return _behind(model, step, tokens[:, :context], inputs)


def _shifted(model: HFModel, labels: torch.Tensor) -> torch.Tensor:
    """The decoder's inputs of labels, shifted as Hugging Face does; what a loss leaves out is padding."""
    first = labels.new_full((len(labels), 1), _start(model))
    padding = getattr(model.config, "pad_token_id", None) or 0
    return torch.cat([first, labels[:, :-1].masked_fill(labels[:, :-1] < 0, padding)], dim=1)


def _start(model: HFModel) -> int:
    """The id that its decoder begins with; 0 where no configuration says one."""
    configs = (getattr(model, "generation_config", None), model.config)
    names = ("decoder_start_token_id", "bos_token_id")
    told = (getattr(config, name, None) for name in names for config in configs)
    return next((found for found in told if isinstance(found, int)), 0)


def _encoded(model: HFModel, step: GenerationStep, inputs: Kwargs) -> Kwargs:
    """An encoder's output, as the model's forward takes it."""
    with evaluating(model), torch.no_grad():
        hidden = model.get_encoder()(**inputs, return_dict=True).last_hidden_state
    masks = {"attention_mask": inputs["attention_mask"]} if step.boundary.source_mask else {}
    return {"encoder_outputs": encoder_output(hidden), **masks}


def _behind(
    model: HFModel, step: GenerationStep, tokens: torch.Tensor, source: Mapping[str, torch.Tensor]
) -> CalibrationText:
    """A text behind what an encoder is given, with what a step caches of its output."""
    names, extra = step.boundary, _encoded(model, step, source)
    given = {names.tokens: tokens[:, :1], names.cache: new_cache(model), **extra}
    with evaluating(model), torch.no_grad():
        outputs = model(**given, use_cache=True, return_dict=True)
    leaves = zip(leaves_of(outputs[names.cache], step.layout), step.layout, strict=True)
    cross = tuple(leaf for leaf, what in leaves if what.growth is Growth.SOURCE)
    return CalibrationText(tokens=tokens, extra=extra, source=source, cross=cross)


def _ids(found: object, name: str, at: int) -> torch.Tensor:
    if (
        not isinstance(found, torch.Tensor)
        or found.dim() != 2
        or found.is_floating_point()
        or found.shape[1] < 2
    ):
        raise InputsError(
            f"calibration[{at}] has no {name} of (rows, tokens), at least two tokens of a row. Give "
            f"{{{name!r}: ids}}."
        )
    return found


def _written(model: HFModel, first: torch.Tensor, tokens: int, extra: Kwargs) -> torch.Tensor:
    """Sampled from the model, one token after the other, beginning with these."""
    devices = [model.device] if model.device.type == "cuda" else []
    key = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    with torch.random.fork_rng(devices=devices), torch.no_grad(), ByFewRows():
        torch.manual_seed(0)
        cache, name = None, cache_name(model)
        ids = step = first
        while ids.shape[1] < tokens:
            outputs = model(**{key: step, name: cache}, **extra, use_cache=True, return_dict=True)
            cache = outputs[name]
            step = torch.multinomial(outputs.logits[:, -1].float().softmax(-1), 1)
            ids = torch.cat([ids, step], dim=1)
    return ids


def as_inputs(text: CalibrationText, layout: CacheLayout, like: Kwargs) -> Inputs:
    """A text as the inputs of a step of this layout, all its tokens new, an empty cache; dtypes and sizes are
    those of `like`.
    """
    ids, cross = text.tokens, iter(text.cross)
    rows, tokens = ids.shape
    places = torch.arange(tokens, device=ids.device).expand(rows, tokens).contiguous()
    axes = text.extra.get("position_ids", [places] * len(like.get("positions", ())))
    given: dict[str, Any] = {
        "tokens": ids.contiguous(),
        "mask": torch.ones_like(ids),
        "positions": places
        if isinstance(like.get("positions"), torch.Tensor)
        else [one.contiguous() for one in axes],
        "rows": torch.arange(tokens, device=ids.device),
        "images": list(text.images),
        "kinds": text.kinds if text.kinds is not None else torch.zeros_like(ids),
        "past": [
            next(cross)
            if what.growth is Growth.SOURCE
            else leaf.new_zeros((rows, *leaf.shape[1:]))
            if what.growth is Growth.STATE
            else leaf.new_empty((rows, leaf.shape[1], 0, leaf.shape[3]))
            for leaf, what in zip(like["past"], layout, strict=True)
        ],
    }
    if "source_mask" in like:
        given["source_mask"] = text.extra["attention_mask"].contiguous()
    return (), {name: given[name] for name in like}
