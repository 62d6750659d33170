"""Calls of a Hugging Face forward, answered by a lowered step."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import modeling_outputs

from effcompile.capture import images
from effcompile.capture.caches import CACHE_NAMES, HFCache, check_cache, new_cache_of, seen_by
from effcompile.core.errors import GuardError
from effcompile.core.types import Forward, HFClass, Kwargs, Outputs
from effcompile.runtime.generation.eye import Eye
from effcompile.runtime.generation.images import by_axis, encoded, kinds_of, rows_for
from effcompile.runtime.generation.steps import LoweredStep

#: Arguments of a forward that change nothing here, or that generate() gives always.
_SILENT = frozenset({"use_cache", "return_dict", "cache_position", "encoder_outputs", "logits_to_keep"})
#: Dtypes of token ids.
_WHOLE = (torch.int64, torch.int32)


class Stepper:
    """Calls of a Hugging Face forward, answered by a lowered step.

    `encoder`: gives the encoder's output of a call that brings what it reads in the place of it; `eye`: the
    image encoder's.
    """

    def __init__(
        self,
        step: LoweredStep,
        forward: Forward,
        config: Any,
        encoder: Callable[[Kwargs], Outputs | None] | None = None,
        eye: Eye | None = None,
    ) -> None:
        self.step, self.config, self._encoder, self._eye = step, config, encoder, eye
        self._parameters = list(inspect.signature(forward).parameters)[1:]
        taken = {step.boundary.tokens, step.boundary.mask, step.boundary.positions, step.boundary.cache}
        self._known = (
            taken
            | _SILENT
            | ({images.ENCODED, *images.KINDS, *images.SIZES} if step.boundary.images else set())
            | (eye.names if eye else set())
            | ({"attention_mask", "input_ids", "input_features"} if config.is_encoder_decoder else set())
        )

    def __call__(self, *args: object, **kwargs: Any) -> Outputs:
        given: dict[str, Any] = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        for name in CACHE_NAMES:  # another transformers may have planned it, and saved it so
            if (held := given.pop(name, None)) is not None:
                given[self.step.boundary.cache] = held
        if not given.get(images.ENCODED):  # generate() gives it without images, too
            given.pop(images.ENCODED, None)
        self._check(given)
        tokens = given[self.step.boundary.tokens]
        cache = given.get(self.step.boundary.cache)
        cache = new_cache_of(self.config) if cache is None else cache
        check_cache(cache, self.step.layout, self.step.boundary.cache)
        encoded = given.get("encoder_outputs")
        if encoded is None and self._encoder is not None:
            encoded = self._encoder(given)
        hidden = None if encoded is None else encoded[0]
        rows, order = _rows(given.get("logits_to_keep"), tokens)
        logits = self.step(self._inputs(given, tokens, cache, hidden, rows), cache, hidden)
        logits = logits if self.step.boundary.rows or rows is None else logits[:, rows]
        logits = logits if order is None else logits[:, order]
        made = self._outputs(logits, cache if given.get("use_cache") is not False else None, hidden)
        whole = given.get("return_dict")
        return made if (self.config.return_dict if whole is None else whole) else made.to_tuple()

    def flat(self, tokens: torch.Tensor, cache: HFCache, extra: Kwargs) -> list[torch.Tensor]:
        """The graph's inputs of such a call."""
        encoded = extra.get("encoder_outputs")
        hidden = None if encoded is None else encoded[0]
        last = torch.arange(tokens.shape[1] - 1, tokens.shape[1], device=tokens.device)
        return self.step.flat(self._inputs({}, tokens, cache, hidden, last), cache, hidden)

    def _check(self, given: Kwargs) -> None:
        """Refuse what no step computes.

        Raises:
            GuardError: an argument that changes the result, and that the step was not captured with.
        """
        boundary = self.step.boundary
        tokens = given.get(boundary.tokens)
        if tokens is None:
            raise GuardError(
                f"A planned step takes {boundary.tokens}; embeddings in their place are not planned for. "
                f"Give {boundary.tokens}, or run the model itself.",
                place="inputs",
            )
        check_tokens(boundary.tokens, tokens)
        unknown = [
            name
            for name, value in given.items()
            if name not in self._known and value is not None and value is not False
        ]
        if unknown:
            raise GuardError(
                f"{unknown[0]} is not planned for: a step takes {', '.join(sorted(self._known - {''}))}. "
                "Leave it out, or run the model itself.",
                place=f"inputs[{unknown[0]!r}]",
            )

    def _inputs(
        self,
        given: Kwargs,
        tokens: torch.Tensor,
        cache: HFCache,
        hidden: torch.Tensor | None,
        rows: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """The step's inputs by name. `rows`: the new positions whose logits are wanted; None: all."""
        boundary, new = self.step.boundary, tokens.shape[1]
        past = 0 if boundary.local else seen_by(cache)
        mask = given.get(boundary.mask)
        if boundary.local and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            mask = mask[:, -new:]  # of tokens that are past nothing is left to hide
        if mask is None:
            mask = tokens.new_ones((tokens.shape[0], past + new))
        if not isinstance(mask, torch.Tensor) or mask.shape != (tokens.shape[0], past + new):
            found = list(mask.shape) if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
            raise GuardError(
                f"{boundary.mask} is {found}; the plan takes [{tokens.shape[0]} × {past + new}]: a 1 or 0 "
                f"for each of the {past} past and {new} new tokens.",
                place=f"inputs[{boundary.mask!r}]",
            )
        inputs = {"tokens": tokens.to(torch.int64).contiguous(), "mask": whole_numbers(mask, boundary.mask)}
        if boundary.rows:
            inputs["rows"] = torch.arange(new, device=tokens.device) if rows is None else rows
        if boundary.positions:
            inputs |= self._positions(given.get(boundary.positions), inputs["mask"], past, tokens)
        if boundary.source_mask:
            inputs["source_mask"] = _source_mask(given.get("attention_mask"), hidden)
        return inputs | self._images(given, tokens, inputs["mask"])

    def _images(self, given: Kwargs, tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """The rows of images among the tokens, by name."""
        if self.step.image is None:
            return {}
        boundary, made = self.step.boundary, encoded(given, self._eye)
        if made is not None and boundary.axes and given.get(boundary.positions) is None:
            raise GuardError(
                f"{boundary.positions} of a text with images depend on their sizes. Give them as generate() "
                f"does ({boundary.axes} × rows × tokens).",
                place=f"inputs[{boundary.positions!r}]",
            )
        rows = {
            f"images_{at}": each
            for at, each in enumerate(rows_for(tokens, self.step.image, made, boundary.images))
        }
        if boundary.kinds:
            rows["kinds"] = kinds_of(given.get(boundary.kinds), mask, tokens, boundary.kinds)
        return rows

    def _positions(
        self, given: torch.Tensor | None, mask: torch.Tensor, past: int, tokens: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Position ids by name, as they were given or as the model counts them."""
        name, axes = self.step.boundary.positions, self.step.boundary.axes
        if given is None and self.step.boundary.counted:
            given = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
        elif given is None:
            given = torch.arange(past, past + tokens.shape[1], device=tokens.device).expand(tokens.shape)
        if not axes:
            return {"positions": _spread(given, tokens, name).contiguous()}
        each = enumerate(by_axis(given, axes))
        return {f"positions_{at}": _spread(one, tokens, name).contiguous() for at, one in each}

    def _outputs(self, logits: torch.Tensor, cache: HFCache | None, hidden: torch.Tensor | None) -> Outputs:
        if self.config.is_encoder_decoder:
            seq2seq = modeling_outputs.Seq2SeqLMOutput
            return seq2seq(logits=logits, encoder_last_hidden_state=hidden, **_held(seq2seq, cache))
        kind: HFClass = modeling_outputs.CausalLMOutputWithPast
        if self.step.boundary.cache == "cache_params":
            from transformers.models.mamba.modeling_mamba import MambaCausalLMOutput

            kind = MambaCausalLMOutput
        return kind(logits=logits, **_held(kind, cache))


def _held(kind: HFClass, cache: HFCache | None) -> dict[str, HFCache | None]:
    """The cache by the name that such outputs have for it."""
    named = [field.name for field in dataclasses.fields(kind)]
    return {next(name for name in CACHE_NAMES if name in named): cache}


def _spread(given: torch.Tensor, tokens: torch.Tensor, name: str) -> torch.Tensor:
    """Position ids of each token.

    Raises:
        GuardError: they have another size, or fractions.
    """
    if given.dim() != 2 or any(
        size not in (1, wanted) for size, wanted in zip(given.shape, tokens.shape, strict=True)
    ):
        raise GuardError(
            f"{name} is {list(given.shape)}; the plan takes {list(tokens.shape)}.", place=f"inputs[{name!r}]"
        )
    return whole_numbers(given.expand(tokens.shape), name)


def whole_numbers(given: torch.Tensor, name: str) -> torch.Tensor:
    """Numbers as the graph takes them.

    Raises:
        GuardError: fractions, that would be cut off.
    """
    if given.is_floating_point() and bool((given != given.round()).any()):
        raise GuardError(f"{name} has fractions; the plan takes whole numbers.", place=f"inputs[{name!r}]")
    return given.to(torch.int64)


def check_tokens(name: str, tokens: object) -> None:
    """Raises GuardError for what is no token ids [rows × tokens]."""
    whole = isinstance(tokens, torch.Tensor) and tokens.dtype in _WHOLE
    if not isinstance(tokens, torch.Tensor) or not whole or tokens.dim() != 2 or not tokens.numel():
        raise GuardError(
            f"{name} must be token ids: a tensor [rows × tokens] of whole numbers, not empty.", place="inputs"
        )


def _rows(
    keep: int | torch.Tensor | None, tokens: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Which new positions' logits are wanted, each once and in order; None: all.

    And how these stand in the answer; None: as they are.

    Raises:
        GuardError: positions that no new token has.
    """
    if keep is None or (isinstance(keep, int) and keep == 0):
        return None, None
    if isinstance(keep, int):
        # a negative number leaves so many out at the beginning, as it does in the models
        first, end, _ = slice(-keep, None).indices(tokens.shape[1])
        return torch.arange(first, max(first, end), device=tokens.device), None
    new = torch.arange(tokens.shape[1], device=tokens.device)
    try:
        found = new[keep]
        if found.dim() != 1:
            raise IndexError
    except IndexError as error:
        said = (
            f"logits_to_keep is no number and no list of positions within the {tokens.shape[1]} new tokens."
        )
        raise GuardError(said, place="inputs['logits_to_keep']") from error
    rows, order = torch.unique(found, return_inverse=True)
    return rows, order


def _source_mask(given: torch.Tensor | None, hidden: torch.Tensor | None) -> torch.Tensor:
    """Which positions of the encoder are read: all, where no mask says otherwise.

    Raises:
        GuardError: nothing says how many there are.
    """
    if given is not None:
        return whole_numbers(given, "attention_mask")
    if hidden is None:
        raise GuardError("A decoder needs encoder_outputs, which generate() gives it.", place="inputs")
    return hidden.new_ones(hidden.shape[:2], dtype=torch.int64)
