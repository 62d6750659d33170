"""Models with eager attention, whole: stock PyTorch, Inductor and effcompile, interleaved in one process per
family.

python benchmarks/attention_models.py                 # the 26 families of the facts, d 512, s 1024
python benchmarks/attention_models.py --families llama,mistral --seq 2048 --backends torch-inductor
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import _common as common
from _attention_families import LISTED, Sizes, build

_LEAST_ROUNDS = 3


def main() -> None:
    given = _arguments()
    if given.one:
        common.use_threads(given.threads)
        print(json.dumps(_measure(given.one, given)))
        return
    lines = common.header("Eager attention end to end", given.threads)
    rows: list[dict[str, Any]] = []
    for name in given.families.split(","):
        with common.told(name):
            rows.append(_in_process(name, given))
        # a long run that is cut off has its rows
        common.write_out(given.out, lines + _table(rows, given), {"rows": rows})
    print("\n".join(lines + _table(rows, given)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--families", default=",".join(LISTED), help="names in _attention_families.py, by comma"
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--backends", default="", help="only these of ours, by comma; all that run here by default"
    )
    parser.add_argument("--timeout", type=int, default=420, help="seconds for one family")
    parser.add_argument("--out", type=Path, help="also write FILE.md and FILE.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_process(name: str, given: argparse.Namespace) -> dict[str, Any]:
    settings = [
        f"--{key}={getattr(given, key)}"
        for key in ("width", "seq", "layers", "rounds", "threads", "backends")
    ]
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--one", name, *settings],
            capture_output=True,
            text=True,
            timeout=given.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"family": name, "failed": f"longer than {given.timeout} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        return dict(json.loads(lines[-1]))
    return {"family": name, "failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}


def _sizes(given: argparse.Namespace) -> Sizes:
    heads = max(1, given.width // 64)
    side = 8 * max(1, round((given.seq - 1) ** 0.5))  # as many patches as tokens, near enough
    return Sizes(
        batch=1, seq=given.seq, layers=given.layers, width=given.width, heads=heads,
        kv_heads=max(1, heads // 4), vocab=2048, inner=4 * given.width, window=given.seq // 8, image=side,
        patch=8,
    )  # fmt: skip


def _measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    import torch

    import effcompile

    model, inputs = build(name, _sizes(given))
    model = model.eval()
    if hasattr(model, "config"):
        model.config.use_cache = False
    torch._dynamo.config.recompile_limit = 64
    with torch.no_grad():
        wanted = _first(model(**inputs))
        inductor = torch.compile(model)
        found: dict[str, Any] = {"family": name}
        start = time.perf_counter()
        try:
            inductor(**inputs)
            ways = {"eager": lambda: model(**inputs), "inductor": lambda: inductor(**inputs)}
        except Exception as error:
            found["inductor_failed"] = common.reason_of(error)
            ways = {"eager": lambda: model(**inputs)}
        found["inductor_ready"] = time.perf_counter() - start
        start = time.perf_counter()
        others = [b for b in _backends() if given.backends and b not in given.backends.split(",")]
        with common.backends_without(*others):
            ours = effcompile.optimize(model, inputs=inputs)
        found["ours_ready"] = time.perf_counter() - start
        found["error"] = common.relative_error(_first(ours(**inputs)), wanted)
        ways["ours"] = lambda: ours(**inputs)
        found |= {"backend": ours.plan.backend, "forms": _forms(ours.plan)}
        found["seconds"] = _interleaved(ways, given.rounds)
    return found


def _backends() -> list[str]:
    from effcompile.backends import BACKENDS

    return list(BACKENDS)


def _forms(plan: Any) -> str:
    return ",".join(sorted({str(d.applied or d.option) for d in plan.decisions if d.kind == "attention"}))


def _first(outputs: Any) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    return next(
        leaf
        for leaf in pytree.tree_leaves(outputs)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    )


def _interleaved(ways: dict[str, Any], rounds: int) -> dict[str, float]:
    """Least seconds of each, run in turn."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(max(rounds, _LEAST_ROUNDS)):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def _table(rows: list[dict[str, Any]], given: argparse.Namespace) -> list[str]:
    columns = [
        "family",
        "eager ms",
        "inductor ms",
        "ours ms",
        "eager ÷ ours",
        "inductor ÷ ours",
        "error",
        "ours",
        "attention",
    ]
    cells = []
    for row in rows:
        if "failed" in row:
            cells.append([row["family"], *["–"] * 6, "failed", row["failed"][:60]])
            continue
        t = row["seconds"]
        compiled = t.get("inductor")
        cells.append([
            row["family"], f"{t['eager'] * 1e3:.1f}", f"{compiled * 1e3:.1f}" if compiled else "failed",
            f"{t['ours'] * 1e3:.1f}", f"{t['eager'] / t['ours']:.2f}",
            f"{compiled / t['ours']:.2f}" if compiled else "–", f"{row['error']:.1e}", row["backend"],
            row["forms"],
        ])  # fmt: skip
    faster = sum(
        r["seconds"].get("inductor", float("inf")) > r["seconds"]["ours"] for r in rows if "seconds" in r
    )
    what = (
        f"d {given.width}, s {given.seq}, {given.layers} layers, batch 1, fp32, least of "
        f"{given.rounds} interleaved rounds."
    )
    return [what, "", *common.markdown(columns, cells), "", f"Faster than Inductor: {faster} of {len(rows)}."]


if __name__ == "__main__":
    main()
