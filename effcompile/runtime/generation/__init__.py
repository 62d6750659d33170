"""Generation at work: Hugging Face's generate() around lowered steps, and the folder it is saved in."""

from importlib import import_module
from types import ModuleType

from effcompile.core.errors import MissingPackageError


def with_transformers(module: str) -> ModuleType:
    """A module of a generation's, which needs transformers: a package that takes seconds to import.

    Raises:
        MissingPackageError: transformers is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingPackageError(
            "transformers", "mode = 'generation'", "pip install 'effcompile[hf]'"
        ) from error
