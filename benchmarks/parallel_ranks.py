"""Training on gloo ranks of this machine: planned (ZeRO by block, decided by the solver) against stock FSDP2
with full checkpointing.

    python benchmarks/parallel_ranks.py [llama] [gpt2] [--ranks 2] [--layers 4] [--width 256]
    python benchmarks/parallel_ranks.py llama gpt2 bert --sweep 10 --layers 2 --width 64 [--way "pp 2"]

Both train the same model for the same steps, in turn within one pair of processes, so that what else the
machine does falls on both. Peaks are torch's allocator's on the fullest rank in the first steps, parameters'
shards included, optimizer states not; FSDP2's differ from step to step by what gloo lets go of late, and the
lowest and the highest step are printed. Seconds are those of --rounds further steps, which nothing watches,
of the slower rank: their median, and the median of what each is to FSDP2 with full checkpointing of the same
turn. The plans' budgets: no limit, the least, and the lowest peak of FSDP2 with full checkpointing in a step
of such a run, and shares of it (--share). A budget given by hand stands in the place of that peak.

The sweep instead takes so many budgets from the least to that of everything kept, for ZeRO by block, tensor
parallelism and a pipeline, and says how many of the measured peaks are above the budget, and how near
predictions are.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import effcompile
from effcompile.capture.source import Source
from effcompile.capture.state import ModelGuards
from effcompile.core import torch_compat_memory
from effcompile.core.errors import InfeasibleError
from effcompile.core.units import format_bytes, parse_bytes
from effcompile.estimate import operators
from effcompile.ir.plan import Plan
from effcompile.ir.step import Step
from effcompile.proof.parallel.processes import on_ranks
from effcompile.proof.training.alive import alive_bytes

ROWS, TOKENS, EXAMPLES, STEPS = 1024, 128, 2, 3
STOCK = "FSDP2, full checkpointing"
PASSES = ["checkpoint", "shard.forms=block,weight"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one way to train took on one rank."""

    name: str
    losses: list[float]
    peaks: list[int]
    seconds: list[float]
    predicted: int = 0


def model_of(kind: str, layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = hf.GPT2Config(
            vocab_size=ROWS, n_embd=width, n_layer=layers, n_head=8, n_positions=TOKENS, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        return hf.GPT2LMHeadModel(config).train()
    if kind == "bert":
        small = hf.BertConfig(
            vocab_size=ROWS, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
            num_attention_heads=8, max_position_embeddings=TOKENS, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return hf.BertForMaskedLM(small).train()
    config = hf.LlamaConfig(
        vocab_size=ROWS, hidden_size=width, intermediate_size=width * 11 // 4 // 8 * 8,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).train()


def batch(ranks: int) -> Tensor:
    return torch.randint(0, ROWS, (EXAMPLES * ranks, TOKENS), generator=torch.Generator().manual_seed(1))


def stock(kind: str, layers: int, width: int, *, checkpointed: bool) -> nn.Module:
    """FSDP2 around every layer and the whole."""
    model = model_of(kind, layers, width)
    blocks = model.model.layers if kind == "llama" else model.transformer.h
    for block in blocks:
        if checkpointed:
            own = block.forward
            block.forward = lambda *args, own=own, **kwargs: checkpoint(
                own, *args, use_reentrant=False, **kwargs
            )
        fully_shard(block)
    fully_shard(model)
    return model


def run(rank: int, kind: str, layers: int, width: int, plans: dict[str, Plan], rounds: int) -> list[Row]:
    """Every way, step by step in turn."""
    ranks = dist.get_world_size()
    ids = batch(ranks).chunk(ranks)[rank].clone()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    models = {name: stock(kind, layers, width, checkpointed=name == STOCK) for name in ("FSDP2", STOCK)}
    predicted = dict.fromkeys(models, 0)
    for name, plan in plans.items():
        inputs = {"input_ids": ids, "labels": ids}
        models[name] = effcompile.optimize(model_of(kind, layers, width), inputs=inputs, plan=plan, mesh=mesh)
        predicted[name] = plan.predicted.peak_bytes or 0
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False) for name, model in models.items()
    }
    bases = {name: alive_bytes("cpu", *model.parameters(), ids) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    peaks = {name: list[int]() for name in models}
    seconds = {name: list[float]() for name in models}
    for turn in range(STEPS + rounds):
        for name, model in models.items():
            dist.barrier()
            if turn < STEPS:
                loss, peak = watched(model, ids)
                peaks[name].append(bases[name] + peak)
            else:
                loss, spent = one(model, ids)
                seconds[name].append(spent)
            optimizers[name].step()
            optimizers[name].zero_grad()
            dist.all_reduce(loss)
            losses[name].append(float(loss) / ranks)
    return [
        Row(
            name=name,
            losses=losses[name],
            peaks=peaks[name],
            seconds=seconds[name],
            predicted=predicted[name],
        )
        for name in models
    ]


def one(model: nn.Module, ids: Tensor) -> tuple[Tensor, float]:
    """(loss, seconds) of one forward and backward."""
    start = perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    spent = perf_counter() - start
    return loss.detach().clone(), spent


def watched(model: nn.Module, ids: Tensor) -> tuple[Tensor, int]:
    """(loss, peak) of the same: watching slows it."""
    with torch_compat_memory.watched_memory("cpu") as peak:
        found, _ = one(model, ids)
    return found, peak()


def stock_peak(rank: int, kind: str, layers: int, width: int) -> int:
    """The lowest of some steps' peaks of FSDP2 with full checkpointing, on the fullest rank."""
    ids = batch(dist.get_world_size()).chunk(dist.get_world_size())[rank].clone()
    model = stock(kind, layers, width, checkpointed=True)
    base, peaks = alive_bytes("cpu", *model.parameters(), ids), []
    for _ in range(STEPS):
        peak = torch.tensor(base + watched(model, ids)[1])
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        peaks.append(int(peak))
        model.zero_grad()
    return min(peaks)


def plans_of(
    kind: str, layers: int, width: int, ranks: int, middle: int | None, shares: list[float]
) -> dict[str, Plan]:
    ids = batch(ranks)[:EXAMPLES]
    inputs, spec = {"input_ids": ids, "labels": ids}, [*PASSES, f"shard.ranks={ranks}"]

    def plan(memory: int | None) -> Plan:
        model = model_of(kind, layers, width)
        return effcompile.plan(model, inputs, mode="training", passes=spec, memory=memory)

    try:
        plan(1 << 20)
        least = 1 << 20
    except InfeasibleError as error:
        least = error.needed
    found = {"planned, no limit": plan(None), "planned, the least": plan(least)}
    middle = max(on_ranks(stock_peak, ranks, kind, layers, width)) if middle is None else middle
    for budget in (int(middle * share) for share in shares):
        if budget > least:
            found[f"planned, {format_bytes(budget)}"] = plan(budget)
    return found


#: What is swept → its passes, the axis of its mesh, and examples of a rank.
WAYS: dict[str, tuple[list[str], str, int]] = {
    "ZeRO by block": (["checkpoint", "shard.forms=block,weight"], "dp", EXAMPLES),
    "tp 2": (["checkpoint"], "tp", EXAMPLES),
    "pp 2": (["checkpoint"], "pp", 2 * EXAMPLES),
}


def once_captured() -> None:
    """Capture equal steps once for all plans of this process: they differ in their budgets alone, and most of
    planning is capturing.
    """
    known: dict[object, tuple[Step, fx.GraphModule | None]] = {}
    captured = Source._capture_with_front

    def shared(source: Source) -> tuple[Step, fx.GraphModule | None]:
        shapes = [
            leaf.shape
            for leaf in pytree.tree_leaves((source.args, dict(source.kwargs)))
            if isinstance(leaf, Tensor)
        ]
        if source.base is not None:
            return captured(source)
        if str(shapes) not in known:
            known[str(shapes)] = captured(source)
        step, front = known[str(shapes)]
        return replace(step, state=ModelGuards(source.model, training=True)), front

    Source._capture_with_front = shared


def held(rank: int, kind: str, layers: int, width: int, way: str, count: int) -> list[tuple[int, int, int]]:
    """(highest of three steps' peaks, predicted, budget) at each of `count` budgets; 0 for the first two
    where this rank cannot have it.
    """
    once_captured()
    passes, axis, examples = WAYS[way]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    ids = torch.randint(
        0, ROWS, (examples, TOKENS), generator=torch.Generator().manual_seed(rank if axis == "dp" else 0)
    )
    inputs = {"input_ids": ids, "labels": ids}

    def planned(budget: int | None) -> nn.Module:
        model = model_of(kind, layers, width)
        return effcompile.optimize(
            model, inputs=inputs, mode="training", passes=passes, mesh=mesh, memory=budget
        )

    edges = torch.tensor([_least(lambda: planned(1 << 16)), planned(None).plan.predicted.peak_bytes or 0])
    dist.all_reduce(edges, op=dist.ReduceOp.MAX)
    least, most = edges.tolist()
    found = []
    for budget in (least + (most - least) * i // (count - 1) for i in range(count)):
        try:
            model = planned(budget)
        except effcompile.EffcompileError:
            found.append((0, 0, budget))
            continue
        found.append((_peak(model, ids, inputs), model.plan.predicted.peak_bytes or 0, budget))
    return found


def _least(plan: Callable[[], object]) -> int:
    """What a rank says that it needs."""
    try:
        plan()
    except InfeasibleError as error:
        return error.needed
    raise AssertionError("a model that fits into next to nothing")


def _peak(model: nn.Module, ids: Tensor, inputs: dict[str, Tensor]) -> int:
    """The highest of three steps' peaks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    chunks = getattr(model.runner, "chunks", {})
    runners = [chunk.runner for chunk in chunks.values()] or [model.runner]
    base, peaks = (
        alive_bytes("cpu", model, ids, [list(runner.step.constants.values()) for runner in runners]),
        [],
    )
    for _ in range(3):
        with torch_compat_memory.watched_memory("cpu") as peak:
            model.runner.loss((), inputs).backward()
        peaks.append(base + peak())
        optimizer.step()
        optimizer.zero_grad()
    return max(peaks)


def timed_once() -> None:
    """Time every operator once: what a sweep looks at are bytes."""
    measured = operators._seconds
    operators._seconds = lambda call, budget, first: measured(call, 0.0, first)


def sweep(kind: str, layers: int, width: int, count: int, ways: list[str]) -> None:
    for way in ways:
        ranks = on_ranks(held, 2, kind, layers, width, way, count, seconds=3000.0)
        measured = [each for rank in ranks for each in rank]
        over = sum(peak > budget for peak, _, budget in measured)
        refused = sum(peak == 0 for peak, _, _ in measured)
        apart = max(abs(peak / said - 1) for peak, said, _ in measured if peak)
        edge = f"{format_bytes(measured[0][2])} to {format_bytes(measured[-1][2])}"
        print(
            f"{kind:<8}{way:<16}{edge:<26}{over:>4} of {len(measured)} over the budget, {refused} "
            f"refused, prediction within {apart:.3%}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=["llama", "gpt2"])
    for name, value in (("ranks", 2), ("layers", 4), ("width", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--budget", type=parse_bytes, default=None, help="instead of FSDP2's peak, such as 24MiB"
    )
    parser.add_argument(
        "--share", type=float, nargs="*", default=[1.0, 0.85, 0.7], help="of that peak, as budgets"
    )
    parser.add_argument("--rounds", type=int, default=20, help="steps that are timed")
    parser.add_argument("--sweep", type=int, default=0, help="so many budgets for each way to divide a step")
    parser.add_argument(
        "--way", action="append", choices=list(WAYS), help="of a sweep, instead of all of them"
    )
    asked = parser.parse_args()
    if asked.sweep:
        timed_once()
        for kind in asked.kinds:
            sweep(kind, asked.layers, asked.width, asked.sweep, asked.way or list(WAYS))
        return
    for kind in asked.kinds:
        plans = plans_of(kind, asked.layers, asked.width, asked.ranks, asked.budget, asked.share)
        found = on_ranks(
            run, asked.ranks, kind, asked.layers, asked.width, plans, asked.rounds, seconds=500.0
        )
        print(
            f"\n{kind}, {asked.layers} layers of width {asked.width}, {asked.ranks} ranks × {EXAMPLES} × "
            f"{TOKENS} tokens, fp32"
        )
        print(f"{'':<30}{'peak':>20}{'predicted':>12}{'s a step':>10}{'÷ stock':>9}   losses")
        turns = {rows[0].name: slowest(rows) for rows in zip(*found, strict=True)}
        for rows in zip(*found, strict=True):
            worst = max(rows, key=lambda row: max(row.peaks))
            each = [max(step) for step in zip(*(row.peaks for row in rows), strict=True)]
            peak = " – ".join(dict.fromkeys(format_bytes(one) for one in (min(each), max(each))))
            said = format_bytes(worst.predicted) if worst.predicted else "–"
            losses = ", ".join(f"{loss:.5f}" for loss in worst.losses[:3])
            mine = turns[worst.name]
            share = statistics.median(own / other for own, other in zip(mine, turns[STOCK], strict=True))
            print(
                f"{worst.name:<30}{peak:>20}{said:>12}{statistics.median(mine):>10.3f}"
                f"{share:>9.3f}   {losses}"
            )


def slowest(rows: tuple[Row, ...]) -> list[float]:
    """Of each step, the seconds of the rank that took longest."""
    return [max(spent) for spent in zip(*(row.seconds for row in rows), strict=True)]


if __name__ == "__main__":
    main()
