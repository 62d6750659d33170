"""Is the chosen batch the best? `batch=` against a sweep of all its sizes, each planned by itself, for a
machine that is not here.

    python benchmarks/batch.py                     all models
    python benchmarks/batch.py gpt2 llama          some
    python benchmarks/batch.py gpt2 --measured     on this machine: steps of all sizes that fit, run in turn

Each model gets half of what its step takes with 8 examples and everything kept. Printed: the size chosen, the
best of the sweep, the examples a second of both (predicted, or measured), and how many sizes were planned of
how many, or the chosen step's peak.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from typing import Any

from _common import header, markdown, use_threads

if __name__ == "__main__":
    use_threads(1)

import torch
from _step_models import build

import effcompile
from effcompile.core.timing import interleaved

SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
TARGET = "h100-sxm"
MEASURED, CHOSEN = [1, 2, 4, 8, 16], "chosen"
_ROUNDS = 15
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
    # or else a size that does not fit is planned with gradients consumed in the backward
    asked["passes"] = ["states.in_backward=false"]
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
        name, f"{whole / 2**21:.1f} MiB", str(chosen), str(best), f"{rates[chosen]:.0f}",
        f"{rates[best]:.0f}", f"{rates[chosen] / rates[best]:.4f}", f"{planned} of {len(SIZES)}",
        f"{seconds:.0f} s", f"{spent:.0f} s",
    ]  # fmt: skip


def measured(name: str) -> list[str]:
    """The step that `batch=` chose for this machine, run in turn with a step planned for each size alone."""
    model, inputs = build(name)
    asked: dict[str, Any] = {
        "mode": "training",
        "optimizer": torch.optim.AdamW,
        "passes": ["states.in_backward=false"],
    }
    whole = effcompile.plan(model, at(inputs, 8), **asked).baseline.peak_bytes
    assert whole
    asked["memory"] = whole // 2
    found = effcompile.optimize(copy.deepcopy(model), at(inputs, 2), batch=MEASURED, **asked)
    chosen = found.plan
    assert chosen.batch is not None and chosen.measured is not None and chosen.measured.peak_bytes is not None
    own = at(inputs, chosen.batch)
    steps: dict[str, Any] = {CHOSEN: lambda: found(**own).loss.backward()}
    for size in MEASURED:
        given = at(inputs, size)
        try:
            planned = effcompile.optimize(copy.deepcopy(model), given, **asked)
        except effcompile.InfeasibleError:
            break
        steps[str(size)] = lambda planned=planned, given=given: planned(**given).loss.backward()
    seconds = {size: statistics.median(found) for size, found in interleaved(steps, _ROUNDS).items()}
    mine = chosen.batch / seconds.pop(CHOSEN)
    rates = {int(size): int(size) / took for size, took in seconds.items()}
    best = max(rates, key=rates.__getitem__)
    peak = f"{chosen.measured.peak_bytes / 2**20:.2f} of {asked['memory'] / 2**20:.2f} MiB"
    return [
        name, str(chosen.batch), str(best), f"{mine:.1f}", f"{rates[best]:.1f}", f"{mine / rates[best]:.3f}",
        " ".join(f"{size}: {rate:.1f}" for size, rate in rates.items()), peak,
    ]  # fmt: skip


def main() -> int:
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or list(MODELS)
    if "--measured" in sys.argv:
        heads = ["model", "chosen", "best", "examples/s", "best's", "share", "every size", "peak measured"]
        print(
            "\n".join(
                [
                    *header("The batch that is chosen, measured", 1),
                    *markdown(heads, [measured(name) for name in names]),
                ]
            )
        )
        return 0
    heads = [
        "model",
        "memory",
        "chosen",
        "best",
        "examples/s",
        "best's",
        "share",
        "planned",
        "chosen in",
        "swept in",
    ]
    print(
        "\n".join([*header("The batch that is chosen", 1), *markdown(heads, [row(name) for name in names])])
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
