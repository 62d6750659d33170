"""BERT-base and GPT-2-small on this CPU: every ONNX Runtime, PyTorch and OpenVINO way beside effcompile, in
one interleaved run.

    python benchmarks/inference.py [--models bert,gpt2] [--shapes 1x128,8x128] [--errors 0,0.005,0.01,0.031]
                                   [--rounds 7] [--only ORT,effcompile] [--skip compile] [--fixed]
                                   [--reuse-plans] [--out FILE]

Peers are built once and kept in $EFFCOMPILE_BENCH; effcompile plans anew in each run unless --reuse-plans.
Weights and tokens are random: the error is numerical fidelity on the timed input. Exit 1 when a plan of ours
failed or broke its error limit.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common
from _common import Call, Row

if TYPE_CHECKING:
    from _peers import Case

    from effcompile import Executable

DEFAULT_SHAPES = {"bert": "1x128,8x128", "gpt2": "1x256"}
EXACT = 1e-5  # reordered fp32 sums differ by less


def main() -> int:
    options = _options()
    _common.use_threads(options.threads)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch

    torch._dynamo.config.recompile_limit = 64  # all compiled peers share one forward's code
    lines = _common.header("Inference on CPU", options.threads)
    print("\n".join(lines), flush=True)
    tables: list[dict[str, Any]] = []
    for name in options.models:
        for shape in options.shapes or DEFAULT_SHAPES[name].split(","):
            case = _case(name, shape, options.threads)
            rows, disturbed = _run(case, options)
            text = [
                f"## {name} {shape}",
                "",
                *_table(rows),
                "",
                disturbed,
                "",
                *_verdicts(rows, options.errors),
                "",
            ]
            print("\n".join(text), flush=True)
            lines += text
            tables.append(
                {
                    "model": name,
                    "shape": shape,
                    "disturbed": disturbed,
                    "rows": [row.as_dict() for row in rows],
                }
            )
            _common.write_out(options.out, lines, {"header": lines[:7], "tables": tables})
            gc.collect()
    ours = [row for table in tables for row in table["rows"] if row["family"] == "effcompile"]
    return int(any(row["failed"] or row["error"] > max(row["point"], EXACT) for row in ours))


def _options() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=words, default=["bert", "gpt2"])
    parser.add_argument(
        "--shapes", type=words, default=[], help="batch x sequence; default: BERT 1x128,8x128, GPT-2 1x256"
    )
    parser.add_argument(
        "--errors", type=lambda text: [float(word) for word in words(text)], default=[0.0, 5e-3, 1e-2, 3.1e-2]
    )
    parser.add_argument(
        "--only", type=words, default=[], help="rows whose name contains one of these (and torch eager fp32)"
    )
    parser.add_argument("--skip", type=words, default=[], help="rows whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=7, help="each row is timed twice in each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--fixed",
        action="store_true",
        help="plans of ours are for the timed shape alone, where peers' errors are counted, too",
    )
    parser.add_argument(
        "--reuse-plans",
        action="store_true",
        help="carry out the plans of an earlier run instead of planning anew",
    )
    parser.add_argument("--out", type=Path, help="writes FILE.md and FILE.json")
    options = parser.parse_args()
    if unknown := set(options.models) - set(DEFAULT_SHAPES):
        parser.error(f"--models {', '.join(sorted(unknown))}: known are {', '.join(DEFAULT_SHAPES)}")
    return options


def _case(name: str, shape: str, threads: int) -> Case:
    import torch
    from _peers import SUBJECTS, Case

    torch.manual_seed(0)
    batch, seq = (int(part) for part in shape.split("x"))
    model = SUBJECTS[name].build().eval()
    return Case(
        subject=SUBJECTS[name],
        model=model,
        batch=batch,
        seq=seq,
        folder=_common.work_folder(),
        threads=threads,
    )


def _run(case: Case, options: argparse.Namespace) -> tuple[list[Row], str]:
    """Load all rows, then time all of them in turn; also how far other processes disturbed the timing."""

    calls: dict[str, Call] = {}
    rows = [*_load_peers(case, options, calls), *_load_ours(case, options, calls)]
    disturbed = _common.time_in_turn(calls, rows, options.rounds)
    return rows, f"{disturbed}; above 1 even minima are inflated, and OpenMP's (torch) the most."


def _wanted(name: str, options: argparse.Namespace) -> bool:
    kept = not options.only or any(part in name for part in options.only)
    return kept and not any(part in name for part in options.skip)


def _load_peers(case: Case, options: argparse.Namespace, calls: dict[str, Call]) -> list[Row]:
    from _peers import EAGER, PEERS

    rows: list[Row] = []
    for peer in PEERS:
        if peer.name != EAGER and not _wanted(peer.name, options):
            continue
        row = Row(name=peer.name, family=peer.family)
        rows.append(row)
        start = time.perf_counter()
        with _common.told(peer.name):
            try:
                loaded = peer.load(case)
                row.error, row.megabytes = _error(case, loaded.call()), loaded.megabytes
                calls[peer.name] = loaded.call
            except Exception as error:  # whatever a peer raises is its result
                row.failed = _common.reason_of(error)
        row.ready_seconds = time.perf_counter() - start
        gc.collect()
    return rows


def _load_ours(case: Case, options: argparse.Namespace, calls: dict[str, Call]) -> list[Row]:
    """A row per error point, and another one without OpenVINO where that is what the first one chose."""
    rows: list[Row] = []
    for point in options.errors:
        name = f"effcompile, error ≤ {point:g}" if point else "effcompile, exact"
        if not _wanted(name, options):
            continue
        row, executable = _ours(case, name, point, options, calls)
        rows.append(row)
        if executable is not None and executable.plan.backend == "openvino":
            with _common.backends_without("openvino"):
                rows.append(_ours(case, f"{name}, without OpenVINO", point, options, calls)[0])
    return rows


def _ours(
    case: Case, name: str, point: float, options: argparse.Namespace, calls: dict[str, Call]
) -> tuple[Row, Executable | None]:  # fmt: skip
    row = Row(name=name, family="effcompile", point=point)
    inputs, start = case.inputs(), time.perf_counter()
    shape = f"{case.batch}x{case.seq}{'_fixed' if options.fixed else ''}"
    kept = case.folder / "plans" / f"{case.subject.name}_{shape}_{_common.file_name(name)}.json"
    with _common.told(name):
        try:
            executable = _common.optimize(
                case.model, inputs, kept, options.reuse_plans,
                max_error=point, dynamic=False if options.fixed else None,
            )  # fmt: skip
            row.error = _error(case, executable(**inputs)[0])
        except Exception as error:
            row.failed = _common.reason_of(error)
            return row, None
        finally:
            row.ready_seconds = time.perf_counter() - start
    plan = executable.plan
    row.note = plan.backend
    row.megabytes = plan.measured.weight_bytes / 1e6 if plan.measured and plan.measured.weight_bytes else None
    calls[name] = lambda: executable(**inputs)
    return row, executable


def _error(case: Case, found: Any) -> float:
    """Relative L2 error at the timed input, against the model run eagerly in fp32."""
    import torch

    with torch.inference_mode():
        reference = case.model(**case.inputs())[0]
    return _common.relative_error(torch.as_tensor(found).float(), reference)


# ---------------------------------------------------------------- what is printed


def _table(rows: Sequence[Row]) -> list[str]:
    eager = next(row for row in rows if row.family == "torch")
    timed = sorted((row for row in rows if row.samples), key=lambda row: row.median)
    cells = [
        [
            row.name,
            f"{row.median * 1e3:.1f}",
            f"{row.best * 1e3:.1f}",
            f"{eager.median / row.median:.2f}",
            f"{row.error:.1e}",
            f"{row.megabytes:.0f}" if row.megabytes is not None else "–",
            f"{row.ready_seconds:.0f}",
            row.note,
        ]
        for row in timed
    ]
    columns = ["way", "median ms", "min ms", "× eager", "rel. L2", "MB", "ready s", "backend"]
    failed = [f"- FAILED {row.name}: {row.failed}" for row in rows if row.failed]
    return [*_common.markdown(columns, cells), *([""] if failed else []), *failed]


def _verdicts(rows: Sequence[Row], points: Sequence[float]) -> list[str]:
    """Per error limit: what a user gets from us against all, and from us without OpenVINO against
    the rest.
    """
    lines = []
    for point in points:
        limit = max(point, EXACT)
        ours = [row for row in rows if row.point == point]
        peers = [
            row
            for row in rows
            if row.point is None and row.samples and row.error is not None and row.error <= limit
        ]
        plain = [row for row in ours if row.note != "openvino"]
        lines.append(f"- error ≤ {limit:g}")
        lines.append("  - all peers: " + _verdict(peers, ours[:1], limit))
        lines.append(
            "  - ONNX Runtime and PyTorch only: "
            + _verdict([r for r in peers if r.family != "openvino"], plain, limit)
        )
    return ["fastest peer within the error : effcompile, median (minimum)", "", *lines]


def _verdict(peers: Sequence[Row], ours: Sequence[Row], limit: float) -> str:
    """Their time over ours: above 1 we are faster."""
    if not ours or not ours[0].samples:
        return "effcompile has no result" + (f": {ours[0].failed}" if ours else "")
    mine = ours[0]
    broken = (
        f"; ERROR {mine.error:.1e} IS ABOVE THE LIMIT"
        if mine.error is not None and mine.error > limit
        else ""
    )
    if not peers:
        return f"no peer is within it; {mine.median * 1e3:.1f} ms ({mine.note}){broken}"
    peer, best = min(peers, key=lambda row: row.median), min(row.best for row in peers)
    ratio = peer.median / mine.median
    word = "faster" if ratio > 1.02 else "level" if ratio >= 0.98 else "SLOWER"
    return (
        f"{peer.name} {peer.median * 1e3:.1f} ms : {mine.median * 1e3:.1f} ms ({mine.note}) = {ratio:.2f}× "
        f"({best * 1e3:.1f} : {mine.best * 1e3:.1f} = {best / mine.best:.2f}×), {word}{broken}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
