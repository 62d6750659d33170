"""A model of HuggingFace from its folder: the class that its config names, or that of a task, with the
weights as they are stored.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from effcompile.core.errors import MissingPackageError, UsageError
from effcompile.core.reasons import Because, Reason
from effcompile.core.stages import first_line
from effcompile.loader.derive import Derived, derive
from effcompile.loader.loaded import Loaded
from effcompile.loader.source import ModelSource, Reading, config_of
from effcompile.loader.weights import TASKS, check_source, check_task, check_weights


def load_folder(source: ModelSource, reading: Reading) -> Loaded:
    """The model of a folder, with inputs derived from its config.

    Raises:
        UsageError: no weights, damaged ones, pickles, code of its own, an architecture or task that
            transformers does not have.
    """
    model, notes = pretrained(source.path, reading)
    made = derive(model, reading, str(source.path))
    return _loaded(source, model, made, notes)


def load_diffusers(source: ModelSource, reading: Reading) -> Loaded:
    """A model of diffusers from its folder. Raises as `load_folder` does."""
    check_weights(source.path, reading)
    diffusers = _imported("diffusers")
    name = str(config_of(source.path)["_class_name"])
    kind = getattr(diffusers, name, None)
    if kind is None or not hasattr(kind, "from_pretrained"):
        raise UsageError(
            f"{str(source.path / 'config.json')!r} names the class {name!r}, which diffusers "
            f"{diffusers.__version__} lacks."
        )
    with _blaming(source.path):
        model = kind.from_pretrained(
            source.path, local_files_only=True, use_safetensors=not reading.allow_pickle or None
        )
    return _loaded(source, model.eval(), derive(model, reading, str(source.path)), ())


def load_safetensors(source: ModelSource, reading: Reading) -> Loaded:
    """The weights of one file, in the model of the config beside it. Raises as `load_folder` does."""
    folder = source.path.parent
    check_source(source, reading)
    from safetensors.torch import load_file

    weights = load_file(source.path)
    model, notes = pretrained(folder, reading, weights)
    return _loaded(source, model, derive(model, reading, str(source.path)), notes)


def pretrained(
    folder: Path, reading: Reading, weights: dict[str, torch.Tensor] | None = None
) -> tuple[nn.Module, tuple[Reason, ...]]:
    """The model of a folder in evaluation mode, and what is to be told of it; `weights` instead of the
    folder's own.

    Raises:
        UsageError: see `load_folder`.
    """
    if weights is None:
        check_weights(folder, reading)
    transformers = _imported("transformers")
    kind = _class_of(transformers, folder, reading)
    with _blaming(folder), _quiet(transformers.utils.logging):
        trusted = {"trust_remote_code": True} if reading.trust_remote_code else {}
        # what does not fit is told of by name below; transformers raises, and prints the names elsewhere
        common = {
            "dtype": "auto",
            "output_loading_info": True,
            "local_files_only": True,
            "ignore_mismatched_sizes": True,
            **trusted,
        }
        if weights is None:
            model, info = kind.from_pretrained(
                folder, use_safetensors=None if reading.allow_pickle else True, **common
            )
        else:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **trusted)
            dtype = next((t.dtype for t in weights.values() if t.is_floating_point()), torch.float32)
            model, info = kind.from_pretrained(
                None, config=config, state_dict=weights, **{**common, "dtype": dtype}
            )
    _check_shapes(folder, info.get("mismatched_keys", ()))
    notes = [
        Because("not in the weights, and set at random: {name}", (_some(info.get("missing_keys", ())),))
    ] * bool(info.get("missing_keys"))
    if not reading.cache and getattr(model.config, "use_cache", False) and model.can_generate():
        model.config.use_cache = False  # a cache is an output that nobody reads in a plain call
        notes.append(
            Because(
                "config.use_cache was set to False: a plan is of one call, which keeps no cache of keys "
                "and values"
            )
        )
    return model.eval(), tuple(notes)


def _check_shapes(folder: Path, mismatched: Iterable[tuple[str, Iterable[int], Iterable[int]]]) -> None:
    """Raises UsageError for weights of other shapes than the configuration's: name, stored, asked for."""
    found = sorted(mismatched)
    if found:
        name, stored, wanted = found[0]
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        has, needs = (" × ".join(map(str, shape)) for shape in (stored, wanted))
        raise UsageError(
            f"The weights in {str(folder)!r} are not of its config.json: {name} is stored as {has}, the "
            f"configuration makes it {needs}{more}. Give the config.json that was saved with these weights."
        )


def _class_of(transformers: Any, folder: Path, reading: Reading) -> Any:
    """The class to load: that of the task, or the first of the config's architectures."""
    config = config_of(folder)
    remote = config.get("auto_map")
    if reading.task is not None:
        check_task(reading.task)
        name = TASKS[reading.task]
    else:
        named = config.get("architectures")
        name = str(named[0]) if isinstance(named, list) and named else "AutoModel"
    model_type, version, where = (
        str(config.get("model_type")),
        transformers.__version__,
        str(folder / "config.json"),
    )
    native = model_type in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    if isinstance(remote, dict) and (not native or not hasattr(transformers, name)):
        if not reading.trust_remote_code:
            code = sorted({str(value).partition(".")[0] + ".py" for value in remote.values()})
            raise UsageError(
                f"{str(folder)!r} needs Python code of its own ({', '.join(code)}), which would run here "
                "with your rights. Read it; if you trust it, give --trust-remote-code."
            )
        return getattr(
            transformers, next((key for key in remote if key.startswith("AutoModel")), "AutoModel")
        )
    if not native:
        raise UsageError(
            f"{where!r} says model_type = {model_type!r}, which transformers {version} does not know. Update "
            "transformers, or build the model in a model.py of yours."
        )
    if not hasattr(transformers, name):
        raise UsageError(
            f"transformers {version} has no architecture {name!r}, which {where!r} names. Choose one with "
            f"--task: {', '.join(TASKS)}."
        )
    return getattr(transformers, name)


@contextlib.contextmanager
def _blaming(folder: Path) -> Iterator[None]:
    """What a library raises while it loads a folder, as an error about that folder."""
    try:
        yield
    except MissingPackageError:
        raise
    except Exception as error:
        raise UsageError(f"The model in {str(folder)!r} cannot be loaded: {first_line(error)}") from error


@contextlib.contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without transformers' progress bars and its table of keys, which the notes say in a line."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _imported(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPackageError(package, "A model from its folder", f"pip install {package}") from error


def _some(names: Any, most: int = 3) -> str:
    listed = sorted(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _loaded(source: ModelSource, model: nn.Module, made: Derived, notes: tuple[Reason, ...]) -> Loaded:
    return Loaded(
        path=source.path,
        name=type(model).__name__,
        model=model,
        args=made.args,
        kwargs=made.kwargs,
        notes=(*made.notes, *notes),
        told=made.told,
    )
