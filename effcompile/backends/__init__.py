"""Ways to run a program. Third parties register under the entry point group `effcompile.backends`."""

from __future__ import annotations

import importlib

from effcompile.backends.base import Backend
from effcompile.core.errors import MissingPackageError, UnknownNameError, UsageError, clipped
from effcompile.core.goal import Goal
from effcompile.core.installed import entry_points
from effcompile.core.reasons import Reason, Unsupported
from effcompile.ir.program import Program

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
    try:
        return _made(known[name])
    except ModuleNotFoundError as error:
        missing = error.name or known[name]
        raise MissingPackageError(missing, f"The backend {name}", f"pip install {missing}") from error


def refusal(backend: Backend, program: Program, goal: Goal) -> Reason | None:
    """Why a backend does not take a program; None where it does."""
    return told(backend.name, backend.refuses(program, goal))


def told(backend: str, said: object) -> Reason | None:
    """The reason that a backend gives; a sentence of one of an installed package becomes one.

    Raises:
        UsageError: it gives something else.
    """
    if said is None or isinstance(said, Reason):
        return said
    if isinstance(said, str):
        return Unsupported.of("{}", said)
    raise UsageError(
        f"The backend {backend} gives {clipped(repr(said), 80)}, a {type(said).__name__}, as a reason. None "
        "means that there is none; else give one of effcompile.core.reasons, for a sentence "
        "Unsupported(text)."
    )


def usable_backends(name: str | None) -> tuple[list[Backend], dict[str, Reason]]:
    """The named backend, or every one that can run here; and why the others cannot (name → reason).

    Raises:
        UnknownNameError: no such backend. UsageError: the named one cannot run here.
    """
    if name is not None:
        backend = load_backend(name)
        if (reason := told(name, backend.unavailable())) is not None:
            raise UsageError(f"The backend {name} cannot run here: {reason}.")
        return [backend], {}
    found: list[Backend] = []
    absent: dict[str, Reason] = {}
    for known in BACKENDS:
        try:
            backend = load_backend(known)
        except MissingPackageError as error:
            absent[known] = Unsupported.of("{}", str(error))
            continue
        reason = told(known, backend.unavailable())
        if reason is None:
            found.append(backend)
        else:
            absent[known] = reason
    if not found:
        raise UsageError("No backend can run here: " + "; ".join(f"{k}: {v}" for k, v in absent.items()))
    return found, absent


def usable_for_steps(name: str | None) -> list[Backend]:
    """What runs steps of generation of the named backend, or of every one that can run here: those that say
    where it is (`of_steps`).

    Raises:
        UsageError: the named one runs none, or not here.
    """
    if name is None or hasattr(load_backend(name), "of_steps"):
        places = [getattr(backend, "of_steps", None) for backend in usable_backends(name)[0]]
        return [_made(place) for place in places if place is not None]
    others = [known for known in known_backends() if hasattr(load_backend(known), "of_steps")]
    raise UsageError(
        f"backend = {name!r} does not run generation; {', '.join(others)} do. Choose one of them, or leave "
        "it out."
    )


def _made(place: str) -> Backend:
    module, _, attribute = place.partition(":")
    backend: Backend = getattr(importlib.import_module(module), attribute)()
    return backend
