"""From an unmodified Hugging Face model to one step of generation: tokens and a cache in, logits and the
longer cache out.

One graph serves prefill, prefill in chunks, the check of drafted tokens, and decoding: how many tokens are
new and how many are past are sizes of its inputs. It is traced with several new tokens, as torch.export would
take one for a constant.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from effcompile.capture import images
from effcompile.capture.any_length import refuse_one_prompt
from effcompile.capture.caches import cache_name, caches_of, layout_of, leaves_of, new_cache
from effcompile.capture.causal import check_causal, without_a_cache
from effcompile.capture.inference import capture
from effcompile.capture.mends import evaluating
from effcompile.capture.recurrences import carrying
from effcompile.capture.resumed import Seen, resumed
from effcompile.capture.rows_first import rows_first
from effcompile.capture.state import ModelGuards
from effcompile.core.errors import CaptureError, UsageError
from effcompile.core.stages import is_no_memory
from effcompile.core.types import HFModel
from effcompile.ir.cache import CacheLayout, Growth
from effcompile.ir.program import Program

#: Sizes of the traced example: none is 0 or 1, and no two that may differ are the same.
BATCH, PAST, NEW, SOURCE = 2, 12, 3, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What the step takes before its cache.

    Attributes:
        tokens: name of the token ids in the model's forward.
        mask: name of the mask over past and new tokens.
        positions: name of the position ids; "" where the forward takes none.
        rows: it takes the rows of which logits are wanted.
        source_mask: it takes a mask over the encoder's positions.
        cache: name of the cache.
        local: the mask is over new tokens alone: nothing of the cache has rows of past ones.
        counted: positions that are not given are counted in the mask, and do not go from the past on.
        images: how many tensors (image tokens, width) of what an image encoder made it takes: what stands in
            the place of image tokens, and what is added to them behind layers.
        stacked: the forward takes such a tensor as a batch of one, not as a list.
        kinds: name of what tells images' tokens (1) from text (0), past and new, for a mask by which images
            are read both ways; "" where the mask is the same for all.
        axes: how many tensors of position ids it takes, which count text, time, height and width apart; 0:
            one counts all.
    """

    tokens: str = "input_ids"
    mask: str = "attention_mask"
    positions: str = ""
    rows: bool = False
    source_mask: bool = False
    counted: bool = False
    cache: str = "past_key_values"
    local: bool = False
    images: int = 0
    stacked: bool = False
    kinds: str = ""
    axes: int = 0


@dataclass(frozen=True, kw_only=True)
class GenerationStep:
    """A captured step of generation.

    Attributes:
        program: inputs are tokens, mask and what `boundary` says, and the leaves of `layout`; outputs are
            logits and the leaves that are written.
        source: of an encoder-decoder, what makes the leaves of cross-attention from the encoder's output.
        encoder: of an encoder-decoder, its encoder; inputs as generate() gives them.
        image: of a model that takes images, what stands for one.
        eye: what encodes one; None: it stays as it stands in the model.
    """

    program: Program
    boundary: Boundary
    layout: CacheLayout
    source: Program | None = None
    encoder: Program | None = None
    image: images.ImageToken | None = None
    eye: Program | None = None

    def before(self, edit: Callable[[Program], Program]) -> GenerationStep:
        """With what runs before the first token edited."""
        encoder, source, eye = (graph and edit(graph) for graph in (self.encoder, self.source, self.eye))
        return replace(self, encoder=encoder, source=source, eye=eye)


class StepModule(nn.Module):
    """The model as a function of flat tensors: `forward(tokens, mask, ..., cache leaf by leaf)`."""

    def __init__(self, model: HFModel, boundary: Boundary, layout: CacheLayout) -> None:
        super().__init__()
        self.model, self.boundary, self.layout = model, boundary, layout

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, past: Sequence[torch.Tensor], **more: Any
    ) -> dict[str, Any]:
        seen = Seen(past=mask.shape[1] - tokens.shape[1], leaves=list(past))
        self._tie(seen)
        cache = resumed(self.layout, seen, encoded=self.model.config.is_encoder_decoder)
        given = {
            self.boundary.tokens: tokens,
            self.boundary.mask: mask,
            self.boundary.cache: cache,
            "use_cache": True,
        }
        if self.boundary.positions:
            positions = more["positions"]
            given[self.boundary.positions] = torch.stack(positions) if self.boundary.axes else positions
        if self.boundary.rows:
            given["logits_to_keep"] = more["rows"]
        if self.boundary.images:
            given[images.ENCODED] = {"image": images.seen(more["images"], self.boundary.stacked)}
        if self.boundary.kinds:
            given[self.boundary.kinds] = more["kinds"]
        if self.model.config.is_encoder_decoder:
            given |= self._encoded(seen, more)
        with carrying(self.model, cache) if self.layout.states else contextlib.nullcontext():
            outputs = self.model(**given, return_dict=True)
        after = leaves_of(outputs[self.boundary.cache], self.layout)
        return {"logits": outputs.logits, "next": [after[at] for at in self.layout.written]}

    def _tie(self, seen: Seen) -> None:
        """Tell tracing which sizes are one: rows of the leaves that grow alike, and of those that keep all,
        the past tokens.
        """
        rows: dict[tuple[Growth, int], int] = {}
        if self.boundary.local and seen.past:
            raise ValueError(f"a mask over {seen.past} more tokens than are new")
        for leaf, tensor in zip(self.layout, seen.leaves, strict=True):
            if leaf.growth is not Growth.STATE:
                known = (
                    seen.past
                    if leaf.growth is Growth.FULL
                    else rows.setdefault((leaf.growth, leaf.window), tensor.shape[2])
                )
                if tensor.shape[2] != known:
                    raise ValueError(f"{leaf.name} has {tensor.shape[2]} rows where there are {known}")

    def _encoded(self, seen: Seen, more: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The encoder's output, of which a decoder whose cross-attention is cached reads the sizes alone."""
        at = next(i for i, leaf in enumerate(self.layout) if leaf.growth is Growth.SOURCE)
        keys = seen.leaves[at]
        hidden = keys.new_zeros((keys.shape[0], keys.shape[2], self.model.config.hidden_size))
        masks = {"attention_mask": more["source_mask"]} if self.boundary.source_mask else {}
        return {"encoder_outputs": encoder_output(hidden), **masks}


class SourceModule(nn.Module):
    """What a decoder caches of the encoder's output: keys and values of its cross-attention, leaf by leaf."""

    def __init__(self, model: HFModel, boundary: Boundary, layout: CacheLayout) -> None:
        super().__init__()
        self.model, self.boundary, self.layout = model, boundary, layout

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = new_cache(self.model)
        outputs = self.model(
            encoder_outputs=encoder_output(hidden),
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **{self.boundary.tokens: tokens},
        )
        leaves = leaves_of(outputs.past_key_values, self.layout)
        return tuple(
            leaf for leaf, what in zip(leaves, self.layout, strict=True) if what.growth is Growth.SOURCE
        )


class EncoderModule(nn.Module):
    """An encoder by a name of its own: its places are told apart from the decoder's."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, **given: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.encoder(**given, return_dict=True).last_hidden_state
        return hidden


def encoder_output(hidden: torch.Tensor) -> Any:
    """An encoder's output as a decoder's forward takes it."""
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=hidden)


def capture_step(model: HFModel, *, dynamic: bool | None = None) -> GenerationStep:
    """Capture a Hugging Face model for generation. The model is left as it was.

    Raises:
        UsageError: the model has no cache, or is none of Hugging Face's.
        CaptureError: torch.export cannot trace it.
    """
    if not hasattr(model, "config") or not hasattr(model, "generate"):
        raise UsageError(
            f"{type(model).__name__} is no Hugging Face model with generate(): mode = 'generation' needs its "
            "config and its cache. Give a model of transformers, e.g. "
            "AutoModelForCausalLM.from_pretrained(...), or plan its forward with mode = 'inference'."
        )
    if model.config.is_encoder_decoder and not _known_source(model):
        raise UsageError(
            f"The encoder of {type(model).__name__} reads {model.main_input_name} of sizes that its config "
            "does not say as those of T5, BART and Whisper do. Let it generate as it is."
        )
    with evaluating(model), torch.no_grad():
        example = _Example.of(model)
        kind = type(type(model).__name__, (StepModule,), {})  # errors name the user's class
        module = kind(model, example.boundary, example.layout)
        if example.layout.states:
            module(**example.inputs)  # what it cannot carry, it says
        still = [f"past_{at}" for at, leaf in enumerate(example.layout) if leaf.growth is Growth.STATE]
        with images.added_in_place(model):
            step = capture(module, (), example.inputs, dynamic=dynamic, still=still)
        assert isinstance(step.state, ModelGuards)
        step.state.leave(images.kept_positions(model, "model.model") if example.boundary.axes else ())
        if example.layout.states:
            step = rows_first(step)
        carried = {f"past_{at}": f"next_{i}" for i, at in enumerate(example.layout.written)}
        program = replace(step, carried=carried)
        image = images.ImageToken.of(model) if example.boundary.images else None
        program = program if image is None else images.without_unread(program)
        made = GenerationStep(program=program, boundary=example.boundary, layout=example.layout, image=image)
        if model.config.is_encoder_decoder:
            tokens = example.inputs["tokens"]
            source = capture(
                SourceModule(model, example.boundary, example.layout),
                (example.hidden, tokens),
                dynamic=dynamic,
            )
            # fx keeps an attention that nobody reads, as one with dropout draws numbers; with it all layers
            source.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
            source.module.recompile()
            inner = model.get_encoder()
            kind = type(type(inner).__name__, (EncoderModule,), {})
            encoder = capture(kind(inner), (), encoder_inputs(model), dynamic=dynamic)
            if dynamic is not False:
                sound = model.main_input_name == "input_features"
                refuse_one_prompt(encoder, type(model).__name__, sound=sound)
            made = replace(made, source=source, encoder=encoder)
    return made


def _known_source(model: HFModel) -> bool:
    """Whether its encoder reads token ids, or sound as Whisper's does."""
    sizes = ("max_source_positions", "num_mel_bins")
    sound = model.main_input_name == "input_features" and all(hasattr(model.config, name) for name in sizes)
    return sound or model.main_input_name == "input_ids"


def encoder_inputs(model: HFModel) -> dict[str, torch.Tensor]:
    """What generate() gives the encoder."""
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "input_features":
        frames = 2 * model.config.max_source_positions
        dtype = next(model.parameters()).dtype
        return {
            "input_features": torch.randn(BATCH, model.config.num_mel_bins, frames, generator=generator).to(
                model.device, dtype
            )
        }
    tokens = torch.randint(3, _vocabulary(model), (BATCH, SOURCE), generator=generator).to(model.device)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


@dataclass(frozen=True, kw_only=True)
class _Example:
    """Inputs to trace a step with, made by the model itself."""

    boundary: Boundary
    layout: CacheLayout
    inputs: dict[str, Any]
    hidden: torch.Tensor | None = None

    @classmethod
    def of(cls, model: HFModel) -> _Example:
        """Run the model over a few tokens and take its cache apart.

        Raises:
            UsageError: it makes no cache, or does not run.
        """
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(3, _vocabulary(model), (BATCH, PAST + NEW), generator=generator).to(
            model.device
        )
        given, hidden = _source(model, generator)
        cache, name = new_cache(model), cache_name(model)
        decoding = {"decoder_input_ids" if model.config.is_encoder_decoder else "input_ids": tokens[:, :PAST]}
        try:
            outputs = model(**decoding, **given, **{name: cache}, use_cache=True, return_dict=True)
        except Exception as error:
            if is_no_memory(error):
                raise
            raise without_a_cache(model, decoding | given, type(cache).__name__, error) from error
        made = getattr(outputs, name, None)
        if made is None or not caches_of(made):
            raise UsageError(
                f"{type(model).__name__} returns no cache that a step could carry on, so that it cannot be "
                "decoded token by token. Plan its forward with mode = 'inference'."
            )
        layout = layout_of(made)
        boundary = replace(_boundary(model, tokens), cache=name, local=not layout.grows)
        seen = 0 if boundary.local else PAST
        inputs: dict[str, Any] = {
            "tokens": tokens[:, PAST:].contiguous(),
            "mask": torch.ones((BATCH, seen + NEW), dtype=torch.int64, device=tokens.device),
        }
        if boundary.positions:
            places = torch.arange(PAST, PAST + NEW, device=tokens.device).expand(BATCH, NEW).contiguous()
            inputs["positions"] = [places.clone() for _ in range(boundary.axes)] or places
        if boundary.rows:
            inputs["rows"] = torch.arange(NEW, device=tokens.device)
        if boundary.source_mask:
            inputs["source_mask"] = torch.ones((BATCH, SOURCE), dtype=torch.int64, device=tokens.device)
        if boundary.images:
            inputs["tokens"][:, -2:] = images.token_of(model.config)  # its first are repeated at other sizes
            inputs["images"] = images.drawn(model, 2 * BATCH, boundary.images)
        if boundary.kinds:
            of_image = inputs["tokens"] == images.token_of(model.config)
            inputs["kinds"] = torch.cat(
                [torch.zeros_like(tokens[:, :PAST]), of_image.to(tokens.dtype)], dim=1
            )
        inputs["past"] = [leaf.clone() for leaf in leaves_of(made, layout)]
        return cls(boundary=boundary, layout=layout, inputs=inputs, hidden=hidden)


def _vocabulary(model: HFModel) -> int:
    size = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    if not isinstance(size, int) or size < 8:
        raise CaptureError(
            f"{type(model).__name__}.config names no vocab_size, which example tokens are drawn from."
        )
    return size


def _source(model: HFModel, generator: torch.Generator) -> tuple[dict[str, Any], torch.Tensor | None]:
    """The encoder's output that a decoder is traced with."""
    if not model.config.is_encoder_decoder:
        return {}, None
    size = (
        getattr(model.config, "max_source_positions", None)
        if model.main_input_name == "input_features"
        else None
    )
    shape = (BATCH, size or SOURCE, model.config.hidden_size)
    hidden = torch.randn(shape, generator=generator).to(model.device, next(model.parameters()).dtype)
    return {"encoder_outputs": encoder_output(hidden)}, hidden


def _boundary(model: HFModel, tokens: torch.Tensor) -> Boundary:
    """What the model's forward takes beside its cache."""
    taken = inspect.signature(model.forward).parameters
    if model.config.is_encoder_decoder:
        positions = "decoder_position_ids" if "decoder_position_ids" in taken else ""
        return Boundary(
            tokens="decoder_input_ids", mask="decoder_attention_mask", positions=positions,
            source_mask="attention_mask" in taken and model.main_input_name == "input_ids",
        )  # fmt: skip
    check_causal(model, tokens)
    positions = "position_ids" if "position_ids" in taken else ""
    counted = bool(positions) and _counts(model, tokens)
    made = Boundary(positions=positions, rows="logits_to_keep" in taken, counted=counted)
    return replace(made, **images.taken_by(model, tokens))


def _counts(model: HFModel, tokens: torch.Tensor) -> bool:
    """Whether the model counts the positions of a padded row in its mask where it is given none."""
    mask = torch.ones_like(tokens)
    mask[:, :2] = 0
    plain = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    asked = dict(input_ids=tokens, attention_mask=mask, use_cache=False, return_dict=True, **last)
    found, *candidates = (
        model(**asked, **given).logits[:, -1]
        for given in ({}, {"position_ids": plain}, {"position_ids": counted})
    )
    errors = [float((found - one).abs().max()) for one in candidates]
    return errors[1] < errors[0]
