"""Block-sparse linears on this CPU: our kernels beside dense and every ready-made sparse product, interleaved
in one process.

    python benchmarks/block_sparse.py [--threads 1,2] [--shapes 3072x768,768x3072] [--rows 512] [--sparsity
                                      0.9,0.5] [--blocks 1,4,8,16,32] [--dtype fp32|bf16] [--rounds 15] [--out
                                      FILE]

Weights W (N, K) have the same number of blocks in each block row, at random places. Ours reads x and writes y
row-major and pays for all layout; the peers get x transposed for nothing. Time: CPU seconds of the process
with one thread, wall seconds with more; the median of the faster half of the rounds, each of which runs every
way once. "Packed for oneDNN" is the faster dense product, where there is one.

eps = time per sparse FLOP / time per dense FLOP, over forward, input gradient and weight gradient. Training
at 0.9 sparsity beats the dense model of equal FLOPs in time where eps is below the break-even: 2.0 for b=1,
1.2 for b=16 (Dietrich et al., appendix A.3); 1.4 and 1.3 for b=4 and 8 are read off their table 1 by the same
rule. Exit 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _common

#: (block, sparsity) → least gain over dense F.linear of (forward, forward and backward of the gradients), at
#: 3072x768, 512 rows, fp32.
BARS = {
    (4, 0.9): (3.0, None),
    (8, 0.9): (4.0, None),
    (16, 0.9): (5.0, 2.5),
    (32, 0.9): (5.0, None),
    (8, 0.5): (1.0, None),
    (16, 0.5): (1.0, None),
    (32, 0.5): (1.0, None),
}
BREAK_EVEN = {1: 2.0, 4: 1.4, 8: 1.3, 16: 1.2}
FORWARD, GRAD_X, GRAD_W = "ours", "ours: input gradient", "ours: weight gradient"
PACKED = "dense, packed for oneDNN"
DENSE, DENSE_X, DENSE_W = "dense F.linear", "dense: input gradient", "dense: weight gradient"

Seconds = dict[str, float]


def main() -> int:
    options = _options()
    _common.use_threads(max(options.threads))
    warnings.filterwarnings("ignore")
    lines = _common.header("Block-sparse linears", max(options.threads))
    print("\n".join(lines), flush=True)
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    for threads in options.threads:
        for shape in options.shapes:
            for sparsity in options.sparsity:
                timed = {b: _timed(shape, b, sparsity, threads, options) for b in options.blocks}
                text = _table(shape, sparsity, threads, timed, options)
                if shape == (3072, 768) and options.rows == 512 and options.dtype == "fp32":
                    text += [*_verdicts(timed, sparsity, missed), ""]
                print("\n".join(text), flush=True)
                lines += text
                rows += [
                    {"shape": shape, "sparsity": sparsity, "threads": threads, "block": b, "seconds": t}
                    for b, t in timed.items()
                ]
    text = _fine_grained(options)
    print("\n".join(text))
    _common.write_out(options.out, lines + text, {"rows": rows})
    return int(bool(missed))


def _options() -> argparse.Namespace:
    def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(word) for word in text.split(",") if word]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=listed(int), default=[1])
    parser.add_argument(
        "--shapes", type=listed(lambda t: tuple(map(int, t.split("x")))), default=[(3072, 768), (768, 3072)]
    )
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--sparsity", type=listed(float), default=[0.9, 0.5])
    parser.add_argument("--blocks", type=listed(int), default=[1, 4, 8, 16, 32])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def _timed(
    shape: tuple[int, int], block: int, sparsity: float, threads: int, options: argparse.Namespace
) -> Seconds:
    """Seconds of every way, and our share of kept blocks under "density"."""
    import torch

    from effcompile.sparse import BlockPattern

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    pattern = BlockPattern.from_blocks(_balanced(shape[0] // block, shape[1] // block, sparsity), block)
    with _common.told(f"{shape[0]}x{shape[1]}, {sparsity}, b={block}, {threads} thread{'s' * (threads > 1)}"):
        return {"density": pattern.density, **_race(_ways(pattern, options), threads, options.rounds)}


def _balanced(rows: int, cols: int, sparsity: float) -> Any:
    """As many blocks in each block row, at random places: what the peers that gather whole rows of blocks are
    best at.
    """
    import torch

    kept = torch.zeros(rows, cols, dtype=torch.bool)
    return kept.scatter_(
        1, torch.rand(rows, cols).argsort(1)[:, : max(1, round(cols * (1 - sparsity)))], True
    )


def _ways(pattern: Any, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Every way, each of the forward ones compared with dense first."""
    import torch
    from _sparse_peers import dense_ways, sparse_ways

    from effcompile.ops.block_sparse import (
        block_sparse_grad_input,
        block_sparse_grad_values,
        block_sparse_linear,
        fallback_reason,
    )

    dtype = torch.float32 if options.dtype == "fp32" else torch.bfloat16
    weight = (torch.randn(pattern.rows, pattern.cols) / pattern.cols**0.5 * pattern.mask()).to(dtype)
    x, grad = (
        torch.randn(options.rows, pattern.cols).to(dtype),
        torch.randn(options.rows, pattern.rows).to(dtype),
    )
    values, reason = pattern.values_of(weight), fallback_reason(x, pattern.block)
    if reason is not None:
        raise SystemExit(f"No kernels here: {reason}")
    ways = dense_ways(x, weight)
    if dtype == torch.float32:
        ways |= sparse_ways(x, weight, pattern.blocks(), pattern.block)
    ways[FORWARD] = lambda: block_sparse_linear(x, values, *pattern.indices)
    right = x.double() @ weight.double().T
    for name, way in ways.items():
        found = torch.as_tensor(way()).double().reshape(-1)
        close = min(float((found - r.reshape(-1)).norm() / right.norm()) for r in (right, right.T))
        assert close < (1e-5 if dtype == torch.float32 else 1e-2), f"{name} is wrong by {close}"
    return ways | {
        DENSE_X: lambda: grad @ weight,
        DENSE_W: lambda: grad.T @ x,
        GRAD_X: lambda: block_sparse_grad_input(grad, values, *pattern.indices),
        GRAD_W: lambda: block_sparse_grad_values(grad, x, pattern.crow, pattern.col),
    }


def _race(ways: Mapping[str, Callable[[], Any]], threads: int, rounds: int) -> Seconds:
    from effcompile.core.timing import faster_half_median

    clock = time.process_time if threads == 1 else time.perf_counter
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            way()  # another way has just used the caches
            start = clock()
            way()
            samples[name].append(clock() - start)
    return {name: faster_half_median(taken) for name, taken in samples.items()}


def _table(
    shape: tuple[int, int],
    sparsity: float,
    threads: int,
    timed: Mapping[int, Seconds],
    options: argparse.Namespace,
) -> list[str]:
    names = list(dict.fromkeys(name for seconds in timed.values() for name in seconds if name != "density"))
    against = {GRAD_X: DENSE_X, GRAD_W: DENSE_W}
    cells = [
        [
            name,
            *(f"{t[against.get(name, DENSE)] / t[name]:.2f}" if name in t else "-" for t in timed.values()),
            "",
        ]
        for name in names
        if name not in (DENSE_X, DENSE_W)
    ]
    cells.append(["ours: both gradients", *(f"{_backward_gain(t):.2f}" for t in timed.values()), ""])
    cells.append(
        [
            "eps, forward",
            *(f"{_eps(t, (FORWARD,), (DENSE,)):.2f}" for t in timed.values()),
            "below the break-even wins",
        ]
    )
    steps = [_eps(t, (FORWARD, GRAD_X, GRAD_W), (DENSE, DENSE_X, DENSE_W)) for t in timed.values()]
    cells.append(["eps, training step", *(f"{eps:.2f}" for eps in steps), ""])
    if all(PACKED in t for t in timed.values()):
        cells.append(
            [
                "eps, forward, over packed",
                *(f"{_eps(t, (FORWARD,), (PACKED,)):.2f}" for t in timed.values()),
                "",
            ]
        )
    cells.append(["break-even at 0.9", *(str(BREAK_EVEN.get(b, "-")) for b in timed), ""])
    milliseconds = ", ".join(f"{t[DENSE] * 1e3:.1f}" for t in timed.values())
    title = (
        f"W {shape[0]}x{shape[1]}, {options.rows} rows, {options.dtype}, sparsity {sparsity}, "
        f"{threads} thread{'s' * (threads > 1)}"
    )
    head = [f"## {title}", "", f"Gain over dense F.linear ({milliseconds} ms):", ""]
    return [*head, *_common.markdown(["", *(f"b={b}" for b in timed), ""], cells), ""]


def _eps(seconds: Seconds, sparse: Sequence[str], dense: Sequence[str]) -> float:
    return sum(seconds[name] for name in sparse) / seconds["density"] / sum(seconds[name] for name in dense)


def _backward_gain(seconds: Seconds) -> float:
    return (seconds[DENSE_X] + seconds[DENSE_W]) / (seconds[GRAD_X] + seconds[GRAD_W])


def _verdicts(timed: Mapping[int, Seconds], sparsity: float, missed: list[str]) -> list[str]:
    """One line per bar; adds to `missed`."""
    lines = []
    for block, seconds in timed.items():
        forward, backward = BARS.get((block, sparsity), (None, None))
        peer = min(
            (t, name)
            for name, t in seconds.items()
            if name not in (FORWARD, DENSE, DENSE_X, DENSE_W, GRAD_X, GRAD_W, "density")
        )
        checks = [(f"the best peer, {peer[1]}", peer[0] / seconds[FORWARD], 1.0)]
        checks += [] if forward is None else [("dense", seconds[DENSE] / seconds[FORWARD], forward)]
        checks += [] if backward is None else [("dense, both gradients", _backward_gain(seconds), backward)]
        for what, gain, least in checks:
            line = (
                f"- b={block}: {gain:.2f}x over {what}; the bar is {least:g}x: "
                f"{'reached' if gain >= least else 'MISSED'}"
            )
            lines.append(line)
            missed += [line] if gain < least else []
    return lines


def _fine_grained(options: argparse.Namespace) -> list[str]:
    """Single weights, at random and 2 of 4: what they give here."""
    import torch

    from effcompile.sparse import BlockPattern

    torch.set_num_threads(1)
    rows, shape = [], options.shapes[0]
    two_of_four = torch.rand(shape[0] * shape[1] // 4, 4).argsort(1).lt(2).view(shape)
    patterns = {"2:4": BlockPattern.from_mask(two_of_four, 1)}
    patterns |= {f"at random, {s}": BlockPattern.random(*shape, 1, s) for s in (0.5, 0.8, 0.9, 0.95)}
    for name, pattern in patterns.items():
        t = {"density": pattern.density, **_race(_ways(pattern, options), 1, options.rounds)}
        csr = f"{t[DENSE] / t['torch CSR @ xᵀ']:.2f}" if "torch CSR @ xᵀ" in t else "-"
        step = _eps(t, (FORWARD, GRAD_X, GRAD_W), (DENSE, DENSE_X, DENSE_W))
        gains = [
            f"{t[DENSE] / t[FORWARD]:.2f}",
            csr,
            f"{_backward_gain(t):.2f}",
            f"{_eps(t, (FORWARD,), (DENSE,)):.2f}",
            f"{step:.2f}",
        ]
        rows.append([name, *gains, ""])
    columns = ["", "ours, forward", "torch CSR", "ours, gradients", "eps, forward", "eps, step", ""]
    title = f"## Single weights, W {shape[0]}x{shape[1]}, {options.dtype}, 1 thread: gain over dense F.linear"
    return [
        title,
        "",
        *_common.markdown(columns, rows),
        "",
        f"torch's semi-structured 2:4 tensors: {_semi_structured(shape)}",
        "",
    ]


def _semi_structured(shape: tuple[int, int]) -> str:
    import torch

    weight = torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(shape[0], shape[1] // 4)
    try:
        sparse = torch.sparse.to_sparse_semi_structured(weight)
        torch.nn.functional.linear(torch.ones(64, shape[1]), sparse)
    except Exception as error:
        return f"not on this CPU ({_common.reason_of(error)})"
    return "there, but not timed here"


if __name__ == "__main__":
    raise SystemExit(main())
