"""Our attention in fp32 and by products of bytes beside torch's, in turn in one run, at the shapes of models:
q, k and v as a merged linear leaves them, the result as the next linear reads it.

    python benchmarks/fp32_attention.py [--threads 1] [--rounds 40]

Of each the median time; ratios are the medians of pairs: torch's to ours, and ours in fp32 to that by bytes.
Errors are the largest, but that of bytes, which is relative: random heads have almost equal weights, and so
results that are small beside the values.
"""

from __future__ import annotations

import argparse
import statistics

import _common

#: Name → batch, heads, length, width, and what hides keys.
SHAPES = {
    "BERT-base 1x128": (1, 12, 128, 64, "none"),
    "the same, a mask of bools": (1, 12, 128, 64, "bools"),
    "the same, a mask that is added": (1, 12, 128, 64, "numbers"),
    "MiniLM 1x128": (1, 12, 128, 32, "none"),
    "BERT-base 1x64": (1, 12, 64, 64, "none"),
    "ViT-B/16 1x197": (1, 12, 197, 64, "none"),
    "BERT-base 8x128": (8, 12, 128, 64, "none"),
    "GPT-2 1x512, causal": (1, 12, 512, 64, "causal"),
    "BERT-base 1x512": (1, 12, 512, 64, "none"),
    "Whisper-tiny encoder 1x1500": (1, 6, 1500, 64, "none"),
    "a query of 512 keys": (1, 12, 1, 64, "none"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    _common.use_threads(options.threads)
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from effcompile.ops.fp32_attention import fp32_attention, told
    from effcompile.ops.int8_attention import int8_attention
    from effcompile.ops.int8_attention import told as told_of_bytes

    print(f"by {told()}, bytes by {told_of_bytes()}; {options.threads} threads")
    print(
        f"{'':32}{'torch ms':>10}{'ours ms':>10}{'ratio':>8}{'GFLOP/s':>9}{'error':>10}{'torch':>9}"
        f"{'bytes ms':>10}{'ratio':>7}{'error':>9}"
    )
    for name, (batch, heads, length, width, hidden) in SHAPES.items():
        torch.manual_seed(0)
        apart = torch.randn(batch, length, 3 * heads * width).split(heads * width, 2)
        q, k, v = (each.view(batch, length, heads, width).transpose(1, 2) for each in apart)
        if name.startswith("a query"):
            k, v = (torch.randn(batch, 512, heads, width).transpose(1, 2) for _ in range(2))
        shape = (batch, 1, length, k.shape[2])
        mask = {"bools": torch.rand(shape) < 0.9, "numbers": torch.randn(shape)}.get(hidden)
        causal = hidden == "causal"

        def merged(made: torch.Tensor, q: torch.Tensor = q) -> torch.Tensor:
            return made.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)

        def by_torch(q=q, k=k, v=v, mask=mask, causal=causal):  # type: ignore[no-untyped-def]
            return merged(scaled_dot_product_attention(q, k, v, mask, is_causal=causal))

        def ours(q=q, k=k, v=v, mask=mask, causal=causal):  # type: ignore[no-untyped-def]
            return merged(fp32_attention(q, k, v, mask, causal))

        def by_bytes(q=q, k=k, v=v, mask=mask, causal=causal):  # type: ignore[no-untyped-def]
            return merged(int8_attention(q, k, v, mask, causal))

        with torch.inference_mode():
            wide = mask.double() if hidden == "numbers" and mask is not None else mask
            right = merged(
                scaled_dot_product_attention(q.double(), k.double(), v.double(), wide, is_causal=causal)
            )
            errors = [float((run() - right).abs().max()) for run in (ours, by_torch)]
            coarse = float((by_bytes() - right).norm() / right.norm())
            runs = by_torch, ours, by_bytes
            rounds = [[_common.seconds(run) for run in runs] for _ in range(options.rounds)]
        theirs, own, bytes_ = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio, narrower = (statistics.median(each[i] / each[i + 1] for each in rounds) for i in range(2))
        flops = 4 * batch * heads * length * k.shape[2] * width / (2 if causal else 1)
        print(
            f"{name:32}{1e3 * theirs:10.3f}{1e3 * own:10.3f}{ratio:8.2f}{flops / own / 1e9:9.0f}"
            f"{errors[0]:10.1e}{errors[1]:9.1e}{1e3 * bytes_:10.3f}{narrower:7.2f}{coarse:9.1e}"
        )


if __name__ == "__main__":
    main()
