"""Is training feasible within what eager PyTorch needs?

A step planned at a share of eager's measured peak, for every architecture.

One process for each architecture of _architectures.py (tiny configs, random weights; batch 8, up to 64
tokens), forked from one that has imported the libraries and nothing of a model: importing costs seconds, and
what an architecture registers stays its own. Exact levers only, and no micro-batches: those would make any
budget look met. The loss is the model's own where it makes one of labels, else the mean square of what it
returns. The budget is 0.8x of eager's peak where activations are more than half of it, else 1.0x; the step's
graphs are emitted and simulated, storage by storage. `--least` plans at the smallest budget instead, which
the refusal of an impossible one names; `--run` also runs, verifies and measures the step.

    python benchmarks/feasible.py [--only gptj,mixtral] [--batch 8] [--tokens 64] [--least] [--run] [--rows
    rows.jsonl]

`--rows` adds each row to a file as it is found, and takes from there what is known: a run that was stopped
goes on. Exit 0 when every architecture is feasible within its share.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from _architectures import ARCHITECTURES, Arch, build
from _children import names_in
from _common import header

MIB = 2**20
#: What every child needs, imported once.
_LIBRARIES = [
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "transformers.modeling_utils",
    "effcompile.compiler.training.compile",
]
#: Fields of configs that bound the length.
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")


@dataclass(kw_only=True)
class Row:
    """One architecture.

    Bytes: `eager` measured at its highest instant, `resident` of it the model and its inputs; `budget` what
    was asked for, `planned` the simulated peak of the step planned at it, `ran` what it took when it was run
    (0: it was not).
    """

    name: str
    family: str
    eager: int = 0
    resident: int = 0
    gradients: int = 0
    budget: int = 0
    planned: int = 0
    ran: int = 0
    seconds: float = 0.0
    failure: str = ""

    @property
    def share(self) -> float:
        """Of eager's peak."""
        return self.budget / self.eager

    @property
    def activations_dominate(self) -> bool:
        return self.eager - self.resident - self.gradients > self.eager / 2

    @property
    def limit(self) -> int:
        """The budget that must be met."""
        return int(self.eager * (0.8 if self.activations_dominate else 1.0))

    @property
    def state(self) -> str:
        if self.failure:
            return "failed"
        return "ok" if self.budget <= self.limit and max(self.planned, self.ran) <= self.budget else "ABOVE"


def loss_of(outputs: Any, inputs: Any) -> Any:
    """The model's own loss, else the mean square of the first floating-point tensor that it returns."""
    import torch
    from torch.utils import _pytree as pytree

    if getattr(outputs, "loss", None) is not None:
        return outputs.loss
    values = outputs.values() if hasattr(outputs, "values") else outputs
    leaves = [t for t in pytree.tree_leaves(list(values)) if isinstance(t, torch.Tensor) and t.requires_grad]
    return leaves[0].float().square().mean()


def probe(name: str, batch: int, tokens: int, *, least: bool, run: bool) -> Row:
    """One architecture, in this process."""
    from effcompile.core.errors import EffcompileError

    arch = _long_enough(ARCHITECTURES[name], tokens)
    row = Row(name=name, family=arch.family)
    model, inputs = build(arch, batch, tokens)
    model.train()
    if "ForCausalLM" in arch.model or "LMHead" in arch.model:
        inputs["labels"] = inputs["input_ids"]
    _measure(row, model, inputs)
    start = time.perf_counter()
    try:
        _plan(row, model, inputs, least=least, run=run)
    except EffcompileError as error:
        row.failure = f"{type(error).__name__}: {error}"
    row.seconds = time.perf_counter() - start
    return row


def _long_enough(arch: Arch, tokens: int) -> Arch:
    """The architecture with positions for so many tokens."""
    return replace(
        arch,
        fields=arch.fields
        | {name: max(tokens, arch.fields[name]) for name in _LONGEST if name in arch.fields},
    )


def _plan(row: Row, model: Any, inputs: dict[str, Any], *, least: bool, run: bool) -> None:
    """A step planned at the limit, or at the smallest budget; where the limit is below that, too."""
    import effcompile

    request = {
        "mode": "training",
        "passes": ["no-microbatch"],
        "loss": None if "labels" in inputs else loss_of,
    }
    planned = lambda: effcompile.plan(model, inputs, memory=row.budget, target="cpu-generic", **request)  # noqa: E731
    row.budget = row.resident + 1 if least else row.limit
    try:
        row.planned = planned().predicted.peak_bytes
    except effcompile.InfeasibleError as error:
        row.budget = int(error.nearest["memory"])
        row.planned = planned().predicted.peak_bytes
    if run:
        row.ran = effcompile.optimize(
            model, inputs=inputs, memory=row.budget, **request
        ).plan.measured.peak_bytes


def _measure(row: Row, model: Any, inputs: dict[str, Any]) -> None:
    """Eager's second step: the first one makes what later ones keep."""
    from effcompile.core import torch_compat_memory

    tensors = [*model.parameters(), *model.buffers(), *inputs.values()]
    row.resident = sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )

    def step() -> None:
        loss_of(model(**inputs), inputs).backward()

    step()
    model.zero_grad(set_to_none=True)
    with torch_compat_memory.watched_memory("cpu") as peak:
        step()
    row.gradients = sum(p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None)
    model.zero_grad(set_to_none=True)
    row.eager = row.resident + peak()


def line(row: Row) -> str:
    """One row of the table."""
    name = f"| {row.name} | {row.family} | {row.eager / MIB:.2f} | {row.resident / MIB:.2f}"
    if row.failure:
        return f"{name} | – | – | – | {row.failure.splitlines()[0][:300]} |"
    ran = f" (ran {row.ran / MIB:.2f})" if row.ran else ""
    return f"{name} | {row.budget / MIB:.2f} | {row.planned / MIB:.2f}{ran} | {row.share:.2f} | {row.state} |"


def rows_of(names: list[str], arguments: argparse.Namespace) -> Iterator[Row]:
    """The row of each name: from the file where it is known, else found now, and added to it."""
    file = Path(arguments.rows) if arguments.rows else None
    known = (
        [msgspec.json.decode(text) for text in file.read_text().splitlines()]
        if file and file.exists()
        else []
    )
    rows = {told["name"]: Row(**told) for told in known}
    yield from (rows[name] for name in names if name in rows)
    multiprocessing.set_forkserver_preload(_LIBRARIES)
    for name in names:
        if name in rows:
            continue
        row = _in_a_child(name, arguments)
        if file:
            with file.open("ab") as opened:
                opened.write(msgspec.json.encode(asdict(row)) + b"\n")
        yield row


def _in_a_child(name: str, arguments: argparse.Namespace) -> Row:
    """The row of a process of its own, or that there is none."""
    processes = multiprocessing.get_context("forkserver")
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=_answer, args=(theirs, name, vars(arguments)))
    child.start()
    theirs.close()
    try:
        if ours.poll(arguments.timeout):
            return Row(**ours.recv())
        return Row(
            name=name,
            family=ARCHITECTURES[name].family,
            failure=f"no result within {arguments.timeout:.0f} s",
        )
    except EOFError:
        child.join()
        return Row(name=name, family=ARCHITECTURES[name].family, failure=f"ended with {child.exitcode}")
    finally:
        child.kill()
        child.join()


def _answer(told: Connection, name: str, asked: dict[str, Any]) -> None:
    """What a child does."""
    try:
        row = probe(name, asked["batch"], asked["tokens"], least=asked["least"], run=asked["run"])
    except Exception as error:  # every architecture has a row
        traceback.print_exc()
        row = Row(
            name=name,
            family=ARCHITECTURES[name].family,
            failure=f"not an effcompile error: {type(error).__name__}: {error}"[:400],
        )
    told.send(asdict(row))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="comma-separated names")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per architecture")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--least", action="store_true", help="plan at the smallest budget")
    parser.add_argument("--run", action="store_true", help="run, verify and measure the step as well")
    parser.add_argument("--rows", default="", help="a file of rows: what is there is not found again")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    print("\n".join(header("Training within eager's peak", 1)))
    print(f"Batch {arguments.batch}, up to {arguments.tokens} tokens; MiB.\n")
    print(
        "| architecture | family | eager | model | budget | planned peak | budget ÷ eager | "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    rows = []
    for row in rows_of(names_in(parser, arguments.only), arguments):
        rows.append(row)
        print(line(row), flush=True)
    good = sum(row.state == "ok" for row in rows)
    print(
        f"\n{good} of {len(rows)} are feasible within eager's peak (at 0.8x of it where activations are "
        "more than half)."
    )
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
