"""Is training feasible within what eager PyTorch needs? The smallest budget that the planner meets beside eager's measured peak.

One process for each architecture of _architectures.py (tiny configs, random weights; batch 8, up to 64 tokens). Exact levers only, and no
micro-batches: those would make any budget look met. The loss is the model's own where it makes one of labels, else the mean square of what
it returns.

    python benchmarks/feasible.py [--only gptj,mixtral] [--jobs 1] [--timeout 600]

Exit 0 when every architecture is feasible at 1.0x eager's peak, and at 0.8x where activations are more than half of that peak.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from _architectures import ARCHITECTURES, build

BATCH, LENGTH = 8, 64
MIB = 2**20


@dataclass(kw_only=True)
class Row:
    """One architecture. Bytes: `eager` measured at its highest instant, `resident` of it the model and its inputs; `least` planned."""

    name: str
    family: str
    eager: int = 0
    resident: int = 0
    gradients: int = 0
    least: int = 0
    seconds: float = 0.0
    failure: str = ""

    @property
    def share(self) -> float:
        return self.least / self.eager if self.eager else float("inf")

    @property
    def activations_dominate(self) -> bool:
        return self.eager - self.resident - self.gradients > self.eager / 2

    @property
    def state(self) -> str:
        if self.failure:
            return "failed"
        return "ok" if self.share <= (0.8 if self.activations_dominate else 1.0) else "ABOVE"


def loss_of(outputs: Any, inputs: Any) -> Any:
    """The model's own loss, else the mean square of the first floating-point tensor that it returns."""
    import torch
    from torch.utils import _pytree as pytree

    if getattr(outputs, "loss", None) is not None:
        return outputs.loss
    values = outputs.values() if hasattr(outputs, "values") else outputs
    leaves = [t for t in pytree.tree_leaves(list(values)) if isinstance(t, torch.Tensor) and t.requires_grad]
    return leaves[0].float().square().mean()


def probe(name: str) -> Row:
    """One architecture, in this process."""
    import effcompile
    from effcompile.core.errors import EffcompileError, InfeasibleError

    arch = ARCHITECTURES[name]
    row = Row(name=name, family=arch.family)
    model, inputs = build(arch, BATCH, LENGTH)
    model.train()
    if "ForCausalLM" in arch.model or "LMHead" in arch.model:
        inputs["labels"] = inputs["input_ids"]
    _measure(row, model, inputs)
    start = time.perf_counter()
    request = {"mode": "training", "passes": ["no-microbatch"], "loss": None if "labels" in inputs else loss_of, "target": "cpu-generic"}
    try:
        effcompile.plan(model, inputs, memory=row.resident + 1, **request)
        row.least = row.resident + 1
    except InfeasibleError as error:
        row.least = int(error.nearest["memory"])
    except EffcompileError as error:
        row.failure = f"{type(error).__name__}: {error}"
    row.seconds = time.perf_counter() - start
    return row


def _measure(row: Row, model: Any, inputs: dict[str, Any]) -> None:
    """Eager's second step: the first one makes what later ones keep."""
    from effcompile.core import torch_compat

    tensors = [*model.parameters(), *model.buffers(), *inputs.values()]
    row.resident = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def step() -> None:
        loss_of(model(**inputs), inputs).backward()

    step()
    model.zero_grad(set_to_none=True)
    with torch_compat.watched_memory("cpu") as peak:
        step()
    row.gradients = sum(p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None)
    model.zero_grad(set_to_none=True)
    row.eager = row.resident + peak()


def child(name: str, timeout: float) -> Row:
    """`probe` in a process of its own."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        command = [sys.executable, __file__, "--child", name, "--answer", answer.name]
        row = Row(name=name, family=ARCHITECTURES[name].family)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            row.failure = f"no result within {timeout:.0f} s"
            return row
        with contextlib.suppress(json.JSONDecodeError):
            return Row(**json.load(answer))
        last = [line for line in done.stderr.strip().splitlines() if line.strip()][-1:] or ["no output"]
        row.failure = f"not an effcompile error (exit {done.returncode}): {last[0]}"
    return row


def line(row: Row) -> str:
    """One line of the table."""
    figures = [f"{size / MIB:9.2f}" for size in (row.eager, row.resident, row.least)]
    dominate = "yes" if row.activations_dominate else "no"
    share = f"{row.share:6.2f}" if row.eager and not row.failure else "     –"
    return f"{row.name:30} {row.family:16} {' '.join(figures)} {share}  {dominate:11} {row.state:7} {row.seconds:5.0f}  {row.failure[:300]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated names")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per architecture")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--answer", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        row = probe(arguments.child)
        with open(arguments.answer, "w") as file:
            json.dump(asdict(row), file)
        return 0
    names = [name for name in arguments.only.split(",") if name] or list(ARCHITECTURES)
    os.environ["HF_HUB_OFFLINE"] = "1"
    print(f"{'architecture':30} {'family':16} {'eager MiB':>9} {'model':>9} {'least':>9} {'least/':>6}  activations {'':7} {'s':>5}")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = []
        for row in pool.map(lambda name: child(name, arguments.timeout), names):
            rows.append(row)
            print(line(row), flush=True)
    good = sum(row.state == "ok" for row in rows)
    print(f"{good} of {len(rows)} are feasible within eager's peak (0.8x of it where activations are more than half).")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
