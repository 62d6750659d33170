"""Inputs derived for every class that transformers' AutoModels map: default configurations of two layers, on
fake tensors, so that nothing is downloaded and nothing is large.

A row is `ok` where the forward runs on what was derived, `data` where it then asks for values that fake
tensors have not, `refused` where effcompile says that inputs have to be given, `model` where the model itself
raises (some because a configuration of two layers is none of its own), `unbuilt` where it cannot be made so,
`RAW` where deriving raises anything else: a fault of ours.

    python benchmarks/derived.py [CLASS ...]

Exit 1 where a row is RAW. All 1,547 classes of transformers 5.23 take 15 minutes on one core.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections import Counter

import torch
import transformers
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from effcompile.core.errors import EffcompileError
from effcompile.loader.derive import derive
from effcompile.loader.source import Reading

_LAYERS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers", "depth", "predictor_num_hidden_layers",
    "decoder_num_hidden_layers",
)  # fmt: skip


def classes() -> dict[str, str]:
    """Every class by name, with the type of a model that is of it."""
    found: dict[str, str] = {}
    for name in dir(modeling_auto):
        if name.startswith("MODEL_") and name.endswith("MAPPING_NAMES"):
            for model_type, mapped in getattr(modeling_auto, name).items():
                for each in mapped if isinstance(mapped, (tuple, list)) else (mapped,):
                    found.setdefault(each, model_type)
    return found


def shrink(config: object) -> None:
    """Two layers, or one of each kind, here and in every part."""
    for name in _LAYERS:
        if isinstance(count := getattr(config, name, None), int) and count > 2:
            with contextlib.suppress(Exception):
                setattr(config, name, 2)
    if isinstance(types := getattr(config, "layer_types", None), list):
        kinds = list(dict.fromkeys(types))
        with contextlib.suppress(Exception):
            config.layer_types = kinds = kinds * (2 if len(kinds) == 1 else 1)  # type: ignore[attr-defined]
            config.num_hidden_layers = len(kinds)  # type: ignore[attr-defined]
    for part in list(vars(config).values()):
        if isinstance(part, transformers.PretrainedConfig):
            shrink(part)


def rows(name: str, model_type: str) -> list[tuple[str, str]]:
    """(How it went, what was said) of the forward and of a training step."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        kind = getattr(transformers, name)
        shrink(config := (kind.config_class or CONFIG_MAPPING[model_type])())
        with torch.device("meta"):
            model = kind._from_config(config)
        with fake:
            model = model.to_empty(device="cpu")
        with contextlib.suppress(Exception):  # fake tensors know no grouped products
            model.set_experts_implementation("eager")
    except Exception as error:
        return [("unbuilt", said(error))] * 2
    return [ran(model.train(training), training, fake) for training in (False, True)]


def ran(model: torch.nn.Module, training: bool, fake: FakeTensorMode) -> tuple[str, str]:
    try:
        made = derive(model, Reading(training=training), "model.py")
    except EffcompileError as error:
        return "refused", said(error)
    except Exception as error:
        return "RAW", said(error)
    try:
        with fake, torch.set_grad_enabled(training):
            model(*made.args, **made.kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return "data", ""
    except Exception as error:
        return "model", said(error)
    return "ok", ""


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def main(only: list[str]) -> int:
    warnings.simplefilter("ignore")
    logging.disable()
    transformers.utils.logging.set_verbosity_error()
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for name, model_type in sorted(classes().items()):
        if only and name not in only:
            continue
        for count, what, (state, text) in zip(
            counts, ("forward", "training"), rows(name, model_type), strict=True
        ):
            count[state] += 1
            if state != "ok":
                print(f"{name:<44} {what:<9} {state:<8} {text}", flush=True)
    for what, count in zip(("forward", "training"), counts, strict=True):
        print(f"{what}: {', '.join(f'{state} {many}' for state, many in count.most_common())}")
    return int(any(count["RAW"] for count in counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
