"""The path of a generation, from a model that has a cache to a proven executable."""

from types import ModuleType

from effcompile.runtime.generation import with_transformers


def generating() -> ModuleType:
    """build.py of this folder. Raises MissingPackageError: transformers is not installed."""
    return with_transformers("effcompile.compiler.generation.build")
