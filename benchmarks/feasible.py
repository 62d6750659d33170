"""Is training feasible within what eager PyTorch needs? The smallest budget that the planner meets beside eager's measured peak.

One process for each architecture of _architectures.py (tiny configs, random weights; batch 8, up to 64 tokens). Exact levers only, and no
micro-batches: those would make any budget look met. The loss is the model's own where it makes one of labels, else the mean square of what
it returns.

    python benchmarks/feasible.py [--only gptj,mixtral] [--jobs 1] [--timeout 600]

Exit 0 when every architecture is feasible at 1.0x eager's peak, and at 0.8x where activations are more than half of that peak.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from _architectures import ARCHITECTURES, build
from _children import answer, answers, arguments_of, names_in

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


def line(row: Row) -> str:
    """One line of the table."""
    figures = [f"{size / MIB:9.2f}" for size in (row.eager, row.resident, row.least)]
    dominate = "yes" if row.activations_dominate else "no"
    share = f"{row.share:6.2f}" if row.eager and not row.failure else "     –"
    return f"{row.name:30} {row.family:16} {' '.join(figures)} {share}  {dominate:11} {row.state:7} {row.seconds:5.0f}  {row.failure[:300]}"


def main() -> int:
    parser = arguments_of(__doc__, timeout=600.0)
    arguments = parser.parse_args()
    if arguments.child:
        answer(arguments, asdict(probe(arguments.child)))
        return 0
    print(f"{'architecture':30} {'family':16} {'eager MiB':>9} {'model':>9} {'least':>9} {'least/':>6}  activations {'':7} {'s':>5}")
    rows = []
    for told in answers(__file__, names_in(parser, arguments.only), arguments):
        rows.append(row := Row(**told))
        print(line(row), flush=True)
    good = sum(row.state == "ok" for row in rows)
    print(f"{good} of {len(rows)} are feasible within eager's peak (0.8x of it where activations are more than half).")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
