"""Many devices: predictions beside published steps, and the search beside an exhaustive one.

    python benchmarks/parallel.py [published|regret|large]

`published` compares seconds and peaks of steps whose figures others published (named with each) with the
closed form: none of the steps was run here. The rates of an engine (planner/parallel/engines.py) were
fitted to all of its rows together. `regret` solves and simulates every strategy of 64 devices (of two
choices of what is free) and compares the best with the one that the search takes. `large` times plans of 70 B
parameters on 64 devices and of 1 T on 3072.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from effcompile.core.errors import InfeasibleError
from effcompile.ir.strategy import Strategy, StrategyFields
from effcompile.machine.cluster import Cluster
from effcompile.machine.machines import load_target
from effcompile.machine.target import Target
from effcompile.planner.parallel.division import Division, DivisionProblem
from effcompile.planner.parallel.model import Model
from effcompile.planner.parallel.search import search, strategies
from effcompile.search.parallel.describe import describe

GIB = 1 << 30
MEGATRON = "Korthikanti et al. 2022, arXiv 2205.05198, tables 3 and 5"
TITAN = "torchtitan docs/performance.md (Llama 3.1, H100 96 GB, 2.4 TB/s)"


@dataclass(frozen=True)
class Published:
    """A step that others ran.

    `model`: (name, tokens of a sequence). Seconds, or the peak of reserved GiB, or both.
    """

    name: str
    source: str
    model: tuple[str, int]
    target: str
    strategy: Strategy
    global_batch: int
    seconds: float | None = None
    gib: float | None = None


def _gpt(hidden: int, layers: int, heads: int, tokens: int) -> nn.Module:
    config = GPT2Config(
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        vocab_size=51200,
        n_positions=tokens,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def _llama(hidden: int, inner: int, layers: int, heads: int) -> nn.Module:
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {
    "GPT 22B": lambda tokens: _gpt(6144, 48, 64, tokens),
    "GPT 175B": lambda tokens: _gpt(12288, 96, 96, tokens),
    "GPT 530B": lambda tokens: _gpt(20480, 105, 128, tokens),
    "GPT 1T": lambda tokens: _gpt(25600, 128, 160, tokens),
    "Llama 3.1 8B": lambda _: _llama(4096, 14336, 32, 32),
    "Llama 3.1 70B": lambda _: _llama(8192, 28672, 80, 64),
}


@cache
def described(name: str, tokens: int, target: str) -> Model:
    """A model of the table, captured without data."""
    with torch.device("meta"):
        model = MODELS[name](tokens)
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    return describe(model, (), {"input_ids": ids, "labels": ids}, target=load_target(target))


def published() -> Iterator[Published]:
    """Every row that is compared."""
    rows = {
        "GPT 22B": (
            Strategy(tp=8, micro_batch=4, engine="megatron", recompute="none", sp=True),
            4,
            1.42,
            1.10,
        ),
        "GPT 175B": (
            Strategy(tp=8, pp=8, vpp=3, schedule="interleaved", engine="megatron", recompute="none", sp=True),
            64,
            18.13,
            13.75,
        ),
        "GPT 530B": (
            Strategy(
                tp=8, pp=35, vpp=3, schedule="interleaved", engine="megatron", recompute="none", sp=True
            ),
            280,
            49.05,
            37.83,
        ),
        "GPT 1T": (Strategy(tp=8, pp=64, engine="megatron", recompute="none", sp=True), 512, 94.42, 71.49),
    }
    for name, (strategy, batch, full, selective) in rows.items():
        yield Published(
            f"{name}, selective", MEGATRON, (name, 2048), "a100-80gb", strategy, batch, seconds=selective
        )
        whole = replace(strategy, recompute="full", sp=False)
        yield Published(f"{name}, full", MEGATRON, (name, 2048), "a100-80gb", whole, batch, seconds=full)
    fsdp = Strategy(dp=8, zero=3, engine="fsdp2", recompute="op", micro_batch=2)
    yield Published(
        "8B, 8 devices, op", TITAN, ("Llama 3.1 8B", 8192), "h100-sxm", fsdp, 16, seconds=2 * 8192 / 6667,
        gib=77.0
    )  # fmt: skip
    for dp, cp, tokens, rate, gib in (
        (8, 1, 32768, 3890, 83.9),
        (4, 2, 65536, 2540, 84.2),
        (2, 4, 131072, 1071, 84.0),
        (1, 8, 262144, 548, 84.5),
    ):
        strategy = Strategy(dp=dp, cp=cp, zero=3, engine="fsdp2", recompute="full")
        yield Published(
            f"8B, {tokens} tokens, cp {cp}, fp8", TITAN, ("Llama 3.1 8B", tokens), "h100-sxm",
            replace(strategy, precision="fp8"), dp, seconds=tokens * dp / 8 / rate, gib=gib,
        )  # fmt: skip


def predicted(row: Published) -> tuple[float, float]:
    """(seconds, GiB in the allocator) of a row."""
    target: Target = load_target(row.target)
    assert target.cluster is not None
    if row.target == "h100-sxm" and "torchtitan" in row.source:
        target = replace(target, memory_bandwidth=2.4e12)
    problem = DivisionProblem(
        model=described(*row.model, row.target), cluster=Cluster.of(target.cluster, row.strategy.world),
        target=target, global_batch=row.global_batch,
    )  # fmt: skip
    division = Division(problem=problem, strategy=row.strategy)
    solved = division.solve(None)
    beside = max(rank.standing["outside of the allocator"] for rank in division.ranks)
    return solved.seconds, (solved.peak_bytes - beside) / GIB


def print_published() -> None:
    """Predicted beside published, row by row."""
    print(
        f"{'step':34}{'published':>12}{'predicted':>12}{'off by':>9}   "
        f"{'GiB':>6}{'predicted':>11}{'off by':>9}"
    )
    for row in published():
        seconds, gib = predicted(row)
        times = (
            f"{row.seconds:10.2f} s{seconds:10.2f} s{seconds / row.seconds - 1:+9.1%}"
            if row.seconds
            else " " * 33
        )
        peaks = f"   {row.gib:6.1f}{gib:11.1f}{gib / row.gib - 1:+9.1%}" if row.gib else ""
        print(f"{row.name:34}{times}{peaks}", flush=True)
    print(f"seconds of GPT: {MEGATRON}\nLlama: {TITAN}")


def print_regret() -> None:
    """Every strategy of 64 devices solved and simulated, against the one that the search takes."""
    target = load_target("h100-sxm")
    assert target.cluster is not None
    model = described("Llama 3.1 8B", 8192, "h100-sxm")
    cases: tuple[tuple[int, StrategyFields], ...] = (
        (64, {"offload": "none", "cp": 1}),
        (256, {"offload": "none", "micro_batch": 1}),
    )
    for batch, asked in cases:
        problem = DivisionProblem(
            model=model, cluster=Cluster.of(target.cluster, 64), target=target, global_batch=batch
        )
        found = search(problem, asked)
        assert found.best is not None
        room, best, count = int(target.memory_bytes / 1.1), float("inf"), 0
        start = time.monotonic()
        for strategy in strategies(problem, asked):
            division = Division(problem=problem, strategy=strategy)
            try:
                best = min(best, division.solve(room).seconds)
                count += 1
            except InfeasibleError:
                continue
        took = time.monotonic() - start
        print(
            f"8B, 64 devices, batch {batch}, {asked}: search {found.best.seconds:.4f} s after "
            f"{found.solves} solves in {found.seconds:.1f} s; exhaustive {best:.4f} s over {count} in "
            f"{took:.0f} s; regret {found.best.seconds / best - 1:+.3%}",
            flush=True,
        )


def print_large() -> None:
    """Seconds and resident memory of two large plans."""
    cases = (("Llama 3.1 70B", 8192, "h100-sxm", 64, 512), ("GPT 1T", 2048, "a100-80gb", 3072, 3072))
    for name, tokens, machine, devices, batch in cases:
        start = time.monotonic()
        target = load_target(machine)
        assert target.cluster is not None
        problem = DivisionProblem(
            model=described(name, tokens, machine),
            cluster=Cluster.of(target.cluster, devices),
            target=target,
            global_batch=batch,
        )
        found = search(problem, {})
        assert found.best is not None
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{name}, {devices} devices: {time.monotonic() - start:.1f} s, {rss:.0f} MiB resident; "
            f"{found.best.strategy}; {found.best.seconds:.2f} s a step, {found.considered} strategies, "
            f"{found.solves} solved",
            flush=True,
        )


if __name__ == "__main__":
    tables = {"published": print_published, "regret": print_regret, "large": print_large}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", choices=[*tables, []], default=list(tables))
    for table in parser.parse_args().tables:
        tables[table]()
