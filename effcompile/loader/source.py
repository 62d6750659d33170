"""Which kind of model a text on the command line names, and how it may be read.

Nothing is loaded here, torch neither.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import decode_source
from pathlib import Path
from types import CodeType
from typing import Any

from effcompile.core.errors import UsageError, clipped
from effcompile.core.files import read_bounded

_MOST_BYTES = 64 << 20
_ONNX = (
    "{path!r} is an ONNX graph, which has lost the PyTorch model that effcompile plans. Give the model that "
    "it was exported from (a folder of HuggingFace, a model.py, or a .pt2 of torch.export.save). ONNX "
    "Runtime quantises the graph itself: python -m onnxruntime.quantization.preprocess, then "
    "onnxruntime.quantization.quantize_dynamic."
)
_PICKLE = (
    "{path!r} is a pickle, which runs code when it is opened. Save the weights as safetensors beside the "
    "model's config.json (safetensors.torch.save_file(model.state_dict(), 'model.safetensors')), or load "
    "them in a model.py of yours."
)
#: Ends of the names of Python files; a script may have none.
_PYTHON = ("", ".py", ".pyw")


class Kind(enum.Enum):
    """What a model is read from."""

    PYTHON = enum.auto()
    FOLDER = enum.auto()
    SENTENCE = enum.auto()
    DIFFUSERS = enum.auto()
    SAFETENSORS = enum.auto()
    EXPORTED = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a model may be read, and for what.

    Attributes:
        task: of a HuggingFace model, as its pipelines name it; None: the architecture that its config names.
        trust_remote_code: the folder's own Python code may be run. allow_pickle: its weights may be pickles.
        shape: batch and length (or image size) of inputs that are derived; None: 1, and what the model has,
            128 tokens at the most.
        training: the derived inputs are of a training step.
        cache: it is to generate, with its cache of keys and values.
    """

    task: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    shape: tuple[int, int] | None = None
    training: bool = False
    cache: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model is: a file or a folder, and the name that it has in a Python file."""

    kind: Kind
    path: Path
    name: str = "model"


def find(spec: str) -> ModelSource:
    """What a text names: `model.py`, `model.py:name`, a folder, a file, or the id of a model in HuggingFace's
    cache.

    Raises:
        UsageError: nothing that we can read.
    """
    path = Path(spec)
    if path.is_dir():
        return _folder(path.resolve(), spec)
    readers = {".safetensors": Kind.SAFETENSORS, ".pt2": Kind.EXPORTED}
    if path.suffix in readers and path.is_file():
        return ModelSource(kind=readers[path.suffix], path=path.resolve())
    for suffixes, refusal in (((".onnx",), _ONNX), ((".bin", ".pt", ".pth", ".ckpt", ".pkl"), _PICKLE)):
        if path.suffix in suffixes and path.is_file():
            raise UsageError(refusal.format(path=spec))
    if _may_be_an_id(spec) and (cached := _cached(spec)) is not None:
        return _folder(cached, spec)
    return _python(spec)


def config_of(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A folder's configuration.

    Raises:
        UsageError: there is none. It is not JSON.
    """
    try:
        found = json.loads(read_bounded(folder / name, _MOST_BYTES, "the configuration"))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{str(folder / name)!r} is not valid JSON ({clipped(error)}). It may be cut off; copy it again."
        ) from error
    if not isinstance(found, dict):
        raise UsageError(f"{str(folder / name)!r} holds no object with settings. Copy it again.")
    return found


def _folder(folder: Path, spec: str) -> ModelSource:
    if (folder / "modules.json").is_file():
        return ModelSource(kind=Kind.SENTENCE, path=folder)
    if (folder / "config.json").is_file():
        config = config_of(folder)
        return ModelSource(kind=Kind.DIFFUSERS if "_class_name" in config else Kind.FOLDER, path=folder)
    scripts = sorted(path.name for path in folder.glob("*.py"))
    if (folder / "plan.json").is_file():
        raise UsageError(
            f"{spec!r} is what effcompile wrote. Run it with `effcompile run {spec}`, or "
            f"effcompile.load({spec!r}) in Python."
        )
    if (folder / "model_index.json").is_file():
        parts = sorted(path.parent.name for path in folder.glob("*/config.json"))
        raise UsageError(
            f"{spec!r} is a diffusers pipeline of several models. Name one: "
            f"{', '.join(f'{spec}/{part}' for part in parts)}."
        )
    hint = (
        f", or name one of its files: {', '.join(f'{spec}/{name}' for name in scripts[:3])}"
        if scripts
        else ", or a model.py"
    )
    raise UsageError(
        f"{spec!r} is a folder without a config.json: no model of HuggingFace is saved there. Give the "
        f"folder that model.save_pretrained wrote{hint}."
    )


def _may_be_an_id(spec: str) -> bool:
    parts = spec.split("/")
    return (
        len(parts) <= 2
        and all(parts)
        and not spec.endswith(".py")
        and ":" not in spec
        and not Path(spec).exists()
    )


def _cached(spec: str) -> Path | None:
    """The folder of a model in HuggingFace's cache. Nothing is downloaded.

    Raises:
        UsageError: it reads like an id, and is not there.
    """
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(spec, "config.json")
        found = found if isinstance(found, str) else try_to_load_from_cache(spec, "modules.json")
    except HFValidationError:
        return None
    if isinstance(found, str):
        return Path(found).parent
    if "/" in spec and not Path(spec).parent.is_dir():
        raise UsageError(
            f"{spec!r} is neither a file nor a folder, and no model of this id is in HuggingFace's cache. "
            f"effcompile downloads nothing: get it with `hf download {spec}`, or give a path."
        )
    return None


def _python(spec: str) -> ModelSource:
    """`model.py:name` into path and attribute; a colon is part of the path when such a file exists."""
    path, colon, name = spec.rpartition(":")
    if not colon or Path(spec).exists():
        path, name = spec, "model"
    file = Path(path)
    if not name.isidentifier():
        raise UsageError(f"{name!r} in {spec!r} is not a name. Write model.py or model.py:name.")
    if not file.is_file():
        siblings = [p.stem for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        close = get_close_matches(file.stem, siblings, n=1)  # by what is not the same for all
        hint = f" Did you mean {str(file.with_name(close[0] + '.py'))!r}?" if close else ""
        unknown = (
            ""
            if file.suffix
            else " Nor is a model of this id in HuggingFace's cache (hf download ID puts one there)."
        )
        raise UsageError(f"No such file: {path!r}.{hint or unknown}")
    if file.suffix not in _PYTHON:  # what is read would be run
        raise UsageError(
            f"{path!r} is no file that a model is read from. Give a model.py, a folder of HuggingFace (or "
            "its model.safetensors), an id of its cache, or a .pt2 of torch.export.save."
        )
    return ModelSource(kind=Kind.PYTHON, path=file.resolve(), name=name)


def code_of(path: Path) -> CodeType:
    """What a Python file says; nothing of it is run.

    Raises:
        UsageError: it is not Python, or cannot be read.
    """
    try:
        return compile(decode_source(path.read_bytes()), str(path), "exec")
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UsageError(
            f"{path} is not Python{line}: {error.msg if isinstance(error, SyntaxError) else error}"
        ) from error
    except OSError as error:
        raise UsageError(f"Cannot read {str(path)!r}: {error.strerror or error}.") from error
