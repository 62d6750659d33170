"""Is the chosen batch the best? `batch=` against a sweep of all its sizes, each planned by itself, for a machine that is not here.

    python benchmarks/batch.py                all models
    python benchmarks/batch.py gpt2 llama     some

Each model gets half of what its step takes with 8 examples and everything kept. Printed: the size chosen, the best of the sweep, the
examples a second of both (predicted), and how many sizes were planned of how many.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from _common import header, markdown
from _step_models import build

import effcompile

SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
TARGET = "h100-sxm"
MODELS = ("gpt2", "llama", "bert", "t5", "vit")


def at(inputs: dict[str, torch.Tensor], batch: int) -> dict[str, torch.Tensor]:
    """The inputs, repeated to so many examples."""
    return {name: value[torch.arange(batch) % len(value)] for name, value in inputs.items()}


def swept(model: torch.nn.Module, inputs: dict[str, torch.Tensor], asked: dict[str, Any]) -> dict[int, float]:
    """Batch → examples a second, of each size that fits."""
    rates = {}
    for size in SIZES:
        try:
            rates[size] = size / effcompile.plan(model, at(inputs, size), **asked).predicted.seconds
        except effcompile.InfeasibleError:
            break
    return rates


def row(name: str) -> list[str]:
    model, inputs = build(name)
    asked: dict[str, Any] = {"mode": "training", "target": TARGET, "optimizer": torch.optim.AdamW}
    asked["passes"] = ["states.in_backward=false"]  # or else a size that does not fit is planned with gradients consumed in the backward
    whole = effcompile.plan(model, at(inputs, 8), **asked).baseline.peak_bytes
    assert whole
    asked["memory"] = whole // 2
    start = time.perf_counter()
    plan = effcompile.plan(model, at(inputs, 2), batch=SIZES, **asked)
    chosen, seconds = plan.batch, time.perf_counter() - start
    start = time.perf_counter()
    rates = swept(model, inputs, asked)
    best = max(rates, key=rates.__getitem__)
    assert chosen is not None
    planned = 1 + sum(d.by == "batch" for d in plan.declined)
    spent = time.perf_counter() - start
    return [
        name, f"{whole / 2**21:.1f} MiB", str(chosen), str(best), f"{rates[chosen]:.0f}", f"{rates[best]:.0f}",
        f"{rates[chosen] / rates[best]:.4f}", f"{planned} of {len(SIZES)}", f"{seconds:.0f} s", f"{spent:.0f} s",
    ]  # fmt: skip


def main() -> int:
    names = sys.argv[1:] or MODELS
    heads = ["model", "memory", "chosen", "best", "examples/s", "best's", "share", "planned", "chosen in", "swept in"]
    print("\n".join([*header("The batch that is chosen", 1), *markdown(heads, [row(name) for name in names])]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
