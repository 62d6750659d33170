"""Reads the model that a text names, whatever it is read from."""

from __future__ import annotations

from collections.abc import Callable

from effcompile.loader.exported import load_exported
from effcompile.loader.huggingface import load_diffusers, load_folder, load_safetensors
from effcompile.loader.loaded import Loaded
from effcompile.loader.python_file import load_file
from effcompile.loader.sentence import load_sentence
from effcompile.loader.source import Kind, ModelSource, Reading, find

_READERS: dict[Kind, Callable[[ModelSource, Reading], Loaded]] = {
    Kind.PYTHON: load_file,
    Kind.FOLDER: load_folder,
    Kind.SENTENCE: load_sentence,
    Kind.DIFFUSERS: load_diffusers,
    Kind.SAFETENSORS: load_safetensors,
    Kind.EXPORTED: load_exported,
}


def load(spec: str, reading: Reading | None = None) -> Loaded:
    """The model, its inputs, and what else was given with it.

    Raises:
        UsageError: nothing that can be read. InputsError: no inputs, and none can be derived.
    """
    source = find(spec)
    return _READERS[source.kind](source, reading or Reading())
