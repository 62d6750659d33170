"""Our linears in 8 and 13 bits beside those of torch's backends: a BERT-base layer at 128 rows, and a token
of a small Llama, in turn in one run.

    python benchmarks/int8_linears.py [--threads 1] [--rounds 25]

Times are of the process's CPU, ratios the medians of pairs: what else runs on the machine inflates both sides
alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import _common

FORMATS = ("int8_token", "int13_token", "int8_channel", "int8_static", "w8_channel", "w4", "fp32")
SHAPES = {
    "BERT-base layer, 128 rows": [(128, 768, 768)] * 4 + [(128, 768, 3072), (128, 3072, 768)],
    "Llama 4 layers x 512, a token": [
        (1, 512, 512),
        (1, 512, 256),
        (1, 512, 256),
        (1, 512, 512),
        (1, 512, 1408),
        (1, 512, 1408),
        (1, 1408, 512),
    ]
    * 4,
}


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    _common.use_threads(options.threads)
    import torch

    from effcompile.backends.torch import measure_linears
    from effcompile.ir.formats import LINEAR_FORMATS
    from effcompile.ops.int8_linear import told

    print(f"int8_token by {told()}; {options.threads} threads")
    with torch.no_grad():
        for name, shapes in SHAPES.items():
            runs: dict[str, Callable[[], object]] = {}
            for form in FORMATS:
                made = [measure_linears.linears(LINEAR_FORMATS[form], dims, "eager", 1)[0] for dims in shapes]
                present = [body for body in made if body is not None]
                if len(present) == len(shapes):
                    runs[form] = lambda bodies=present: [body() for body in bodies]  # type: ignore[misc]
            found: dict[str, list[float]] = {form: [] for form in runs}
            for _ in range(options.rounds):
                for form, run in runs.items():
                    found[form].append(seconds(run))
            flops = sum(2 * m * k * n for m, k, n in shapes)
            print(name)
            for form, times in found.items():
                ratio = statistics.median(a / b for a, b in zip(times, found["int8_token"], strict=True))
                best = min(times)
                print(
                    f"  {form:14} {best * 1e3:8.2f} ms at best, {flops / best / 1e9:6.1f} GOP/s; "
                    f"{ratio:5.2f} x int8_token"
                )


if __name__ == "__main__":
    main()
