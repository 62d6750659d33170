"""What `optimize(mode="generation")` returns: the model's own generate(), its steps lowered."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import torch
from torch import nn
from transformers import modeling_outputs

from effcompile.backends.base import Lowered
from effcompile.capture.caches import HFCache, check_cache, new_cache_of, seen_by
from effcompile.capture.generation import GenerationStep
from effcompile.core.errors import GuardError, InputsError, UsageError
from effcompile.core.types import Forward, HFClass, HFConfig, HFModel, Kwargs, Outputs
from effcompile.ir import saved
from effcompile.ir.plan import Plan
from effcompile.runtime.artifact import check_pickled
from effcompile.runtime.generation import files, shell
from effcompile.runtime.generation.steps import LoweredStep, carried_out
from effcompile.runtime.planned import PlannedModel, SetOnModel

#: Arguments of a forward that change nothing here, or that generate() gives always.
_SILENT = frozenset({"use_cache", "return_dict", "cache_position", "encoder_outputs", "past_key_values", "logits_to_keep"})
#: Dtypes of token ids.
_WHOLE = (torch.int64, torch.int32)


class Stepper:
    """Calls of a Hugging Face forward, answered by a lowered step."""

    def __init__(self, step: LoweredStep, forward: Forward, config: Any) -> None:
        self.step, self.config = step, config
        self._parameters = list(inspect.signature(forward).parameters)[1:]
        taken = {step.boundary.tokens, step.boundary.mask, step.boundary.positions}
        self._known = taken | _SILENT | ({"attention_mask", "input_ids", "input_features"} if config.is_encoder_decoder else set())

    def __call__(self, *args: object, **kwargs: Any) -> Outputs:
        given: dict[str, Any] = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        self._check(given)
        tokens = given[self.step.boundary.tokens]
        cache = given.get("past_key_values")
        cache = new_cache_of(self.config) if cache is None else cache
        check_cache(cache, self.step.layout)
        encoded = given.get("encoder_outputs")
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
            raise GuardError(f"A planned step takes {boundary.tokens}; embeddings in their place are not planned for.", place="inputs")
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or not tokens.numel() or tokens.dtype not in _WHOLE:
            raise GuardError(f"{boundary.tokens} must be token ids: a tensor [rows × tokens] of whole numbers, not empty.", place="inputs")
        unknown = [name for name, value in given.items() if name not in self._known and value is not None and value is not False]
        if unknown:
            raise GuardError(
                f"{unknown[0]} is not planned for: a step takes {', '.join(sorted(self._known - {''}))}. Leave it out, or run the model "
                "itself.",
                place=f"inputs[{unknown[0]!r}]",
            )

    def _inputs(
        self, given: Kwargs, tokens: torch.Tensor, cache: HFCache, hidden: torch.Tensor | None, rows: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """The step's inputs by name. `rows`: the new positions whose logits are wanted; None: all."""
        boundary, past, new = self.step.boundary, seen_by(cache), tokens.shape[1]
        mask = given.get(boundary.mask)
        if mask is None:
            mask = tokens.new_ones((tokens.shape[0], past + new))
        if not isinstance(mask, torch.Tensor) or mask.shape != (tokens.shape[0], past + new):
            found = list(mask.shape) if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
            raise GuardError(
                f"{boundary.mask} is {found}; the plan takes [{tokens.shape[0]} × {past + new}]: a 1 or 0 for each of the "
                f"{past} past and {new} new tokens.",
                place=f"inputs[{boundary.mask!r}]",
            )
        inputs = {"tokens": tokens.to(torch.int64).contiguous(), "mask": _whole(mask, boundary.mask)}
        if boundary.rows:
            inputs["rows"] = torch.arange(new, device=tokens.device) if rows is None else rows
        if boundary.positions:
            inputs["positions"] = self._positions(given.get(boundary.positions), inputs["mask"], past, tokens)
        if boundary.source_mask:
            inputs["source_mask"] = _source_mask(given.get("attention_mask"), hidden)
        return inputs

    def _positions(self, given: torch.Tensor | None, mask: torch.Tensor, past: int, tokens: torch.Tensor) -> torch.Tensor:
        """Position ids as they were given, or as the model counts them."""
        if given is not None:
            if given.dim() != 2 or given.shape[0] not in (1, tokens.shape[0]) or given.shape[1] not in (1, tokens.shape[1]):
                name = self.step.boundary.positions
                raise GuardError(f"{name} is {list(given.shape)}; the plan takes {list(tokens.shape)}.", place=f"inputs[{name!r}]")
            return _whole(given.expand(tokens.shape), self.step.boundary.positions).contiguous()
        if self.step.boundary.counted:
            return (mask.cumsum(1) - 1).clamp(min=0)[:, past:].contiguous()
        return torch.arange(past, past + tokens.shape[1], device=tokens.device).expand(tokens.shape).contiguous()

    def _outputs(self, logits: torch.Tensor, cache: HFCache | None, hidden: torch.Tensor | None) -> Outputs:
        if self.config.is_encoder_decoder:
            return modeling_outputs.Seq2SeqLMOutput(logits=logits, past_key_values=cache, encoder_last_hidden_state=hidden)
        return modeling_outputs.CausalLMOutputWithPast(logits=logits, past_key_values=cache)


def _whole(given: torch.Tensor, name: str) -> torch.Tensor:
    """Numbers as the graph takes them.

    Raises:
        GuardError: fractions, that would be cut off.
    """
    if given.is_floating_point() and bool((given != given.round()).any()):
        raise GuardError(f"{name} has fractions; the plan takes whole numbers.", place=f"inputs[{name!r}]")
    return given.to(torch.int64)


def _rows(keep: int | torch.Tensor | None, tokens: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Which new positions' logits are wanted, each once and in order; None: all. And how these stand in the answer; None: as they are.

    Raises:
        GuardError: positions that no new token has.
    """
    if keep is None or (isinstance(keep, int) and keep == 0):
        return None, None
    new = torch.arange(tokens.shape[1], device=tokens.device)
    if isinstance(keep, int):
        return new[-keep:], None  # a negative number leaves so many out at the beginning, as it does in the models
    try:
        found = new[keep]
        if found.dim() != 1:
            raise IndexError
    except IndexError as error:
        said = f"logits_to_keep is no number and no list of positions within the {tokens.shape[1]} new tokens."
        raise GuardError(said, place="inputs['logits_to_keep']") from error
    rows, order = torch.unique(found, return_inverse=True)
    return rows, order


def _source_mask(given: torch.Tensor | None, hidden: torch.Tensor | None) -> torch.Tensor:
    """Which positions of the encoder are read: all, where no mask says otherwise.

    Raises:
        GuardError: nothing says how many there are.
    """
    if given is not None:
        return _whole(given, "attention_mask")
    if hidden is None:
        raise GuardError("A decoder needs encoder_outputs, which generate() gives it.", place="inputs")
    return hidden.new_ones(hidden.shape[:2], dtype=torch.int64)


class LoweredEncoder(nn.Module):
    """An encoder as generate() calls it, lowered."""

    def __init__(self, step: LoweredStep, names: tuple[str, ...]) -> None:
        super().__init__()
        self._step, self._names = step, names
        self.main_input_name = names[0]

    def forward(self, *args: torch.Tensor, **kwargs: Any) -> Outputs:
        """The encoder's output.

        Raises:
            InputsError: no input. GuardError: ids that are none. LoweringError: the backend cannot run with these tensors.
        """
        given = {**dict(zip(self._names, args, strict=False)), **{k: v for k, v in kwargs.items() if v is not None}}
        first = given.get(self._names[0])
        if first is None or self._step.encoder is None:
            raise InputsError(f"The encoder takes {', '.join(self._names)}.")
        if "attention_mask" in self._names and "attention_mask" not in given:
            given["attention_mask"] = torch.ones_like(first)
        if "attention_mask" in self._names:
            given["attention_mask"] = _whole(given["attention_mask"], "attention_mask")
        self._step.check_indices(given)
        flat = [given[name] for name in self._names]
        return modeling_outputs.BaseModelOutput(last_hidden_state=carried_out(self._step.encoder, flat)[0])


class _Configured:
    """What generate() is told by `config` and `generation_config`: those of the model that stands behind, as they are at the call."""

    @property
    def _behind(self) -> HFModel:
        raise NotImplementedError

    @property
    def config(self) -> HFConfig:
        """The model's."""
        return self._behind.config

    @property
    def generation_config(self) -> HFConfig:
        """The model's."""
        return self._behind.generation_config

    @generation_config.setter
    def generation_config(self, config: HFConfig) -> None:
        self._behind.generation_config = config


class GenerationExecutable(_Configured, SetOnModel, PlannedModel):
    """A Hugging Face model whose generate() runs each step as planned: greedy, sampling, beams, streamers, criteria, caches handed back.

    A call is the model's own forward: `executable(input_ids, past_key_values=cache)` returns logits and the longer cache. Weights are
    those of the time of planning; a call after the model was changed is refused. In training mode the model itself runs. What
    generate() reads beside (`generation_config`, and methods of the model that are replaced) is the model's at the time of the call.
    """

    def __init__(self, model: HFModel, step: GenerationStep, lowered: LoweredStep, plan: Plan, parts: Mapping[str, Lowered]) -> None:
        super().__init__()
        self.training = False
        self.original, self.lowered = model, lowered
        self._parts, self._step = parts, step
        self.stepper = Stepper(lowered, type(model).forward, model.config)
        encoder = None if step.encoder is None else LoweredEncoder(lowered, tuple(spec.name for spec in step.encoder.inputs))
        self._shell = shell.kind_around(model, self.stepper, encoder)
        assert step.program.state is not None
        self._state = step.program.state
        self.plan = replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *self._state.settle()))))

    def forward(self, *args: object, **kwargs: object) -> Outputs:
        """One step: the model's forward.

        Raises:
            GuardError: arguments that the plan was not made for, or a model that is not as it was then.
        """
        if self.training:
            return self.original(*args, **kwargs)
        self._state.check()
        return self.stepper(*args, **kwargs)

    def generate(self, *args: object, **kwargs: object) -> Outputs:
        """Generate as Hugging Face does, with all that it takes there.

        Raises:
            GuardError: more tokens than the plan's context, a cache of another kind, or a model that is not as it was.
        """
        if self.training:
            return self.original.generate(*args, **kwargs)
        self._state.check()
        return shell.around(self.original, self._shell).generate(*args, **kwargs)

    @property
    def _behind(self) -> HFModel:
        return self.original

    def unplanned(self) -> nn.Module:
        """The model itself."""
        return self.original

    def __reduce_ex__(self, protocol: object) -> Never:
        raise UsageError(
            f"A planned generation cannot be copied or pickled, for its steps are bound to this process: {self.plan.model}. Write it with "
            "executable.save(folder), and open it anywhere with effcompile.load(folder)."
        )

    def save(self, directory: str | os.PathLike[str], *, beside: Mapping[str, str] | None = None) -> Path:
        """Write the plan, the graphs and the model's configs into a folder, which `effcompile.load` opens without the model.

        Raises:
            UsageError: the folder cannot be written, or holds files of others. GuardError: the model was changed since it was planned.
        """
        self._state.check()
        self._state.check_weights()
        folder = Path(directory)
        saved.save(self.plan, folder, artifact=self._write, beside=beside)
        return folder

    def _write(self, folder: Path) -> tuple[Path, ...]:
        return files.write(folder, self._step, self.lowered, self._parts, self.original)

    def state_dict(self, *args: object, **kwargs: object) -> Any:
        """The original model's, with its own names."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: object, **kwargs: object) -> Any:
        """Refused: the lowered weights would no longer be the original's."""
        raise InputsError(
            "A planned model's weights are fixed when it is planned. Load them into the model, then call effcompile.optimize."
        )


def _device_of(lowered: LoweredStep) -> torch.device:
    """Where a step's weights are; a runtime's are its own, on the processor."""
    held = lowered.run.parameters() if isinstance(lowered.run, nn.Module) else iter(())
    return next((p.device for p in held), torch.device("cpu"))


class OpenedGeneration(_Configured):
    """A saved folder at work, without the model it was made of: generate(), and calls as the model's forward."""

    def __init__(
        self, folder: Path, plan: Plan, lowered: LoweredStep, kind: HFClass, configs: tuple[Any, Any], encoder: tuple[str, ...]
    ) -> None:
        self.folder, self.plan, self.lowered = folder, plan, lowered
        self.stepper = Stepper(lowered, kind.forward, configs[0])
        source = LoweredEncoder(lowered, encoder) if encoder else None
        self._shell: HFModel = shell.empty(kind, *configs, self.stepper, source, _device_of(lowered))

    @property
    def _behind(self) -> HFModel:
        return self._shell

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (str(self.folder.absolute()), dict(self.plan.artifact), self.config, self.generation_config)

    def __call__(self, *args: object, **kwargs: object) -> Outputs:
        """One step: the model's forward. Raises GuardError for arguments that the plan was not made for."""
        return self._shell(*args, **kwargs)

    def generate(self, *args: object, **kwargs: object) -> Outputs:
        """Generate as Hugging Face does, with all that it takes there. Raises GuardError for more tokens than the plan's context."""
        return self._shell.generate(*args, **kwargs)


def open_generation(directory: Path, configs: tuple[HFConfig, HFConfig] | None = None) -> OpenedGeneration:
    """What `GenerationExecutable.save` wrote, at work without the model. `configs`: in the place of those that stand there.

    Raises:
        UsageError: no such folder, or a file of it is missing. FormatError: a file is another one.
    """
    plan, header = files.read(directory)
    kind = files.kind_of(header)
    lowered = files.opened(directory, plan, header)
    return OpenedGeneration(directory, plan, lowered, kind, configs or files.configs_of(directory, kind), header.encoder)


def _again(folder: str, artifact: Mapping[str, str], *configs: HFConfig) -> OpenedGeneration:
    """What was pickled, opened again, with its configurations as they were then.

    Raises:
        FormatError: another artifact stands there now.
    """
    config, of_generation = configs
    found = open_generation(Path(folder), (config, of_generation))
    check_pickled(folder, found.plan, artifact)
    return found
