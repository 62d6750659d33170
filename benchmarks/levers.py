"""Every memory lever at one budget: recompute, offload and compress each alone, in pairs, and all, predicted and run.

    python benchmarks/levers.py [--models gpt2,llama] [--budgets 6] [--bandwidth 12GB] [--out FILE]

Per model and budget: the predicted time of the best plan with each subset over that of the fastest form of the step with
everything kept ("-": none fits). Budgets go evenly from the smallest
feasible with all levers to the unconstrained peak. The joint plan is run: allocator's peak against the budget, pool bytes
against the plan, and the gradient's cosine against the unplanned graph's. Exit 1 on a violation, or a joint plan that is
slower than a subset's by more than the proof's gap.
"""

from __future__ import annotations

import argparse
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import _common
from _common import told
from _step_models import build

GAP = 0.0101  # the proof's, of the step's time; with rounding


def main() -> int:
    options = _options()
    _common.use_threads(options.threads)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    lines = _common.header("Levers", options.threads)
    print("\n".join(lines), flush=True)
    text, bad, rows = [], False, []
    for name in options.models:
        with told(name):
            table, faults, found = _model(name, options)
        print("\n".join(table), flush=True)
        text, bad, rows = text + table, bad or bool(faults), rows + found
    _common.write_out(options.out, lines + text, {"rows": rows})
    return int(bad)


def _model(name: str, options: argparse.Namespace) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    from effcompile.capture import capture_training
    from effcompile.compiler.training.levers import Subsets, subsets_of
    from effcompile.compiler.training.prepare import Figures, prepare
    from effcompile.compiler.training.solve import best_schedule, leanest
    from effcompile.machines import load_target
    from effcompile.passes import Levers, load_training_passes
    from effcompile.passes.compress import Compress
    from effcompile.passes.offload import Offload

    model, batch = build(name)
    levers = Levers(offload=Offload(bandwidth=options.bandwidth), compress=Compress())
    checkpoint, heads, pointwise = load_training_passes(None)[:3]
    figures = Figures(target=load_target("cpu-generic"), here=True)
    prepared = prepare(capture_training(model, (), batch), checkpoint, heads, pointwise, figures, levers=levers)
    subsets, variants = Subsets(found=prepared, ways=(), levers=levers, checkpoint=checkpoint, figures=figures), prepared.variants
    low = min(leanest(v, checkpoint) for v in variants)
    high = best_schedule(variants, checkpoint, None)[0].trace.peak_bytes
    budgets = [low + round((high - low) * k / max(1, options.budgets - 1)) for k in range(options.budgets)]
    every = subsets_of(subsets.names)
    faults: list[str] = []
    table, rows, least = [], [], min(v.seconds for v in variants)
    for budget in budgets:
        solved = {names: _solved(subsets, names, budget) for names in every}
        joint = solved[subsets.names]
        assert joint is not None, "the smallest budget is feasible with all levers"
        ran = _run(model, batch, joint)
        slower = [n for n, s in solved.items() if s is not None and joint.seconds > s.seconds + GAP * joint.prepared.seconds]
        if ran["peak"] > budget or ran["host"] != joint.trace.host_bytes or slower:
            faults.append(f"{name} at {budget}: {ran}, slower than {slower}")
        extra = [f"{100 * (s.seconds / least - 1):+.1f} %" if s is not None else "-" for s in solved.values()]
        checked = [f"{ran['peak'] / budget:.3f}", str(ran["host"]), f"{ran['cosine']:.6f}"]
        table.append([f"{budget / 1e6:.2f}", *extra, *checked])
        rows.append({"model": name, "budget": budget, "extra": dict(zip(map("+".join, every), extra, strict=True)), **ran})
    head = ["budget MB", *map(" + ".join, every), "peak / budget", "pool bytes, as planned", "cosine"]
    return [f"\n{name}", *_common.markdown(head, table), *faults], faults, rows


def _solved(subsets: Any, names: tuple[str, ...], budget: int) -> Any:
    """The best schedule with these levers alone; None where nothing fits."""
    from effcompile.errors import InfeasibleError

    try:
        return subsets.solve(names, budget).schedule
    except InfeasibleError:
        return None


def _run(model: Any, batch: dict[str, Any], joint: Any) -> dict[str, Any]:
    """One step of the joint plan: allocator's peak, pool's peak, cosine of its gradient with the unplanned graph's."""
    from effcompile.backends.torch.training import StepRunner
    from effcompile.compiler.training import verify
    from effcompile.ops.offload import host_pool
    from effcompile.remat.emit import emit

    pool = host_pool()
    pool.reset_peak()
    runner = StepRunner(model, joint.prepared.step, joint.emitted)
    found = verify.run(lambda: runner.loss((), batch), model)
    plain = StepRunner(model, joint.prepared.step, emit(joint.prepared.cut, joint.prepared.cut.decidable))
    wanted = verify.run(lambda: plain.loss((), batch), model)
    pairs = [(found.gradients[n].double(), g.double()) for n, g in wanted.gradients.items() if g is not None]
    dot, a, b = (math.fsum(float((x * y).sum()) for x, y in of) for of in (pairs, [(x, x) for x, _ in pairs], [(y, y) for _, y in pairs]))
    return {"peak": joint.prepared.cut.given_bytes + (found.peak_bytes or 0), "host": pool.peak, "cosine": dot / math.sqrt(a * b)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=["gpt2", "llama", "vit"])
    parser.add_argument("--budgets", type=int, default=6)
    parser.add_argument("--bandwidth", default="12GB")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
