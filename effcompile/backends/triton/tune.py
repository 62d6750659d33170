"""The fastest of the configurations that compile, measured while a model is built and kept per GPU and triton
in the cache folder.

A step of the user's is never held up: where nothing was measured yet, the table's first choice is taken in
it.

The file is `tiles-<device>-triton<version>.json`. EFFCOMPILE_TUNE=off takes the table's first choice instead.
A file that is damaged, or that names a tile that is not among the table's any more, is measured again: it can
cost time, never a result.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch
from triton.testing import do_bench

from effcompile.backends.triton.configs import LaunchConfig
from effcompile.core.files import cache_folder

__all__ = ["Timer", "Tuner", "tuner"]

#: Relative difference of two tiles' results that sums in another order make in 16 bits.
_ROUNDED = 1e-2
#: Seconds of one call.
Timer = Callable[[Callable[[], object]], float]
#: What a configuration is tried with: a call of its kernel.
Trial = Callable[[LaunchConfig], Callable[[], object]]


def gpu_seconds(run: Callable[[], object]) -> float:
    """The median over some 50 ms, by CUDA events."""
    return float(do_bench(run, warmup=10, rep=50, return_mode="median")) / 1e3


class Tuner:
    """The choices of one device, held in a file.

    Attributes:
        measured: how often any tuner has measured in this process: whoever keeps a choice asks again when it
            grows.
    """

    measured: ClassVar[int] = 0

    def __init__(self, path: Path, timer: Timer = gpu_seconds) -> None:
        self.path, self.timer = path, timer
        self._found: dict[str, LaunchConfig] = {}

    def choose(
        self, name: str, options: Sequence[LaunchConfig], trial: Trial, *, measure: bool = True
    ) -> LaunchConfig:
        """The fastest of `options` (one or more), from memory, the file, or by measuring; the first, where
        nothing may be measured.

        `name`: of kernel, dtype and head size.
        """
        if len(options) == 1 or os.environ.get("EFFCOMPILE_TUNE", "").lower() in ("off", "0", "no"):
            return options[0]
        if name not in self._found:
            known = _read(self.path).get(name)
            kept = next((option for option in options if asdict(option) == known), None)
            if kept is None and not measure:
                return options[0]
            self._found[name] = kept or self._measured(name, options, trial)
            Tuner.measured += kept is None
        return self._found[name]

    def _measured(self, name: str, options: Sequence[LaunchConfig], trial: Trial) -> LaunchConfig:
        seconds: dict[int, float] = {}
        first: object = None
        for index, option in enumerate(options):
            try:
                run = trial(option)
                found = run()
                first = found if first is None else first
                if _same(found, first):
                    seconds[index] = self.timer(run)
            except Exception:
                # triton's errors have no common base: this version cannot build it, or the GPU cannot hold it
                continue
        best = options[min(seconds, key=seconds.__getitem__)] if seconds else options[0]
        if seconds:
            _write(self.path, {**_read(self.path), name: asdict(best)})
        return best


def _same(found: object, first: object) -> bool:
    """Whether two options' results are one another's, but for rounding: no speed makes up for another one."""
    pairs = list(zip(_tensors(found), _tensors(first), strict=True))
    return all(bool((a.float() - b.float()).norm() <= _ROUNDED * b.float().norm()) for a, b in pairs)


def _tensors(found: object) -> list[torch.Tensor]:
    parts = found if isinstance(found, tuple) else (found,)
    return [t for t in parts if isinstance(t, torch.Tensor) and t.numel()]


_tuners: dict[int, Tuner] = {}


def tuner(device: torch.device) -> Tuner:
    """The GPU's."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _tuners:
        name = re.sub(r"\W+", "-", torch.cuda.get_device_name(index)).strip("-").lower()
        _tuners[index] = Tuner(cache_folder() / f"tiles-{name}-triton{version('triton')}.json")
    return _tuners[index]


def _read(path: Path) -> dict[str, object]:
    """What the file holds; nothing where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, choices: Mapping[str, object]) -> None:
    """Whole or not at all; a folder that cannot be written costs another measurement next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
        ) as file:
            json.dump(choices, file, indent=1)
        os.replace(file.name, path)
    except OSError:
        return
