"""What the sections of gpu.py share: where figures go, how they are timed and compared. With `--dry` all is tiny and interpreted."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

DEVICE = "cpu" if DRY else "cuda"
DTYPE = torch.float32 if DRY else torch.bfloat16
Timed = dict[str, Callable[[], Any]]

#: Files that figures are written to besides the screen.
OUT: list[Any] = []
#: When nothing further is started, by time.monotonic().
END = [float("inf")]


def missing(*packages: str) -> list[str]:
    """Those that cannot be imported here."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def late() -> bool:
    """Whether the time is up."""
    return time.monotonic() > END[0]


def say(**figures: Any) -> None:
    """One result: to the screen and to --out."""
    line = json.dumps({key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figures.items()})
    print(line, flush=True)
    for file in OUT:
        file.write(line + "\n")
        file.flush()


def seconds(run: Callable[[], Any]) -> float:
    """Median of one call."""
    if DRY:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    from triton.testing import do_bench

    return float(do_bench(run, warmup=25, rep=150, return_mode="median")) / 1e3


def compare(case: str, flops: float, contestants: Timed, **notes: Any) -> None:
    """Time all contestants twice, ours first; say each one's time, rate, and how much faster ours is."""
    rounds: dict[str, list[float]] = {}
    for _ in range(1 if DRY else 2):
        for name, run in contestants.items():
            if late():
                say(case=case, name=name, error="out of time")
                continue
            try:
                rounds.setdefault(name, []).append(seconds(run))
            except Exception as error:  # a backend that does not take the case, or has no memory
                rounds.pop(name, None)
                say(case=case, name=name, error=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error) else ''}")
    mine = min(rounds.get("ours", [float("nan")]))
    for name, times in rounds.items():
        best = min(times)
        say(case=case, name=name, ms=best * 1e3, tflops=flops / best / 1e12, ours_is=best / mine, spread=max(times) / best - 1, **notes)


def close(case: str, found: Tensor, expected: Tensor, limit: float) -> None:
    """Say the relative error in the Euclidean norm."""
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    say(case=f"correct: {case}", error=error, ok=bool(error <= limit))


def make(*shape: int, dtype: torch.dtype = DTYPE, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=grad)
