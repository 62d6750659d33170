"""BERT-base with nine of ten blocks of 16 × 16 zero in every linear of its layers: dense in 8 bits, sparse in
fp32, sparse in 8 bits, on torch-eager, interleaved.

    python benchmarks/sparse_bytes.py [--shape 1x128] [--sparsity 0.9] [--block 16] [--no-tiles] [--rounds 15]

`--no-tiles`: as on a processor without AMX. Weights are random, errors those against the model itself.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import transformers
from _common import header
from torch import Tensor, nn

from effcompile.backends.base import Lowered
from effcompile.backends.torch import TorchEager
from effcompile.capture import capture
from effcompile.ir.formats import INT8_TOKEN, Form, WeightFormat, in_bytes, sparse_format
from effcompile.ir.program import Program
from effcompile.machine import instructions
from effcompile.sites.parts import add_norms, attentions, linears

_REPEATS = 3


class Encoder(nn.Module):
    """BERT-base's layers, pruned at random."""

    def __init__(self, sparsity: float, block: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.BertConfig()
        self.model = transformers.BertModel(config, add_pooling_layer=False)
        for name, layer in self.model.named_modules():
            if isinstance(layer, nn.Linear) and "layer." in name:
                with torch.no_grad():
                    layer.weight *= _mask(layer.weight, sparsity, block)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.model(input_ids=input_ids).last_hidden_state
        return hidden


def _mask(weight: Tensor, sparsity: float, block: int) -> Tensor:
    grid = torch.rand(weight.shape[0] // block, weight.shape[1] // block)
    kept = torch.zeros(grid.numel())
    kept[grid.flatten().topk(round((1 - sparsity) * grid.numel())).indices] = 1
    return kept.view_as(grid).repeat_interleave(block, 0).repeat_interleave(block, 1)


def ways(program: Program, sparsity: float, block: int) -> dict[str, Lowered]:
    """Name → the model with all linears in one format, norms and attentions alike."""
    sites = linears(program)
    norms = {site.site: Form(word="fused") for site in add_norms(program)}
    heads = {site.site: Form(word="sdpa_bf16") for site in attentions(program)}
    if not instructions.bf16_isas():
        heads = {}

    def pattern(n: int, k: int) -> WeightFormat:
        blocks = (n // block) * (k // block)
        return sparse_format(round((1 - sparsity) * blocks), blocks, block)

    formats = {
        "dense int8": {site.site: INT8_TOKEN for site in sites},
        "sparse fp32": {site.site: pattern(site.n, site.k) for site in sites},
        "sparse int8": {site.site: in_bytes(pattern(site.n, site.k)) for site in sites},
    }
    return {
        name: TorchEager().lower(
            program.tagged(norms | heads | {s: Form(weights=w) for s, w in held.items()}, "benchmark"),
            None,  # type: ignore[arg-type]
            [list(program.flat_inputs())],
        )
        for name, held in formats.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="1x128")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--no-tiles", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.no_tiles:
        found = {key: value for key, value in instructions._found().items() if "amx" not in key}
        instructions._found = lambda: found
    print("\n".join(header("Sparse linears in 8 bits", asked.threads)))
    batch, tokens = map(int, asked.shape.split("x"))
    model, ids = Encoder(asked.sparsity, asked.block).eval(), torch.randint(5, 30000, (batch, tokens))
    with torch.no_grad():
        made, right = ways(capture(model, (ids,)), asked.sparsity, asked.block), model(ids)
        seconds: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(asked.rounds):
            for name, run in made.items():
                for _ in range(_REPEATS):  # the last one has its own weights in the cache
                    start = time.perf_counter()
                    run(ids)
                    spent = time.perf_counter() - start
                seconds[name].append(spent)
        errors = {name: float((run(ids)[0] - right).norm() / right.norm()) for name, run in made.items()}
    print("| linears | kernels | median ms | min ms | dense int8 ÷ it | sparse fp32 ÷ it | rel. L2 |")
    print("|---|---|---:|---:|---:|---:|---:|")
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    for name, run in made.items():
        kernels = ", ".join(str(v) for k, v in run.settings.items() if "int8" in k) or "–"
        over = " | ".join(f"{middle[other] / middle[name]:.2f}" for other in ("dense int8", "sparse fp32"))
        times = f"{1e3 * middle[name]:.1f} | {1e3 * min(seconds[name]):.1f}"
        print(f"| {name} | {kernels} | {times} | {over} | {errors[name]:.1e} |")


if __name__ == "__main__":
    main()
