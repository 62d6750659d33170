"""What the sections of gpu.py share: where figures go, how they are timed and compared.

With `--dry` all is tiny and interpreted.

A kernel takes seconds to compile, and there are some hundred: before anything is timed, processes beside this
one run a share of the cases once each (`SHARE`), for what that leaves in the compilers' caches on disk.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton.testing  # noqa: E402
from torch import Tensor  # noqa: E402

if DRY:
    import _gpu_fake

    _gpu_fake.install()

DEVICE = "cpu" if DRY else "cuda"
DTYPE = torch.float32 if DRY else torch.bfloat16
Timed = dict[str, Callable[[], Any]]

#: Files that figures are written to besides the screen.
OUT: list[Any] = []
START = time.monotonic()
#: When nothing further is started, by time.monotonic().
END = [float("inf")]
#: In a process that only compiles: (its number, how many there are, cases so far).
SHARE: list[int] = []


def missing(*packages: str) -> list[str]:
    """Those that cannot be imported here."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def late() -> bool:
    """Whether the time is up."""
    return time.monotonic() > END[0]


def mine() -> bool:
    """Whether this process does the case that begins here: all of them, or its share of what is to be
    compiled; none when it is late.
    """
    if not SHARE:
        return not late()
    SHARE[2] += 1
    return SHARE[2] % SHARE[1] == SHARE[0] and not late()


def say(**figures: Any) -> None:
    """One result: to the screen and to --out."""
    if SHARE:
        return
    figures["at"] = time.monotonic() - START
    line = json.dumps(
        {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figures.items()}
    )
    print(line, flush=True)
    for file in OUT:
        file.write(line + "\n")
        file.flush()


@contextmanager
def attempt(case: str, **notes: Any) -> Iterator[None]:
    """Say what fails within, and go on; a fault of the GPU itself ends the section, since nothing runs in
    this process after it.
    """
    try:
        yield
    except Exception as error:
        if broken(error) and not SHARE:
            raise
        first = str(error).strip().splitlines()[:1]
        say(case=case, error=f"{type(error).__name__}: {first[0][:200] if first else ''}", **notes)


def broken(error: BaseException) -> bool:
    """Whether the GPU's context is lost."""
    said = str(error)
    return "CUDA error" in said and "out of memory" not in said


def seconds(run: Callable[[], Any]) -> float:
    """Median of one call; all that runs before is warm, and L2 is flushed between the calls."""
    if SHARE:
        run()
        return 1.0
    return float(triton.testing.do_bench(run, warmup=25, rep=100, return_mode="median")) / 1e3


def queued(runs: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """All the runs as one CUDA graph: what they take on the GPU, without Python's share, which a small
    product is shorter than.
    """
    if SHARE:
        return lambda: [run() for run in runs]
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run() for run in runs]
    return lambda: (graph.replay(), kept)[0]


def compare(
    case: str, flops: float, contestants: Timed, *, gbytes: float | None = None, calls: int = 1, **notes: Any
) -> None:
    """Time all contestants twice, ours first; say each one's time, rate, and how much faster ours is.

    A run is of `calls` calls.
    """
    rounds: dict[str, list[float]] = {}
    for _ in range(1 if DRY or SHARE else 2):
        for name, run in contestants.items():
            if late():
                say(case=case, name=name, error="out of time")
                continue
            with attempt(case, name=name):
                rounds.setdefault(name, []).append(seconds(run) / calls)
    ours = min(rounds.get("ours") or [float("nan")])
    for name, times in rounds.items():
        if times:
            best = min(times)
            rate = {"tflops": flops / best / 1e12} if gbytes is None else {"gbytes_per_s": gbytes / best}
            say(
                case=case,
                name=name,
                ms=best * 1e3,
                **rate,
                ours_is=best / ours,
                spread=max(times) / best - 1,
                **notes,
            )


def close(case: str, found: Tensor, expected: Tensor, limit: float) -> None:
    """Say the relative error in the Euclidean norm."""
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    say(case=f"correct: {case}", error=error, ok=bool(error <= limit))


def make(*shape: int, dtype: torch.dtype = DTYPE, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=grad)
