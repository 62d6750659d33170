"""Generation: an executable with Hugging Face's generate(), whose every step runs as planned."""

from importlib import import_module
from types import ModuleType

from effcompile.core.errors import MissingPackageError


def generating() -> ModuleType:
    """The compiler of generation (build.py), which needs transformers, a package that takes seconds to import.

    Raises:
        MissingPackageError: transformers is not installed.
    """
    try:
        return import_module("effcompile.compiler.generation.build")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingPackageError("transformers", "mode = 'generation'", "pip install 'effcompile[hf]'") from error
