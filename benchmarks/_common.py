"""What the benchmarks share: threads, work folder, statistics, our own side, the header.

Import it before torch.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from effcompile import Executable

PACKAGES = ("effcompile", "torch", "onnxruntime", "onnx", "openvino", "nncf", "torchao", "transformers")


def use_threads(threads: int) -> None:
    """Keep this process and all its thread pools to so many cores. Call it before torch is imported.

    Raises:
        SystemExit: the machine has fewer.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < threads:
        raise SystemExit(f"--threads {threads}: this process may use {len(cores)} cores.")
    if "torch" in sys.modules:
        raise RuntimeError("use_threads comes before torch is imported")
    os.sched_setaffinity(0, cores[:threads])
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(work_folder() / "inductor"))
    import torch

    torch.set_num_threads(threads)


def work_folder() -> Path:
    """Where built models are kept between runs: $EFFCOMPILE_BENCH, else a folder of the temporary one."""
    folder = Path(os.environ.get("EFFCOMPILE_BENCH") or Path(tempfile.gettempdir()) / "effcompile-bench")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def header(title: str, threads: int) -> list[str]:
    """What was run where and when, as markdown lines."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return [
        f"# {title}",
        "",
        f"{_cpu()}, {threads} threads · Python {platform.python_version()} · "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "",
        " · ".join(found),
        "",
        f"Load average at the start: {load} (1, 5, 15 minutes). Above 1 other work shares the machine and "
        "figures are noisy.",
        "",
    ]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say on stderr what takes time, and how long it took."""
    print(f"  {what} ...", file=sys.stderr, end="", flush=True)
    start = time.perf_counter()
    try:
        yield
    finally:
        print(f" {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def reason_of(error: BaseException) -> str:
    """An exception in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"


def relative_error(found: torch.Tensor, reference: torch.Tensor) -> float:
    """‖found − reference‖ / ‖reference‖ over all entries."""
    import torch

    exact = reference.double()
    return float(torch.linalg.vector_norm(found.double() - exact) / torch.linalg.vector_norm(exact))


@dataclass(kw_only=True)
class Row:
    """One line of a table: a way to run the model, its figures, or why it failed."""

    name: str
    family: str  # "torch" | "onnxruntime" | "openvino" | "effcompile"
    point: float | None = None  # ours: the max_error that was asked
    note: str = ""
    error: float | None = None
    megabytes: float | None = None
    ready_seconds: float | None = None
    samples: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def best(self) -> float:
        return min(self.samples)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A markdown table whose columns also line up as plain text; all but the first and last column to the
    right.
    """
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    edge = len(columns) - 1

    def line(cells: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i in (0, edge) else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = (
        "|"
        + "|".join("-" * (w + 2) if i in (0, edge) else "-" * (w + 1) + ":" for i, w in enumerate(widths))
        + "|"
    )
    return [line(columns), rule, *map(line, rows)]


@contextmanager
def backends_without(*names: str) -> Iterator[None]:
    """Plan as if these backends were not installed."""
    from effcompile.backends import BACKENDS

    hidden = {name: BACKENDS.pop(name) for name in names if name in BACKENDS}
    try:
        yield
    finally:
        BACKENDS.update(hidden)


def optimize(
    model: torch.nn.Module, inputs: Mapping[str, Any], plan_file: Path, reuse: bool, **request: Any
) -> Executable:
    """effcompile.optimize as a user calls it; the plan is kept, and with `reuse` an earlier one is carried
    out instead.
    """
    import effcompile

    if reuse and plan_file.exists():
        try:
            calibration = request.get("calibration")
            return effcompile.optimize(model, inputs=inputs, plan=plan_file, calibration=calibration)
        except effcompile.FormatError as error:
            print(f"\n  {plan_file.name} is planned again: {error}", file=sys.stderr)
    executable = effcompile.optimize(model, inputs=inputs, **request)
    executable.plan.save(plan_file)
    return executable


def file_name(text: str) -> str:
    """The text with ASCII letters, digits, points and single underscores only."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("_")


def folder_bytes(folder: Path) -> int:
    """Bytes of an artifact folder, less what only describes it."""
    return sum(
        f.stat().st_size
        for f in folder.rglob("*")
        if f.is_file() and f.name not in ("plan.json", "report.html")
    )


def seconds(run: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def time_in_turn(calls: Mapping[str, Call], rows: Sequence[Row], rounds: int) -> str:
    """Time all calls in turn, into the rows of their names; says how far other processes disturbed the
    timing.
    """
    from effcompile.core.timing import interleaved

    before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    with told(f"timing {len(calls)} ways, {rounds} rounds"):
        samples = interleaved(calls, rounds)
    switches = (resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before) / max(1, 3 * len(calls) * rounds)
    for row in rows:
        row.samples = samples.get(row.name, [])
    disturbed = (
        f"while timing, other work took a core from this process {switches:.1f} times per call "
        f"(load {os.getloadavg()[0]:.1f})"
    )
    return f"{rounds} rounds × 2 calls each; {disturbed}. Near 0 the figures hold"


def write_out(out: Path | None, lines: Sequence[str], data: Mapping[str, Any]) -> None:
    """FILE.md and FILE.json, each whole or not at all."""
    if out is None:
        return
    import msgspec

    from effcompile.core.files import write_atomically

    write_atomically(out.with_suffix(".md"), ("\n".join(lines) + "\n").encode())
    write_atomically(out.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(data), indent=1))


Call = Callable[[], Any]
