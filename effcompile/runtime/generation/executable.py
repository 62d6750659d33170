"""What `optimize(mode="generation")` returns: the model's own generate(), its steps lowered."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import torch
from torch import nn
from transformers import modeling_outputs

from effcompile.backends.base import Lowered
from effcompile.capture.generation import GenerationStep
from effcompile.core.errors import InputsError, UsageError
from effcompile.core.types import HFClass, HFConfig, HFModel, Kwargs, Outputs
from effcompile.ir import saved
from effcompile.ir.plan import Plan
from effcompile.passes.speculate import drafts_in
from effcompile.runtime.artifact import check_pickled
from effcompile.runtime.generation import files, shell
from effcompile.runtime.generation.drafts import with_drafts
from effcompile.runtime.generation.eye import Eye
from effcompile.runtime.generation.stepper import Stepper, check_tokens, whole_numbers
from effcompile.runtime.generation.steps import LoweredStep, carried_out
from effcompile.runtime.planned import PlannedModel, SetOnModel


class LoweredEncoder(nn.Module):
    """An encoder as generate() calls it, lowered."""

    def __init__(self, step: LoweredStep, names: tuple[str, ...]) -> None:
        super().__init__()
        self._step, self._names = step, names
        self.main_input_name = names[0]

    def forward(self, *args: torch.Tensor, **kwargs: Any) -> Outputs:
        """The encoder's output.

        Raises:
            InputsError: no input. GuardError: ids that are none. LoweringError: the backend cannot run with
                these tensors.
        """
        given = {
            **dict(zip(self._names, args, strict=False)),
            **{k: v for k, v in kwargs.items() if v is not None},
        }
        first = given.get(self._names[0])
        if first is None or self._step.encoder is None:
            raise InputsError(f"The encoder takes {', '.join(self._names)}.")
        if self._names[0] == "input_ids":
            check_tokens("input_ids", first)
            given["input_ids"] = first.to(torch.int64)
        if "attention_mask" in self._names and "attention_mask" not in given:
            given["attention_mask"] = torch.ones_like(first)
        if "attention_mask" in self._names:
            given["attention_mask"] = whole_numbers(given["attention_mask"], "attention_mask")
        self._step.check_indices(given)
        flat = [given[name] for name in self._names]
        return modeling_outputs.BaseModelOutput(last_hidden_state=carried_out(self._step.encoder, flat)[0])

    def within(self, given: Kwargs) -> Outputs | None:
        """The output in a call of the whole model; None where that brings nothing to read."""
        mine = {name: given[name] for name in self._names if given.get(name) is not None}
        return self(**mine) if self._names[0] in mine else None


class _Configured:
    """What generate() is told by `config` and `generation_config`: those of the model that stands behind, as
    they are at the call.
    """

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
    """A Hugging Face model whose generate() runs each step as planned: greedy, sampling, beams, streamers,
    criteria, caches handed back.

    A call is the model's own forward: `executable(input_ids, past_key_values=cache)` returns logits and the
    longer cache. Weights are those of the time of planning; a call after the model was changed is refused. In
    training mode the model itself runs. What generate() reads beside (`generation_config`, and methods of the
    model that are replaced) is the model's at the time of the call.
    """

    def __init__(
        self,
        model: HFModel,
        step: GenerationStep,
        lowered: LoweredStep,
        plan: Plan,
        parts: Mapping[str, Lowered],
    ) -> None:
        super().__init__()
        self.training = False
        self.original, self.lowered = model, lowered
        self.parts, self._step = parts, step
        encoder = (
            None
            if step.encoder is None
            else LoweredEncoder(lowered, tuple(spec.name for spec in step.encoder.inputs))
        )
        whole = None if encoder is None else encoder.within
        self._eye = Eye(model.base_model, lowered) if lowered.boundary.images else None
        self.stepper = Stepper(lowered, type(model).forward, model.config, whole, self._eye)
        self._shell = shell.kind_around(model, self.stepper, encoder)
        self._inside = None if self._eye is None else shell.kind_inside(model, self._eye.as_method())
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
            GuardError: more tokens than the plan's context, a cache of another kind, or a model that is not
                as it was.
        """
        if self.training:
            return self.original.generate(*args, **kwargs)
        self._state.check()
        given = with_drafts(drafts_in(self.plan), self.generation_config, args, kwargs)
        return self._around().generate(*args, **given)

    def _around(self) -> HFModel:
        return shell.around(self.original, self._shell, self._inside)

    def spoken(self, prompt: torch.Tensor, drafts: int, **how: object) -> torch.Tensor:
        """Greedy text behind a prompt, both (1, tokens), by so many drafts a step whatever the plan says."""
        how |= {"prompt_lookup_num_tokens": drafts} if drafts else {}
        made: torch.Tensor = self._around().generate(prompt, do_sample=False, num_beams=1, **how)
        return made

    @property
    def _behind(self) -> HFModel:
        return self.original

    def __getattr__(self, name: str) -> Any:
        """What the model has beside; of its private methods those that generate() has."""
        original = self.__dict__.get("_modules", {}).get("original")
        if name.startswith("_") and original is not None and shell.of_an_assistant(name):
            return getattr(original, name)
        return super().__getattr__(name)

    def unplanned(self) -> nn.Module:
        """The model itself."""
        return self.original

    def __reduce_ex__(self, protocol: object) -> Never:
        raise UsageError(
            "A planned generation cannot be copied or pickled, for its steps are bound to this process: "
            f"{self.plan.model}. Write it with executable.save(folder), and open it anywhere with "
            "effcompile.load(folder)."
        )

    def save(self, directory: str | os.PathLike[str], *, beside: Mapping[str, str] | None = None) -> Path:
        """Write the plan, the graphs and the model's configs into a folder, which `effcompile.load` opens
        without the model.

        Raises:
            UsageError: the folder cannot be written, or holds files of others. GuardError: the model was
                changed since it was planned.
        """
        self._state.check()
        self._state.check_weights()
        folder = Path(directory)
        saved.save(self.plan, folder, artifact=self._write, beside=beside)
        return folder

    def _write(self, folder: Path) -> tuple[Path, ...]:
        return files.write(folder, self._step, self.lowered, self.parts, self.original)

    def state_dict(self, *args: object, **kwargs: object) -> Any:
        """The original model's, with its own names."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: object, **kwargs: object) -> Any:
        """Refused: the lowered weights would no longer be the original's."""
        raise InputsError(
            "A planned model's weights are fixed when it is planned. Load them into the model, then call "
            "effcompile.optimize."
        )


class OpenedGeneration(_Configured):
    """A saved folder at work, without the model it was made of: generate(), and calls as the
    model's forward.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        lowered: LoweredStep,
        kind: HFClass,
        configs: tuple[Any, Any],
        encoder: tuple[str, ...],
    ) -> None:
        self.folder, self.plan, self.lowered = folder, plan, lowered
        source = LoweredEncoder(lowered, encoder) if encoder else None
        whole = None if source is None else source.within
        inner = None if lowered.image is None else shell.inside(kind, configs[0])
        eye = None if inner is None else Eye(inner, lowered, there=False)
        self.stepper = Stepper(lowered, kind.forward, configs[0], whole, eye)
        if inner is not None and eye is not None:
            inner.get_image_features = eye.as_method()
        self._shell: HFModel = shell.empty(kind, *configs, self.stepper, source, lowered.device, inner)

    @property
    def _behind(self) -> HFModel:
        return self._shell

    def __getattr__(self, name: str) -> object:
        """What a larger model asks of the one that writes its drafts."""
        if "_shell" in self.__dict__ and shell.of_an_assistant(name):
            return getattr(self._shell, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (
            str(self.folder.absolute()),
            dict(self.plan.artifact),
            self.config,
            self.generation_config,
        )

    def __call__(self, *args: object, **kwargs: object) -> Outputs:
        """One step: the model's forward. Raises GuardError for arguments that the plan was not made for."""
        return self._shell(*args, **kwargs)

    def generate(self, *args: object, **kwargs: object) -> Outputs:
        """Generate as Hugging Face does, with all that it takes there.

        Raises GuardError for more tokens than the plan's context.
        """
        given = with_drafts(drafts_in(self.plan), self.generation_config, args, kwargs)
        return self._shell.generate(*args, **given)


def open_generation(directory: Path, configs: tuple[HFConfig, HFConfig] | None = None) -> OpenedGeneration:
    """What `GenerationExecutable.save` wrote, at work without the model.

    `configs`: in the place of those that stand there.

    Raises:
        UsageError: no such folder, or a file of it is missing. FormatError: a file is another one.
    """
    plan, header = files.read(directory)
    kind = files.kind_of(header)
    lowered = files.opened(directory, plan, header)
    return OpenedGeneration(
        directory, plan, lowered, kind, configs or files.configs_of(directory, kind), header.encoder
    )


def _again(folder: str, artifact: Mapping[str, str], *configs: HFConfig) -> OpenedGeneration:
    """What was pickled, opened again, with its configurations as they were then.

    Raises:
        FormatError: another artifact stands there now.
    """
    config, of_generation = configs
    found = open_generation(Path(folder), (config, of_generation))
    check_pickled(folder, found.plan, artifact)
    return found
