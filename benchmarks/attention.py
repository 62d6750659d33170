"""Attention with a mask on this CPU: what stock PyTorch does with a dense mask beside
`effcompile::attention`, interleaved in one run.

    python benchmarks/attention.py [--threads 2] [--rounds 5] [--dtypes float32,bfloat16] [--tokens 4096]
    [--skip flex] [--out FILE]

One batch entry, 8 heads of width 64. Times are the fastest of the rounds; `error` is the relative difference
of the outputs from the first row's. FlexAttention has no backward on CPUs.
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

HEADS, WIDTH, WINDOW, DOCUMENTS = 8, 64, 512, 8
Way = Callable[..., "Tensor"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--skip", default="", help="ways whose name contains this")
    parser.add_argument("--out", type=Path, help="writes FILE.md and FILE.json")
    options = parser.parse_args()
    _common.use_threads(options.threads)
    import torch

    lines = _common.header(
        f"Attention on CPU, {options.tokens} tokens, {HEADS} heads of {WIDTH}", options.threads
    )
    print("\n".join(lines), flush=True)
    data: list[dict[str, Any]] = []
    for dtype in options.dtypes.split(","):
        torch.manual_seed(0)
        leaves = [torch.randn(1, HEADS, options.tokens, WIDTH, dtype=getattr(torch, dtype)) for _ in range(3)]
        for name, ways in cases(options.tokens, leaves[0].dtype).items():
            kept = {way: call for way, call in ways.items() if not options.skip or options.skip not in way}
            text = [
                f"## {name}, {dtype}",
                "",
                *table(kept, leaves, options.rounds, data, f"{name}, {dtype}"),
                "",
            ]
            print("\n".join(text), flush=True)
            lines += text
    _common.write_out(options.out, lines, {"header": lines[:7], "rows": data})
    return 0


def cases(tokens: int, dtype: Any) -> dict[str, dict[str, Way]]:
    """Case → way → function of q, k, v. The first way is what is compared with."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    from effcompile.ops.attention import attention

    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    causal, ids, scale = j <= i, (j * DOCUMENTS // tokens)[None], WIDTH**-0.5
    window = (causal & (i - j < WINDOW))[None, None]
    document = ((ids[0][:, None] == ids[0]) & causal)[None, None]
    lowest = torch.zeros(window.shape, dtype=dtype).masked_fill_(~window, torch.finfo(dtype).min)
    hidden, sink = ~causal, torch.randn(HEADS)
    slopes = (2.0 ** -torch.arange(1, HEADS + 1))[None, :, None, None] * j

    def ours(**terms: Any) -> Way:
        return lambda q, k, v: attention(q, k, v, scale=scale, **terms)[0]

    def eager(change: Callable[[Tensor], Tensor], cut: bool = False) -> Way:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            weights = torch.softmax(change(q @ k.mT * scale).float(), -1).to(q.dtype)
            return (weights[..., :-1] if cut else weights) @ v

        return run

    return {
        f"window {WINDOW}": {
            "sdpa, boolean mask": lambda q, k, v: sdpa(q, k, v, attn_mask=window),
            "sdpa, added mask": lambda q, k, v: sdpa(q, k, v, attn_mask=lowest),
            "flex, compiled": flex(tokens),
            "effcompile": ours(lo=1 - WINDOW, hi=0),
        },
        "causal": {
            "sdpa, is_causal": lambda q, k, v: sdpa(q, k, v, is_causal=True),
            "effcompile": ours(hi=0),
        },
        f"{DOCUMENTS} documents, causal": {
            "sdpa, boolean mask": lambda q, k, v: sdpa(q, k, v, attn_mask=document),
            "effcompile": ours(q_ids=ids, k_ids=ids, hi=0),
        },
        "softcap, causal": {
            "eager": eager(lambda s: (30 * torch.tanh(s / 30)).masked_fill(hidden, -torch.inf)),
            "effcompile": ours(softcap=30.0, hi=0),
        },
        "sink, causal": {
            "eager": eager(
                lambda s: torch.cat(
                    [
                        s.masked_fill(hidden, -torch.inf),
                        sink.to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1),
                    ],
                    -1,
                ),
                cut=True,
            ),
            "effcompile": ours(sink=sink, hi=0),
        },
        "ALiBi, causal": {
            "eager": eager(lambda s: (s + slopes).masked_fill(hidden, -torch.inf)),
            "effcompile": ours(bias=slopes, hi=0),
        },
    }


def flex(tokens: int) -> Way:
    """FlexAttention, compiled at its first call, with the window's block mask made beforehand."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(
        lambda b, h, i, j: (j <= i) & (i - j < WINDOW), None, None, tokens, tokens, device="cpu"
    )
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


def table(
    ways: dict[str, Way], leaves: list[Tensor], rounds: int, data: list[dict[str, Any]], case: str
) -> list[str]:
    """Milliseconds of all ways, taken in turns."""
    import torch

    grad = torch.randn_like(leaves[0])

    def forward(way: Way) -> Tensor:
        with torch.no_grad():
            return way(*leaves)

    def step(way: Way) -> None:
        given = [x.detach().requires_grad_() for x in leaves]
        torch.autograd.grad(way(*given), given, grad)

    outputs = {name: forward(way) for name, way in ways.items()}
    names, reference = list(ways), next(iter(outputs.values()))
    times = {
        "forward": timed(forward, ways, rounds),
        "forward + backward": timed(step, {n: w for n, w in ways.items() if "flex" not in n}, rounds),
    }
    rows = []
    for name in names:
        cells = []
        for which in times.values():
            cells += (
                [f"{which[name] * 1e3:.1f}", f"{which[names[0]] / which[name]:.2f}x"]
                if name in which
                else ["-", "-"]
            )
        error = _common.relative_error(outputs[name], reference)
        data.append(
            {
                "case": case,
                "way": name,
                "error": error,
                **{kind: which.get(name) for kind, which in times.items()},
            }
        )
        rows.append([name, *cells, f"{error:.1e}"])
    return _common.markdown(["", "forward ms", "speed", "forward + backward ms", "speed", "error"], rows)


def timed(run: Callable[[Way], Any], ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """The fastest of the rounds, seconds; each round runs every way once."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            start = perf_counter()
            run(way)
            found[name].append(perf_counter() - start)
    return {name: min(seconds[1:]) for name, seconds in found.items()}


if __name__ == "__main__":
    raise SystemExit(main())
