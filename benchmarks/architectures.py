"""Capture (with --lower: an exact plan through ONNX Runtime) on many HuggingFace architectures: tiny configs,
random weights.

One process each (_children.py). A row compares the captured graph (with
--lower: the ONNX Runtime session) with the original model at the example, at a second shape and with a padded
mask.

    python benchmarks/architectures.py [--only bert,gpt2] [--lower] [--jobs 1] [--timeout 180]

Exit 0 when at least --least architectures pass (default: 40, or all of --only).
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from _architectures import ARCHITECTURES, build
from _children import answer, answers, arguments_of, names_in

if TYPE_CHECKING:
    from effcompile.ir.figures import Check

LIMIT = 1e-5


@dataclass(kw_only=True)
class Row:
    """One architecture's result, as its process prints it.

    `seconds`: of the capture, or of all of `optimize`.
    """

    name: str
    family: str
    seconds: float = 0.0
    dynamic: str = ""
    remarks: tuple[str, ...] = ()
    errors: dict[str, float] = field(default_factory=dict)
    padding: str = ""
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and bool(self.errors) and max(self.errors.values()) <= LIMIT

    @property
    def state(self) -> str:
        return "ok" if self.passed else "failed" if self.failure or not self.errors else "wrong"


def probe(name: str, lower: bool) -> Row:
    """One architecture, in this process."""
    from effcompile.core.errors import EffcompileError

    row = Row(name=name, family=ARCHITECTURES[name].family)
    model, inputs = build(ARCHITECTURES[name])
    start = time.perf_counter()
    try:
        (_lowered if lower else _captured)(row, model, inputs)
    except EffcompileError as error:
        row.failure = f"{type(error).__name__}: {error}"
    row.seconds = row.seconds or time.perf_counter() - start
    return row


def _captured(row: Row, model: Any, inputs: dict[str, Any]) -> None:
    from effcompile.capture import capture, verify_capture

    start = time.perf_counter()
    program = capture(model, (), inputs)
    row.seconds = time.perf_counter() - start
    row.dynamic = _names(dim for spec in program.inputs for dim in spec.shape if isinstance(dim, str))
    row.remarks = (*map(str, program.mends), *program.fixed)
    _take(row, checks := verify_capture(program, model))
    row.padding = next((str(check.note) for check in checks if check.name.startswith("padded")), "no mask")


def _lowered(row: Row, model: Any, inputs: dict[str, Any]) -> None:
    """The exact plan; the captured graph is compared before it is lowered (a difference is a
    CaptureError).
    """
    import effcompile

    plan = effcompile.optimize(model, inputs=inputs, backend="onnxruntime", target="cpu-generic").plan
    row.dynamic = _names(re.findall(r"([a-z]\w*)=", " ".join(plan.inputs)))
    row.remarks = tuple(map(str, plan.notes))
    _take(row, plan.checks)
    row.padding = next(
        iter(
            re.findall(
                r"padding changes the output by [^)]*|the model itself ignores this mask",
                " ".join(row.remarks),
            )
        ),
        "no mask",
    )


def _names(axes: Iterable[str]) -> str:
    return " ".join(dict.fromkeys(axes)) or "none"


def _take(row: Row, checks: Iterable[Check]) -> None:
    row.errors = {check.name.split()[0]: check.error for check in checks}


def table(rows: list[Row], width: int | None) -> None:
    """Print the rows, then what failed and why."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=width, highlight=False)
    grid = Table(box=None, padding=(0, 1, 0, 0))
    for heading in (
        "architecture",
        "family",
        "result",
        "s",
        "dynamic",
        "example",
        "second",
        "padded",
        "the mask",
    ):
        grid.add_column(
            heading,
            justify="right" if heading in ("s", "example", "second", "padded") else "left",
            no_wrap=True,
        )
    for row in rows:
        figures = [
            f"{row.errors[key]:.0e}" if key in row.errors else "–" for key in ("example", "second", "padded")
        ]
        mask = row.padding.removeprefix("padding changes the output by ")
        grid.add_row(row.name, row.family, row.state, f"{row.seconds:.1f}", row.dynamic, *figures, mask)
    console.print(grid)
    for row in rows:
        for text in (*(remark for remark in row.remarks if "fixed" in remark), row.failure):
            if text:
                console.print(f"{row.name}: {text}", markup=False)
    console.print(f"{sum(row.passed for row in rows)} of {len(rows)} pass.")


def main() -> int:
    parser = arguments_of(__doc__, timeout=180.0)
    parser.add_argument("--lower", action="store_true", help="also lower to ONNX Runtime and verify there")
    parser.add_argument("--least", type=int, default=None, help="fewest passes for exit 0")
    parser.add_argument("--width", type=int, default=None)
    parser.add_argument("--json", default="", help="also write the rows to this file")
    arguments = parser.parse_args()
    if arguments.child:
        answer(arguments, asdict(probe(arguments.child, arguments.lower)))
        return 0
    names, rows = names_in(parser, arguments.only), []
    for told in answers(__file__, names, arguments, ["--lower"] if arguments.lower else []):
        rows.append(row := Row(**told))
        print(f"{row.name}: {row.state}", file=sys.stderr, flush=True)
    table(rows, arguments.width)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
    least = arguments.least if arguments.least is not None else min(40, len(names))
    return 0 if sum(row.passed for row in rows) >= least else 1


if __name__ == "__main__":
    sys.exit(main())
