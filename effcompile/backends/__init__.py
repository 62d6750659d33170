"""Ways to run a program. Third parties register under the entry point group `effcompile.backends`."""

from __future__ import annotations

import importlib

from effcompile.backends.base import Backend
from effcompile.core.errors import MissingPackageError, UnknownNameError, UsageError
from effcompile.core.installed import entry_points

#: name → where its class is. Loaded on demand, as each needs packages of its own.
BACKENDS: dict[str, str] = {
    "onnxruntime": "effcompile.backends.onnxruntime:OnnxRuntime",
    "torch-eager": "effcompile.backends.torch:TorchEager",
    "torch-inductor": "effcompile.backends.torch:TorchInductor",
    "openvino": "effcompile.backends.openvino:OpenVino",
    "triton": "effcompile.backends.triton.backend:Triton",
}

_GROUP = "effcompile.backends"


def known_backends() -> dict[str, str]:
    """Our backends, then those of installed packages that do not take one of our names."""
    others = {entry.name: entry.value for entry in entry_points(group=_GROUP)}
    return {**others, **BACKENDS}


def load_backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        UnknownNameError: no such backend. MissingPackageError: a package it is built on is not installed.
    """
    known = known_backends()
    if name not in known:
        raise UnknownNameError("backend", name, known)
    module, _, attribute = known[name].partition(":")
    try:
        backend: Backend = getattr(importlib.import_module(module), attribute)()
    except ModuleNotFoundError as error:
        missing = error.name or module
        raise MissingPackageError(missing, f"The backend {name}", f"pip install {missing}") from error
    return backend


def usable_backends(name: str | None) -> tuple[list[Backend], dict[str, str]]:
    """The named backend, or every one that can run here; and why the others cannot (name → reason).

    Raises:
        UnknownNameError: no such backend. UsageError: the named one cannot run here.
    """
    if name is not None:
        backend = load_backend(name)
        if (reason := backend.unavailable()) is not None:
            raise UsageError(f"The backend {name} cannot run here: {reason}.")
        return [backend], {}
    found: list[Backend] = []
    absent: dict[str, str] = {}
    for known in BACKENDS:
        try:
            backend = load_backend(known)
        except MissingPackageError as error:
            absent[known] = str(error)
            continue
        reason = backend.unavailable()
        if reason is None:
            found.append(backend)
        else:
            absent[known] = reason
    if not found:
        raise UsageError("No backend can run here: " + "; ".join(f"{k}: {v}" for k, v in absent.items()))
    return found, absent
