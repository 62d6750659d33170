"""Linears in fp32 by our kernel beside torch's: plain weights (MKL), packed by oneDNN, and packed by MKL for
one number of rows, which keeps the plain weight (as torch.compile with fixed shapes has them); in turn.

    python benchmarks/fp32_linears.py [--threads 1] [--rounds 9]

Weights of a shape together exceed the caches of a core. GFLOP/s of the best round, ratios of the medians.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import _common

SHAPES = [
    (rows, *layer)
    for rows in (16, 64, 128, 197, 512, 1024)
    for layer in ((384, 1536), (768, 768), (768, 3072), (3072, 768))
]
_ALL_BYTES, _MOST = 48 << 20, 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    _common.use_threads(options.threads)
    import torch
    from torch import Tensor

    from effcompile.backends.torch import packing
    from effcompile.core.timing import interleaved
    from effcompile.ops.fp32_linear import told

    def by_mkl(x: Tensor, weights: Sequence[Tensor], bias: Tensor) -> Callable[[], object] | None:
        if not torch.backends.mkl.is_available():
            return None
        held = [torch.ops.mkl._mkl_reorder_linear_weight(weight, len(x)) for weight in weights]
        multiply = torch.ops.mkl._mkl_linear
        return lambda: [multiply(x, p, w, bias, len(x)) for p, w in zip(held, weights, strict=True)]

    print("\n".join(_common.header(f"Linears in fp32, ours by {told()}", options.threads)))
    print(f"{'rows x K x N':>18}   GFLOP/s{'':48}ours is faster than: ")
    with torch.no_grad():
        for m, k, n in SHAPES:
            x, bias = torch.randn(m, k), torch.randn(n)
            copies = max(1, min(_MOST, _ALL_BYTES // (4 * n * k)))
            weights = [torch.randn(n, k) for _ in range(copies)]
            runs = {
                way: packing.multiplied(way, x, [packing.packed(way, weight, m) for weight in weights], bias)
                for way in ("none", "oneDNN", "ours")
            }
            if (mkl := by_mkl(x, weights, bias)) is not None:
                runs["MKL"] = mkl
            found = interleaved(runs, options.rounds)
            flops = 2 * m * k * n * copies
            rates = "  ".join(f"{way} {flops / min(times) / 1e9:6.1f}" for way, times in found.items())
            ratios = "  ".join(
                f"{way} {statistics.median(times) / statistics.median(found['ours']):.2f}"
                for way, times in found.items()
                if way != "ours"
            )
            print(f"{f'{m} x {k} x {n}':>18}   {rates}   {ratios}", flush=True)


if __name__ == "__main__":
    main()
