"""Every memory lever at one budget: each alone, the best pair, and all together, predicted; the joint plan is
run and checked.

    python benchmarks/levers.py [--models gpt2,llama,bert,t5,vit] [--budgets 20] [--table 5] [--bandwidth
    12GB] [--microbatch] [--out FILE]

Whole steps with AdamW, dropout 0.1. Budgets go evenly from the smallest that all levers reach to the peak of
the step with everything kept. At each the joint plan is run: the allocator's peak against the budget and the
prediction, the pool's bytes against the plan's, the gradient's error against eager's. At `--table` of them
the subsets are solved too: the step's predicted time over that of the joint plan ("-": does not fit). Last,
the smallest budgets: checkpoints alone against all levers. Exit 1 on a violation, a peak more than 2 % off,
or a joint plan slower than a subset's by more than the proof's gap.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _common
from _common import told
from _step_models import build

MODELS = ("gpt2", "llama", "bert", "t5", "vit")
GAP = 0.0101  # the proof's, of the step's time; with rounding
PASSES = (
    "offload.share=0.01",
    "compress.share=0.01",
    "states.eight_bit=true",
    "states.in_backward=true",
    "states.offload=true",
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model's step with all its levers, captured and cut."""

    name: str
    work: Any
    subsets: Any
    branches: Any


def main() -> int:
    options = _options()
    _common.use_threads(options.threads)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    lines = _common.header("Levers", options.threads)
    print("\n".join(lines), flush=True)
    faults: list[str] = []
    rows: list[dict[str, Any]] = []
    for name in options.models:
        with told(name):
            text, found = _swept(_request(name, options), options.budgets, options.table)
        print("\n".join(text), flush=True)
        lines, rows = lines + text, rows + found
        faults += [f"{name}, {row['budget']} bytes: {fault}" for row in found for fault in row["faults"]]
        _common.write_out(options.out, [*lines, "", *faults], {"rows": rows})
    print(
        "\n".join(["", *faults] if faults else ["", "no violation, and no subset is faster than all levers"])
    )
    return int(bool(faults))


def _request(name: str, options: argparse.Namespace) -> Request:
    import torch

    from effcompile.core.goal import Goal
    from effcompile.search.request import Task
    from effcompile.search.training.branches import Branches
    from effcompile.search.training.levers import Subsets
    from effcompile.search.training.work import make_work

    model, batch = build(name)
    goal = Goal(mode="training", max_error=0.05)
    passes = [
        f"offload.bandwidth={options.bandwidth}",
        *PASSES,
        *(["microbatch"] if options.microbatch else []),
    ]
    adam = lambda parameters: torch.optim.AdamW(parameters, foreach=False)  # noqa: E731
    asked = {"goal": goal, "passes": passes, "progress": _quiet(), "optimizer": adam}
    work = make_work(Task.of(model, (), batch, asked))
    branches = Branches(work=work, case=work.capture(False))
    subsets = Subsets(found=list(branches.every()), levers=work.passes.levers, figures=work.figures)
    return Request(name=name, work=work, subsets=subsets, branches=branches)


def _quiet() -> Any:
    from effcompile.search.progress import QUIET

    return QUIET


def _swept(request: Request, budgets: int, table: int) -> tuple[list[str], list[dict[str, Any]]]:
    """The table of a model, and its rows."""
    subsets = request.subsets
    low = subsets.reach(subsets.names, 1).peak_bytes
    plain = subsets.reach(("recompute",), 1).peak_bytes
    high = subsets.solve((), None).peak_bytes
    shown = {round(i * (budgets - 1) / max(1, table - 1)) for i in range(table)}
    rows = []
    for number in range(budgets):
        budget = low + round((high - low) * number / max(1, budgets - 1))
        rows.append(_row(request, budget, whole=number in shown))
    names = [name for name in rows[-1]["extra"] if name != "best pair"]
    cells = [
        [
            f"{r['budget'] / 1e6:.2f}",
            *(r["extra"].get(n, "-") for n in (*names, "best pair")),
            r["pair"],
            *_checked(r),
        ]
        for r in rows
        if r["extra"]
    ]
    head = [
        "budget MB",
        *(n or "none" for n in names),
        "best pair",
        "which",
        "peak / budget",
        "predicted / real",
        "pool B",
        "error",
    ]
    worst = max(abs(r["predicted"] / r["peak"] - 1) for r in rows)
    said = (
        f"{request.name}: {len(rows)} budgets, {sum(r['peak'] > r['budget'] for r in rows)} above "
        "theirs, largest |predicted − real| "
    )
    said += (
        f"{100 * worst:.3f} %; smallest budget {plain / 1e6:.2f} MB with checkpoints alone, "
        f"{low / 1e6:.2f} with all: {low / plain:.2f}"
    )
    return ["", said, "", *_common.markdown(head, cells)], rows


def _row(request: Request, budget: int, *, whole: bool) -> dict[str, Any]:
    """One budget: what the subsets reach, and what the joint plan does when it is run."""
    from effcompile.search.training.levers import lever_rows

    joint = request.subsets.solve(request.subsets.names, budget)
    row = _run(request, joint, budget)
    row |= {
        "budget": budget,
        "model": request.name,
        "seconds": joint.seconds,
        "extra": {},
        "pair": "-",
        "faults": _faults(row, budget),
    }
    for other in lever_rows(request.subsets, joint, budget)[0][:-1] if whole else ():
        name = "best pair" if len(other.levers) == 2 else "".join(other.levers)
        row["extra"][name] = "-" if other.seconds is None else f"{other.seconds / joint.seconds:.3f}"
        if name == "best pair":
            row["pair"] = " + ".join(other.levers)
        if (
            other.seconds is not None
            and joint.seconds > other.seconds + GAP * joint.schedule.prepared.seconds
        ):
            row["faults"].append(f"{other.levers} is faster: {other.seconds} s against {joint.seconds}")
    return row


def _run(request: Request, joint: Any, budget: int) -> dict[str, Any]:
    """The joint plan verified and measured once."""
    from dataclasses import replace

    from effcompile.core.findings import HostUse
    from effcompile.proof.training import confirm, timed
    from effcompile.proof.training.in_parts import runner_of
    from effcompile.search.training.build import build_plan

    timed._TIMING_SECONDS = 0.0
    work, best = request.work, joint.schedule
    plan = build_plan(
        joint, request.branches.chosen_from(joint), work.figures, replace(work.goal, memory=budget)
    )
    runner = runner_of(work.model, joint.case, best.emitted)
    made = confirm.verified(work, best.prepared, runner, plan)[0].plan
    pool = [note.bytes for note in made.notes if isinstance(note, HostUse)]
    return {
        "peak": made.measured.peak_bytes, "predicted": made.predicted.peak_bytes,
        "error": made.checks[0].error, "pool": pool[-1] if pool else 0, "pool_planned": best.trace.host_bytes,
    }  # fmt: skip


def _faults(row: dict[str, Any], budget: int) -> list[str]:
    faults = []
    if row["peak"] > budget:
        faults.append(f"peak {row['peak']} is above it")
    if abs(row["predicted"] / row["peak"] - 1) > 0.02:
        faults.append(f"peak {row['peak']}, predicted {row['predicted']}")
    if row["pool"] != row["pool_planned"]:
        faults.append(f"pool {row['pool']} bytes, planned {row['pool_planned']}")
    return faults


def _checked(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['peak'] / row['budget']:.3f}",
        f"{row['predicted'] / row['peak']:.4f}",
        str(row["pool"]),
        f"{row['error']:.1e}",
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--budgets", type=int, default=20)
    parser.add_argument("--table", type=int, default=5, help="budgets at which subsets are solved too")
    parser.add_argument("--bandwidth", default="12GB")
    parser.add_argument(
        "--microbatch",
        action="store_true",
        help="micro-batches too: solved once more for every divisor of the batch",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
