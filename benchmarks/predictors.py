"""Attention predictors on this CPU: what each keeps of concentrated causal attention, what that changes, and
what it costs.

    python benchmarks/predictors.py [--threads 2] [--rounds 5] [--tokens 4096,8192] [--mass 0.95] [--pool 8]
    [--out FILE]

One batch entry, 8 heads of width 64, tiles of 64, no trained model: tokens come in runs of one topic, of
which there are 16, and attend to the runs of their own (`--sharpness`: how much; 0 spreads attention out
evenly). `recall`: the softmax mass in the tiles that are kept, the mean over queries; `error`: the relative
difference of the output from exact attention. Times are the fastest of interleaved rounds, the predictor's
alone and with the attention. What is calibrated (DOTA's projections, ViTCoD's tiles) is calibrated on other
tokens in the same order of topics; ViTCoD's tiles therefore fit as well as they can.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import _common

if TYPE_CHECKING:
    from torch import Tensor

HEADS, WIDTH, BLOCK, TOPICS = 8, 64, 64, 16
Run = Callable[[], Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--mass", type=float, default=0.95)
    parser.add_argument("--pool", type=int, default=8)
    parser.add_argument("--sharpness", type=float, default=1.0)
    parser.add_argument("--out", type=Path, help="writes FILE.md and FILE.json")
    options = parser.parse_args()
    _common.use_threads(options.threads)
    lines = _common.header(
        f"Attention predictors on CPU, {HEADS} heads of {WIDTH}, causal, fp32", options.threads
    )
    print("\n".join(lines), flush=True)
    data: list[dict[str, Any]] = []
    for tokens in map(int, options.tokens.split(",")):
        text = [
            f"## {tokens} tokens, mass {options.mass}, {options.pool} queries pooled, sharpness "
            f"{options.sharpness}",
            "",
        ]
        text += [*table(tokens, options, data), ""]
        print("\n".join(text), flush=True)
        lines += text
    _common.write_out(options.out, lines, {"header": lines[:7], "rows": data})
    return 0


def topical(tokens: int, sharpness: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v: runs of 32 to 512 tokens of one topic, the same at every seed; the rest is noise of the
    seed.
    """
    import torch

    order, noise = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    topics = torch.randn(HEADS, TOPICS, WIDTH, generator=order)
    lengths = torch.randint(32, 513, (tokens // 32,), generator=order)
    topic = torch.randint(0, TOPICS, lengths.shape, generator=order).repeat_interleave(lengths)[:tokens]
    q, k, v = (torch.randn(1, HEADS, tokens, WIDTH, generator=noise) for _ in range(3))
    return q + sharpness * topics[None, :, topic], k + sharpness * topics[None, :, topic], v


def table(tokens: int, options: argparse.Namespace, data: list[dict[str, Any]]) -> list[str]:
    """One row per way, the exact ones first."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    from effcompile.estimate.prediction import figure_of
    from effcompile.ops.attention import attention
    from effcompile.ops.tile_predictors import METHODS, STATIC, fit_low_rank
    from effcompile.sites.attention.predictor import Predictor, exact_mass, visible_tiles

    names = ("q", "k", "v", "scale", "lo", "hi", "chunk", "valid")
    given, other = (
        dict(
            zip(
                names, (*topical(tokens, options.sharpness, seed), WIDTH**-0.5, None, 0, 0, None), strict=True
            )
        )
        for seed in (1, 2)
    )
    q, k, v = (given[name] for name in "qkv")
    out, lse = attention(**given)
    calls: dict[str, Run] = {
        "sdpa, is_causal": lambda: sdpa(q, k, v, is_causal=True),
        "effcompile, tiled": lambda: attention(**given),
    }
    rows: list[dict[str, Any]] = [
        {"method": name, "tiles": 1.0, "recall": 1.0, "error": 0.0} for name in calls
    ]
    for method in (*METHODS, STATIC):
        predictor = Predictor(method=method, mass=options.mass, pool=options.pool, block=BLOCK)
        constants: tuple[Tensor, ...] = ()
        if predictor.static:
            constants = predictor.fixed(exact_mass(other, BLOCK), other)
        elif predictor.calibrated:
            constants = fit_low_rank(other["q"][0], other["k"][0], METHODS[method].detail)
        near, found, tiles = predictor.run(given, constants)
        figure = figure_of(given, BLOCK, lse, found, tiles)
        assert figure.visible == visible_tiles(given, BLOCK)
        error = float((near - out).norm() / out.norm())
        rows.append({"method": method, "tiles": figure.density, "recall": figure.recall, "error": error})
        calls[method] = lambda p=predictor, c=constants: p.run(given, c)
        calls[f"{method} alone"] = lambda p=predictor, c=constants: p.tiles(given, c)
    with torch.no_grad():
        best = fastest(calls, options.rounds)
    lines = [
        "| method | tiles kept | recall | error | predictor ms | total ms | against is_causal |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        row |= {
            "tokens": tokens,
            "ms": 1e3 * best[row["method"]],
            "alone_ms": 1e3 * best.get(f"{row['method']} alone", 0.0),
        }
        times = (
            f"{row['alone_ms']:.1f} | {row['ms']:.1f} | {best['sdpa, is_causal'] / best[row['method']]:.2f}x"
        )
        lines.append(
            f"| {row['method']} | {row['tiles']:.0%} | {row['recall']:.3f} | {row['error']:.1e} | {times} |"
        )
    data += rows
    return lines


def fastest(calls: dict[str, Run], rounds: int) -> dict[str, float]:
    """Seconds of the fastest of the rounds, taken in turns."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = perf_counter()
            call()
            best[name] = min(best[name], perf_counter() - start)
    return best


if __name__ == "__main__":
    raise SystemExit(main())
