"""Rates of this machine that a plan needs beside its kernels' times (a link's, a codec's), kept between plans
as those are: what changes from plan to plan has every block searched again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from effcompile.core.errors import EffcompileError
from effcompile.core.files import cache_folder, write_kept
from effcompile.core.kept_json import recalled
from effcompile.machine import native
from effcompile.machine.hardware import this_hardware

_MOST_BYTES, _MOST = 1 << 20, 1_000
#: Seconds per byte, or per element.
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1)]


class _File(msgspec.Struct, kw_only=True):
    """`of`: what they depend on beside the machine. rates: name → figures."""

    of: str
    rates: dict[str, list[_Rate]]


def kept_rates(name: str, device: str, measure: Callable[[], Sequence[float]]) -> tuple[float, ...]:
    """What `measure` finds, of the processor read from the cache where it was measured before.

    `name`: what is measured, and on what it depends.
    """
    if device != "cpu":
        return tuple(measure())
    path = cache_folder() / f"rates-{this_hardware().key}.json"
    file = _read(path)
    if found := file.rates.get(name):
        return tuple(found)
    measured = tuple(measure())
    if all(0 < rate <= 1 for rate in measured):
        kept = dict([*file.rates.items(), (name, list(measured))][-_MOST:])
        with contextlib.suppress(EffcompileError, OSError):
            write_kept(path, msgspec.json.encode(_File(of=file.of, rates=kept)))
    return measured


def _read(path: Path) -> _File:
    of = f"torch {torch.__version__}, kernels {_kernels()}"
    found: _File | None = recalled(path, _File, _MOST_BYTES, "kept rates")
    return found if found is not None and found.of == of else _File(of=of, rates={})


@cache
def _kernels() -> str:
    return native.fingerprint()
