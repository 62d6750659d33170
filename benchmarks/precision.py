"""A GPT-2 training step in fp32 and in 16 bits: eager, eager and torch.compile under torch.autocast, planned
exactly, planned with an error allowed, and that in micro-batches.

    python benchmarks/precision.py [--layers 12] [--width 768] [--tokens 256] [--batch 2] [--max-error 0.02]
    [--rounds 5] [--threads 1] [--clock wall] [--whole]

All run interleaved in one process; the process's CPU time, or the wall's, the least of the rounds. Peaks are
the allocator's, with gradients. The error is that of the whole gradient against eager fp32. `--whole` leaves
micro-batches out.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _common


def main() -> None:
    options = _options()
    _common.use_threads(options.threads)
    warnings.filterwarnings("ignore")
    lines = _common.header("Precision of a training step", options.threads)
    print("\n".join(lines), flush=True)
    table, data = _measured(options)
    print("\n".join(table))
    _common.write_out(options.out, [*lines, *table], data)


def _measured(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    import torch

    import effcompile
    from effcompile.proof.training import verify

    model, batch = _gpt2(options)

    def eager() -> Any:
        return model(**batch).loss

    def autocast() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**batch).loss

    steps: dict[str, Callable[[], Any]] = {
        "eager fp32": eager,
        "eager autocast bf16": autocast,
        "torch.compile autocast bf16": torch.compile(autocast),
    }
    plans = {}
    allowed = f"planned, error ≤ {options.max_error:g}"
    divided = (f"{allowed}, one example at a time", options.max_error, [f"microbatch.count={options.batch}"])
    asked: list[tuple[str, float | None, list[str] | None]] = [("planned, exact", None, None)]
    asked += [(allowed, options.max_error, None)] + [divided] * (not options.whole)
    for name, error, passes in asked:
        with _common.told(name):
            made = effcompile.optimize(
                model, inputs=batch, goal=effcompile.Goal(mode="training", max_error=error), passes=passes
            )
        plans[name], steps[name] = made.plan, lambda made=made: made(**batch).loss
    results = {name: verify.run(step, model) for name, step in steps.items()}
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    seconds: dict[str, float] = dict.fromkeys(steps, float("inf"))
    for _ in range(options.rounds):
        for name, step in steps.items():
            with verify.restored(model):
                start = clock()
                step().backward()
                seconds[name] = min(seconds[name], clock() - start)
    base = sum(p.numel() * p.element_size() for p in model.parameters())
    rows = []
    for name, result in results.items():
        taken = _taken(plans[name]) if name in plans else ""
        error = verify.compare_whole(result, results["eager fp32"], 1.0).error
        peak = f"{(base + (result.peak_bytes or 0)) / 2**20:.0f} MiB"
        predicted = f"{plans[name].predicted.seconds:.2f} s" if name in plans else ""
        ratio = f"{seconds['eager fp32'] / seconds[name]:.2f} ×"
        rows.append([name, taken, f"{seconds[name]:.2f} s", ratio, predicted, peak, f"{error:.1e}"])
    columns = [
        "step",
        "precision",
        f"{options.clock} time",
        "faster",
        "predicted",
        "peak",
        "error of the gradient",
    ]
    return _common.markdown(columns, rows), {"rows": rows}


def _taken(plan: Any) -> str:
    """The precision, and how the batch is divided where it is."""
    chosen = {d.kind: d.option for d in plan.decisions}
    return ", ".join(
        [chosen.get("precision", "fp32"), *([chosen["micro-batches"]] if "micro-batches" in chosen else [])]
    )


def _gpt2(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    import torch
    import transformers as hf

    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = hf.GPT2Config(
        n_layer=options.layers, n_embd=options.width, n_head=options.width // 64, use_cache=False, **drops
    )
    ids = torch.randint(0, config.vocab_size, (options.batch, options.tokens))
    return hf.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (
        ("layers", 12),
        ("width", 768),
        ("tokens", 256),
        ("batch", 2),
        ("rounds", 5),
        ("threads", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--max-error", type=float, default=0.02)
    parser.add_argument("--clock", choices=("CPU", "wall"), default="CPU")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
