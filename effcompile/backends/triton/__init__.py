"""Tiled kernels in Triton: `use` makes them a model's.

Importing this package imports no triton; `unavailable` says why they cannot run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from effcompile.backends.triton import places
from effcompile.backends.triton.configs import architecture, found_with, interpreting
from effcompile.core.reasons import Because, Reason, Unsupported

if TYPE_CHECKING:
    from effcompile.backends.triton.proof import KernelVerdict

__all__ = ["device", "examined", "interpreting", "origin", "refuted", "register", "unavailable", "use"]

#: The oldest triton the kernels are tested with (torch 2.11 brings 3.6).
_OLDEST = (3, 6)
#: Modules whose `register` gives a device our kernels → what those run.
_OPERATORS = {
    "attention": "attention",
    "block_sparse": "block-sparse linears",
    "cached_attention": "attention over a cache",
    "compress": "kept values in 8 bits",
    "group_linear": "linears in groups",
    "group_quant": "8-bit and 4-bit codes",
    "loss_head": "loss heads",
    "states8": "8-bit optimizer states",
    "rows": "norms, gates and rotations",
}
#: Forms of one of them that are taken where they are right and faster → what they run.
_FORMS = {"attention_in_tiles": "attention by whole tiles (TMA)"}
_MADE = "NVIDIA GPUs of compute capability 8 to 10 and 12, and AMD gfx942 and gfx950"


def unavailable() -> Unsupported | None:
    """None, or why the kernels cannot run in this process on the current GPU, with what would mend it.

    Imports no triton.
    """
    return _unavailable(_current())


def _current() -> int | None:
    """The current GPU's index: verdicts are on one GPU, and there may be others."""
    return torch.cuda.current_device() if not interpreting() and torch.cuda.is_available() else None


@cache
def _unavailable(gpu: int | None) -> Unsupported | None:
    if importlib.util.find_spec("triton") is None:
        return Unsupported("triton is not installed: pip install 'effcompile[triton]'")
    found = _version()
    if found is not None and tuple(map(int, found.split(".")[:2])) < _OLDEST:
        return Unsupported.of(
            "triton {} is older than {}.{}: pip install --upgrade triton", found, _OLDEST[0], _OLDEST[1]
        )
    if interpreting():
        return None
    if gpu is None:
        return Unsupported("there is no GPU here that PyTorch can use")
    return (
        None
        if architecture(torch.device("cuda", gpu)) is not None
        else Unsupported.of(
            "no tiles were made for {}: there are some for {}", torch.cuda.get_device_name(gpu), _MADE
        )
    )


def _version() -> str | None:
    """Of triton, without importing it; None for a build that came under another name."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def device() -> str:
    """The type of device that the kernels are for in this process."""
    return "cpu" if interpreting() else "cuda"


def register(device: str = "cuda") -> Reason | None:
    """Make the kernels those of our operators for a type of device, in this process.

    Returns why not, where they cannot run.

    A family whose results are not PyTorch's on the current device stays PyTorch's there: see `refuted`.
    """
    reason = unavailable()
    if reason is None:
        if interpreting():  # the stock one computes bf16 on bit patterns
            importlib.import_module("effcompile.backends.triton.interpreter").patch_interpreter()
        wrong = refuted(device)
        if (gpu := _current()) is not None:  # it may be registered for another
            places.leave(wrong, torch.device("cuda", gpu))
        for name in _OPERATORS:
            if name not in wrong:
                importlib.import_module(f"effcompile.backends.triton.{name}").register(device)
    return reason


def refuted(device: str) -> Mapping[str, str]:
    """Families of kernels that are not right on the current device → how that was seen.

    The interpreter's: see `effcompile doctor`.
    """
    return _refuted(device, _current())


@cache
def _refuted(device: str, gpu: int | None) -> Mapping[str, str]:
    if interpreting():
        return {}
    found = importlib.import_module("effcompile.backends.triton.proof").proven(tuple(_OPERATORS), device)
    return {name: reason for name, reason in found.items() if reason is not None}


def examined() -> Iterator[tuple[str, Sequence[KernelVerdict]]]:
    """Each family of kernels in words, and the verdicts on it in bf16 and fp32, where they can run: on a GPU
    or in the interpreter.
    """
    proof = importlib.import_module("effcompile.backends.triton.proof")
    for name, words in {**_OPERATORS, **_FORMS}.items():
        verdicts = proof.prove([(name, dtype) for dtype in proof.USUAL], device())
        if any(verdict.case or verdict.reason for verdict in verdicts):
            yield words, verdicts


def use(devices: Collection[str]) -> tuple[Reason, ...]:
    """Make them the kernels of a model with tensors on these types of device.

    Returns what the report says of it, if one is a GPU.
    """
    if device() not in devices:
        foreign = sorted({*devices} - {"cpu", "cuda", "meta"})
        text = (
            "Triton's kernels are declined, torch's own stand in: they are for {}, and there are none for {}"
        )
        return (Because.of(text, _MADE, " and ".join(foreign)),) if foreign else ()
    reason = register(device())
    if reason is not None:
        return (Because("Triton's kernels are declined, torch's own stand in: {name}", (str(reason),)),)
    wrong = refuted(device())
    run = ", ".join(words for name, words in _OPERATORS.items() if name not in wrong)
    left = (
        Because("Triton's kernels of {name} are declined, torch's own stand in: {name}", (_OPERATORS[n], why))
        for n, why in wrong.items()
    )
    return (Because("Triton's kernels run {name}: {name}", (run or "nothing", origin())), *left)


def origin() -> str:
    """Where their tiles come from."""
    if interpreting():
        return "in its interpreter"
    gpu = _current()
    arch = architecture(None if gpu is None else torch.device("cuda", gpu))
    assert arch is not None, "register() has looked"
    return f"tiles of {arch}, compiled with triton {found_with(arch)}"
