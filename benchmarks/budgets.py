"""No violations: GPT-2, Llama, BERT, T5 and ViT steps at 20 budgets each, the allocator's peak against the
budget.

    python benchmarks/budgets.py [--models gpt2,llama,bert,t5,vit] [--budgets 20] [--exact] [--out FILE]

Budgets go evenly from the smallest feasible to the unconstrained peak. Per model: violations, the largest
difference between predicted and real peak, whether loss and gradients were bit-identical to the unplanned
graph, whether more memory ever cost more predicted time. `--exact` adds 20 and more HF architectures at one
budget each, dropout 0.1 on. Exit 1 on any fault.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import _common
from _common import told
from _step_models import EXACT, build

MODELS = ("gpt2", "llama", "bert", "t5", "vit")


def main() -> int:
    options = _options()
    _common.use_threads(options.threads)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    lines = _common.header("Budgets kept", options.threads)
    print("\n".join(lines), flush=True)
    rows = [_swept(name, options.budgets) for name in options.models]
    text = _common.markdown(
        [
            "model",
            "budgets",
            "violations",
            "largest |predicted − real|",
            "bit-identical",
            "monotone",
            "seconds",
        ],
        [_cells(r) for r in rows],
    )
    print("\n".join(text), flush=True)
    bad = any(
        r["violations"] or r["exact"] != "yes" or r["monotone"] != "yes" or r["difference"] > 0.02
        for r in rows
    )
    if options.exact:
        found = [_exact(name) for name in EXACT]
        more = _common.markdown(
            ["architecture", "budget kept", "bit-identical", "largest error against eager", "note"], found
        )
        print("\n".join(["", *more]), flush=True)
        text += ["", *more]
        bad = bad or sum(row[2] == "yes" for row in found) < 20
    _common.write_out(options.out, lines + text, {"rows": rows})
    return int(bad)


def _cells(r: dict[str, Any]) -> list[str]:
    difference = f"{100 * r['difference']:.3f} %"
    return [
        r["model"],
        str(r["budgets"]),
        str(r["violations"]),
        difference,
        r["exact"],
        r["monotone"],
        f"{r['seconds']:.0f}",
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--budgets", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def _swept(name: str, count: int) -> dict[str, Any]:
    """One model over its budgets."""
    from _budgets import sweep

    start = time.perf_counter()
    model, batch = build(name)
    with told(f"{name}: {count} budgets"):
        results = list(sweep(model, batch, count))
    violations = sum(r.real > r.budget for r in results)
    difference = max(abs(r.predicted - r.real) / r.real for r in results)
    seconds = [r.seconds for r in results]
    monotone = all(b <= a * (1 + 1e-9) for a, b in pairwise(seconds))
    exact = all(r.exact for r in results)
    return {
        "model": name,
        "budgets": len(results),
        "violations": violations,
        "difference": difference,
        "exact": "yes" if exact else "NO",
        "monotone": "yes" if monotone else "NO",
        "seconds": time.perf_counter() - start,
    }


def _exact(name: str) -> list[str]:
    from _budgets import sweep

    try:
        model, batch = build(name)
        with told(name):
            tight = next(sweep(model, batch, 2))
    except Exception as error:
        return [name, "", "", "", _common.reason_of(error)]
    kept = "yes" if tight.real <= tight.budget else "NO"
    return [
        name,
        kept,
        "yes" if tight.exact else "NO",
        f"{tight.eager_error:.1e}",
        f"{tight.recomputed} operators run again",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
