"""Attention found and replaced in many families: eager HuggingFace models (and torch's own), tiny or at any
size, random weights.

Each row is a process of its own. It captures the model for inference and exports its training forward,
replaces every attention by one call, and compares with the model itself: outputs at the example and at a
second shape, gradients, and both in bf16. Inputs are padded.

    python benchmarks/attention_families.py [--only llama,t5] [--form attention|sdpa] [--jobs 1] [--width 512
    --seq 1024 ...]

Exit 0 when every attention of every family is replaced and every error is within its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from _attention_families import LISTED, NAMES, Sizes, attentions_of, build, variant_of

if TYPE_CHECKING:
    import torch
    from torch import fx

    from effcompile.sites.attention.rewrite import Rewritten

#: Relative L2 errors that count as equal, by column. bf16 columns: see `Row.passed`.
LIMITS = {"example": 1e-5, "second": 1e-5, "gradients": 1e-5, "bf16": 1e-2, "bf16 gradients": 1e-2}
#: What cannot be said in SDPA.
NOT_SDPA = ("softcap", "sink")


@dataclass(kw_only=True)
class Row:
    """One family's result, as its process prints it.

    `errors`: ours against eager, by column. `noise` and `ours`: eager's bf16 and ours against eager's fp32,
    outputs and gradients.
    """

    name: str
    attentions: int = 0
    found: list[int] = field(default_factory=list)  # in the inference graph, in the training graph
    errors: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    ours: dict[str, float] = field(default_factory=dict)
    padding: float = 0.0
    reasons: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def passed(self) -> bool:
        """bf16 may differ from eager's bf16 by as much as that differs from fp32: two roundings
        of one truth.
        """
        if (
            self.failure
            or self.found != [self.attentions] * 2
            or set(self.errors) < {"example", "gradients", "bf16"}
        ):
            return False
        return all(
            error <= max(LIMITS[column], self.noise.get(column, 0.0)) for column, error in self.errors.items()
        )


def probe(name: str, sizes: Sizes, form: str) -> Row:
    """One family, in this process."""
    row = Row(name=name, attentions=attentions_of(name, sizes))
    try:
        _inference(row, sizes, form)
        _training(row, sizes, form)
    except Exception as error:
        row.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if os.environ.get("EFFCOMPILE_BENCH_RAISE"):
            raise
    return row


def _inference(row: Row, sizes: Sizes, form: str) -> None:
    import torch

    from effcompile.capture import capture
    from effcompile.ir.export import allowed, resized, sizes_of

    model, inputs = build(row.name, sizes)
    program = capture(model.eval(), (), inputs)
    edited = program.editable("attention")
    row.found.append(_replaced(row, edited.graph, form))
    with torch.no_grad():
        truth = _reference(model, inputs)
        row.errors["example"] = difference(edited.module(**inputs), truth)
        larger = {axis: size + 3 for axis, size in sizes_of(program).items()}
        if larger and allowed(program, larger):
            second = resized(program, larger)[1]
            row.errors["second"] = difference(edited.module(**second), _reference(model, second))
        unpadded = {k: _shown(k, v) for k, v in inputs.items()}
        row.padding = difference(_reference(model, unpadded), truth)


def _shown(name: str, value: Any) -> Any:
    """The input with nothing hidden."""
    import torch

    return (
        torch.ones_like(value)
        if name == "attention_mask"
        else torch.zeros_like(value)
        if value.dtype == torch.bool
        else value
    )


def _training(row: Row, sizes: Sizes, form: str) -> None:
    """Forward and gradients through the forward graph that the training path gives to AOTAutograd."""
    import torch

    exact: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
    for dtype, columns in ((torch.float32, ("", "gradients")), (torch.bfloat16, ("bf16", "bf16 gradients"))):
        model, inputs = build(row.name, sizes)
        model = model.to(dtype)
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        with training_graph(model, inputs) as graph:
            truth = _step(model, model, inputs)
            found = _replaced(row, graph.graph, form, training=form == "attention")
            with differentiable(form):
                mine = _step(graph, model, inputs)
        if exact is None:
            row.found.append(found)
        for column, ours, theirs, fp32 in zip(columns, mine, truth, exact or truth, strict=True):
            if column:
                row.errors[column] = difference(ours, theirs)
                row.noise[column] = difference(theirs, fp32)
                row.ours[column] = difference(ours, fp32)
        exact = exact or truth


@contextlib.contextmanager
def training_graph(model: torch.nn.Module, inputs: dict[str, Any]) -> Iterator[fx.GraphModule]:
    """torch.export's forward of a model in training mode, with the mends that capture knows."""
    import torch

    from effcompile.capture.mends import mended
    from effcompile.core import torch_compat

    with mended(model, inputs), torch.enable_grad():
        model.train()
        with torch_compat.quiet_export():
            graph = torch.export.export(model, (), inputs, strict=False).module(check_guards=False)
        yield graph  # type: ignore[misc]


def differentiable(form: str) -> contextlib.AbstractContextManager[Any]:
    """SDPA as plain products: the gradient of its CPU kernel is wrong where finfo.min hides a whole row, as
    padding on the left does.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH) if form == "sdpa" else contextlib.nullcontext()


def _step(
    call: torch.nn.Module, model: torch.nn.Module, inputs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, and gradients of a random projection of them, by the model's parameters."""
    import torch

    outputs = floats(call(**inputs))
    torch.manual_seed(1)
    loss = sum((out.float() * torch.randn(out.shape)).sum() for out in outputs)
    assert isinstance(loss, torch.Tensor)
    own = dict(call.named_parameters())
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad and name in own]
    gradients = torch.autograd.grad(loss, [own[name] for name in names], allow_unused=True)
    return [out.detach() for out in outputs], [g for g in gradients if g is not None]


def _replaced(row: Row, graph: fx.Graph, form: str, training: bool = False) -> int:
    from effcompile.sites.attention.rewrite import Rewritten, rewrite

    outcomes = rewrite(graph, forms=(form,), training=training)  # type: ignore[arg-type]
    done: list[Rewritten] = [outcome for outcome in outcomes if isinstance(outcome, Rewritten)]
    row.reasons += [f"{o.site}: {o.reason}" for o in outcomes if not isinstance(o, Rewritten)]
    return len(done)


def _reference(model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
    from effcompile.capture.mends import as_reference

    with as_reference(model):
        return model(**inputs)


def floats(outputs: Any) -> list[torch.Tensor]:
    """The floating tensors of an output."""
    import torch
    from torch.utils import _pytree as pytree

    return [
        leaf
        for leaf in pytree.tree_leaves(outputs)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]


def difference(ours: Any, theirs: Any) -> float:
    """‖ours − theirs‖ / ‖theirs‖ over all tensors together."""
    import torch

    mine, truth = (
        torch.cat([leaf.double().flatten() for leaf in floats(outputs)]) for outputs in (ours, theirs)
    )
    return float((mine - truth).norm() / truth.norm())


def child(name: str, arguments: argparse.Namespace) -> Row:
    """`probe` in a process of its own: HF registers pytree classes globally, so that a warm process proves
    nothing.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", name, "--answer", answer.name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=arguments.timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return Row(name=name, failure=f"no result within {arguments.timeout:.0f} s")
        with contextlib.suppress(json.JSONDecodeError):
            return Row(**json.load(answer))
    last = [line for line in done.stderr.strip().splitlines() if line.strip()][-1:] or ["no output"]
    return Row(name=name, failure=f"exit {done.returncode}: {last[0]}")


def table(rows: list[Row], width: int | None) -> None:
    """Print the rows, then what was left and why."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=width, highlight=False)
    grid = Table(box=None, padding=(0, 1, 0, 0))
    own = ("eager's own", "ours", "eager's gradients", "ours'")  # bf16 against fp32
    for heading in ("family", "variant", "result", "inference", "training", "padding", *LIMITS, *own):
        grid.add_column(
            heading, justify="left" if heading in ("family", "variant", "result") else "right", no_wrap=True
        )
    for row in rows:
        counts = [f"{count}/{row.attentions}" for count in row.found] + ["–"] * (2 - len(row.found))
        figures = [f"{row.errors[c]:.0e}" if c in row.errors else "–" for c in LIMITS]
        noise = [
            f"{of[c]:.1e}" if c in of else "–"
            for c in ("bf16", "bf16 gradients")
            for of in (row.noise, row.ours)
        ]
        state = "ok" if row.passed else "failed" if row.failure else "not all"
        grid.add_row(row.name, variant_of(row.name), state, *counts, f"{row.padding:.0e}", *figures, *noise)
    console.print(grid)
    for row in rows:
        for text in dict.fromkeys((*row.reasons, row.failure)):
            if text:
                console.print(f"{row.name}: {text}", markup=False)
    listed = [row for row in rows if row.name in LISTED]
    console.print(
        f"{sum(r.passed for r in listed)} of {len(listed)} listed families, {sum(r.passed for r in rows)} "
        f"of {len(rows)} in all."
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="comma-separated names")
    parser.add_argument("--form", choices=("attention", "sdpa"), default="attention")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds per family")
    parser.add_argument("--columns", type=int, default=None, help="width of the table")
    parser.add_argument("--json", default="", help="also write the rows to this file")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--answer", default="", help=argparse.SUPPRESS)
    for size in fields(Sizes):
        parser.add_argument(f"--{size.name.replace('_', '-')}", type=int, default=size.default)
    arguments = parser.parse_args()
    sizes = replace(Sizes(), **{size.name: getattr(arguments, size.name) for size in fields(Sizes)})
    os.environ["HF_HUB_OFFLINE"] = "1"
    if arguments.child:
        row = probe(arguments.child, sizes, arguments.form)
        with open(arguments.answer, "w") as file:
            json.dump(asdict(row), file)
        return 0
    names = [name for name in arguments.only.split(",") if name] or list(NAMES)
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"unknown: {', '.join(unknown)}. Known: {', '.join(NAMES)}")
    if arguments.form == "sdpa":
        names = [name for name in names if variant_of(name) not in NOT_SDPA]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = []
        for row in pool.map(lambda name: child(name, arguments), names):
            print(f"{row.name}: {'ok' if row.passed else row.failure or row}", file=sys.stderr, flush=True)
            rows.append(row)
            if arguments.json:  # a long run that is cut off has its rows
                with open(arguments.json, "w") as file:
                    json.dump([asdict(row) for row in rows], file, indent=1)
    table(rows, arguments.columns)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
