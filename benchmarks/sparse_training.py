"""Dynamic sparse training at equal FLOPs: does a wide sparse transformer learn more than a narrow dense one?

A masked language model over bytes learns the Python standard library's sources. A dense model, narrow enough
to cost the same FLOPs per step, is trained beside sparse ones (0.9 of the block weights are zero) in blocks
of 1, 4, 8 and 16, moving and static, some seeds each; the loss is that of files not trained on. The table
stands beside Dietrich et al. 2021 (arXiv 2108.06277), Table 1: BERT-Base, 0.9.

    python benchmarks/sparse_training.py [--steps 5000] [--seeds 3] [--jobs 2] [--out FILE]
    python benchmarks/sparse_training.py --short       # that it works, no more

The first takes under 40 minutes on 2 cores, the second under one.

FLOPs are what is matched, not time: layers run as blocks where this machine has kernels, else as dense
products of masked weights, and the last table says what a sparse FLOP costs here. All models take AdamW at
the rates below, the same for all sparse ones.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common
from _masked_bytes import SHORT, Setup, batch_of, build, loss_on, seeded, texts

if TYPE_CHECKING:
    import torch
    from torch import nn

    import effcompile

#: MLM loss of Dietrich et al., Table 1 (phase I, 10 epochs); they give none for static patterns at this size.
PUBLISHED = {
    "dense": "2.350",
    "dynamic 1": "2.160",
    "dynamic 4": "2.272",
    "dynamic 8": "2.295",
    "dynamic 16": "2.311",
}
SPARSITY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One row of the table. `block` 0: dense, of `flops` times the FLOPs of the sparse models."""

    block: int = 0
    moving: bool = True
    flops: float = 1.0

    @property
    def name(self) -> str:
        if not self.block:
            return "dense" if self.flops == 1 else f"dense {self.flops:g}×"
        return f"{'dynamic' if self.moving else 'static'} {self.block}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run: loss in nats per masked byte of unseen files, FLOPs per step, and how it was run."""

    variant: str
    seed: int
    loss: float
    flops: float
    width: int
    explored: float
    execution: str
    seconds: float


BLOCKS = (1, 4, 8, 16)
VARIANTS = [
    Variant(),
    Variant(flops=2.0),
    *(Variant(block=b) for b in BLOCKS),
    *(Variant(block=b, moving=False) for b in BLOCKS),
]


def main() -> int:
    options = _options()
    _common.use_threads(options.jobs)
    lines = _common.header("Dynamic sparse training at equal FLOPs", options.jobs)
    print("\n".join(lines), flush=True)
    setup = SHORT if options.short else replace(Setup(), steps=options.steps, updates=options.updates)
    seeds = 1 if options.short else options.seeds
    results = list(_all_runs(setup, options.variants, seeds, options.jobs))
    text = [*table(setup, results), "", *verdicts(results), "", *efficiency(setup, options.rounds)]
    print("\n".join(text), flush=True)
    _common.write_out(
        options.out, [*lines, *text], {"setup": asdict(setup), "results": [asdict(r) for r in results]}
    )
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = {variant.name: variant for variant in VARIANTS}
    parser.add_argument("--short", action="store_true", help="a tiny model, one seed")
    parser.add_argument("--steps", type=int, default=Setup().steps)
    parser.add_argument("--updates", type=int, default=Setup().updates, help="of the pattern, in a whole run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--rounds", type=int, default=5, help="of the timing of sparse against dense layers")
    parser.add_argument(
        "--variants",
        type=lambda text: [names[n] for n in text.split(",")],
        default=VARIANTS,
        help=", ".join(names),
    )
    parser.add_argument("--out", type=Path, help="writes FILE.md and FILE.json")
    return parser.parse_args()


# ---------------------------------------------------------------- one run


def step_flops(setup: Setup, width: int) -> float:
    """FLOPs of a dense model's training step."""
    import torch

    from effcompile.core.torch_compat import flop_counter

    batch = batch_of(torch.zeros(4 * setup.context, dtype=torch.uint8), setup, 1, torch.Generator())
    with flop_counter() as counter:
        loss_on(build(setup, width), batch).backward()
    return counter.get_total_flops() * setup.batch


def matched_width(setup: Setup, flops: float) -> int:
    """The narrowest dense model that costs at least so many FLOPs: the comparison never favours the sparse
    one.
    """
    width = step = 2 * setup.heads  # rotary positions turn pairs
    while step_flops(setup, width) < flops:
        width += step
    return width


def sparse_flops(setup: Setup) -> float:
    """FLOPs of a sparse step: those of the dense model less the share that is left out; blocks of 1, whose
    rounding is least.
    """
    model, _, sparsity = prepared(replace(setup, execution="masked"), Variant(block=1, moving=False), 0)
    batch = batch_of(texts()[1], setup, setup.batch, seeded(0))
    return sparsity.measure(lambda: loss_on(model, batch), rounds=1).flops.sparse


def prepared(
    setup: Setup, variant: Variant, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer, effcompile.DynamicSparsity]:
    """Model, optimizer and controller of a run."""
    import torch

    import effcompile

    torch.manual_seed(seed)
    model = build(setup, setup.width)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setup.sparse_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    sparsity = effcompile.DynamicSparsity(
        model, optimizer, sparsity=SPARSITY, block=variant.block,
        updates=setup.updates if variant.moving else 0, steps=setup.steps, prune_ratio=setup.prune_ratio,
        seed=seed, execution=setup.execution,
    )  # fmt: skip
    return model, optimizer, sparsity


def run(setup: Setup, variant: Variant, seed: int, flops: float) -> Result:
    """Train one model and judge it on unseen files.

    `flops`: of a sparse step, which a dense model matches.
    """
    import torch

    torch.set_num_threads(1)
    start = time.perf_counter()
    training, unseen = texts()
    sparsity: effcompile.DynamicSparsity | None = None
    if variant.block:
        width = setup.width
        model, optimizer, sparsity = prepared(setup, variant, seed)
    else:
        width = matched_width(setup, flops * variant.flops)
        torch.manual_seed(seed)
        model = build(setup, width)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=setup.dense_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
    _train(setup, model, optimizer, sparsity, training, seed)
    loss = _judge(setup, model, unseen)
    batch = batch_of(training, setup, setup.batch, seeded(0))
    figures = sparsity.measure(lambda: loss_on(model, batch), rounds=1) if sparsity else None
    return Result(
        variant=variant.name, seed=seed, loss=loss,
        flops=figures.flops.sparse if figures else step_flops(setup, width), width=width,
        explored=figures.explored if figures else 1.0,
        execution=figures.layers[0].execution if figures else "dense", seconds=time.perf_counter() - start,
    )  # fmt: skip


def _train(
    setup: Setup, model: nn.Module, optimizer: Any, sparsity: Any, text: torch.Tensor, seed: int
) -> None:
    import torch

    warm = max(setup.steps // 20, 1)
    shape: Callable[[int], float] = lambda step: (  # noqa: E731
        min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / setup.steps))
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    generator = seeded(seed)
    for _ in range(setup.steps):
        optimizer.zero_grad()
        loss_on(model, batch_of(text, setup, setup.batch, generator)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if sparsity:
            sparsity.step()


def _judge(setup: Setup, model: nn.Module, text: torch.Tensor) -> float:
    import torch

    generator, rounds = seeded(10**6), setup.judged_windows // setup.batch
    with torch.inference_mode():
        return statistics.mean(
            float(loss_on(model, batch_of(text, setup, setup.batch, generator))) for _ in range(rounds)
        )


def _all_runs(setup: Setup, variants: Sequence[Variant], seeds: int, jobs: int) -> Iterator[Result]:
    """Every variant and seed, `jobs` at a time."""
    flops = sparse_flops(setup)
    todo = [(setup, variant, seed, flops) for seed in range(seeds) for variant in variants]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done, future in enumerate([pool.submit(run, *arguments) for arguments in todo], start=1):
            result = future.result()
            told = (
                f"{result.variant}, seed {result.seed}: {result.loss:.4f} in {result.seconds:.0f} s, "
                f"{result.execution}"
            )
            print(f"  {done} of {len(todo)}: {told}", file=sys.stderr, flush=True)
            yield result


# ---------------------------------------------------------------- what came out


def table(setup: Setup, results: Sequence[Result]) -> list[str]:
    """Mean and standard deviation over the seeds, beside Dietrich's figures."""
    rows = []
    for name, found in by_variant(results).items():
        mean, spread = _mean(found), _spread(found)
        explored = f"{statistics.mean(r.explored for r in found):.0%}"
        gain = f"{_mean(by_variant(results)['dense']) - mean:+.4f}" if "dense" in by_variant(results) else ""
        loss = f"{mean:.4f} ± {spread:.4f}" if len(found) > 1 else f"{mean:.4f}"
        rows.append(
            [
                name,
                str(found[0].width),
                f"{found[0].flops / 1e9:.2f}",
                explored,
                loss,
                gain,
                found[0].execution,
                PUBLISHED.get(name, ""),
            ]
        )
    title = (
        f"## {setup.depth} layers, width {setup.width} at {SPARSITY:g}; {setup.steps} steps of "
        f"{setup.batch} × {setup.context} bytes"
    )
    columns = [
        "model, block",
        "width",
        "GFLOP/step",
        "explored",
        "MLM loss",
        "below dense",
        "run as",
        "BERT-Base, Dietrich et al.",
    ]
    return [title, "", *_common.markdown(columns, rows)]


def verdicts(results: Sequence[Result]) -> list[str]:
    """What agrees with the paper and what does not, said of differences beyond two standard errors; else that
    it is open.
    """
    found = by_variant(results)
    claims = [(f"dynamic {b} beats the matched dense model", f"dynamic {b}", "dense") for b in BLOCKS]
    claims += [
        (f"blocks of {a} learn more than blocks of {b}", f"dynamic {a}", f"dynamic {b}")
        for a, b in itertools.pairwise(BLOCKS)
    ]
    lines = [
        f"- {claim}: {_compared(found[better], found[worse])}"
        for claim, better, worse in claims
        if better in found and worse in found
    ]
    lines += _moving_or_not(found)
    lines += [
        _needed_flops(found, b) for b in BLOCKS if {"dense", "dense 2×", f"dynamic {b}"} <= found.keys()
    ]
    return lines


def _compared(better: Sequence[Result], worse: Sequence[Result]) -> str:
    """The difference of two means, held against its standard error."""
    gap = _mean(worse) - _mean(better)
    if len(better) < 2 or len(worse) < 2:
        return f"{gap:+.4f}, one seed: open"
    return _judged(gap, math.sqrt(_spread(better) ** 2 / len(better) + _spread(worse) ** 2 / len(worse)))


def _moving_or_not(found: Mapping[str, Sequence[Result]]) -> list[str]:
    """Static against dynamic, seed by seed: a seed gives both the same weights, first pattern and batches."""
    lines, gaps = [], []
    for block in BLOCKS:
        moving, fixed = (
            {r.seed: r.loss for r in found.get(f"{way} {block}", ())} for way in ("dynamic", "static")
        )
        pairs = [fixed[seed] - moving[seed] for seed in sorted(moving.keys() & fixed.keys())]
        gaps += pairs
        if pairs:
            lines.append(f"- moving beats static in blocks of {block}: {_judged_pairs(pairs)}")
    return (
        [*lines, f"- moving beats static, all {len(gaps)} pairs: {_judged_pairs(gaps)}"]
        if len(lines) > 1
        else lines
    )


def _judged_pairs(gaps: Sequence[float]) -> str:
    if len(gaps) < 2:
        return f"{gaps[0]:+.4f}, one seed: open"
    return _judged(statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps)))


def _judged(gap: float, error: float) -> str:
    """ "agrees", "disagrees" or "open", with the difference and its standard error."""
    word = "open" if abs(gap) < 2 * error else "agrees" if gap > 0 else "DISAGREES"
    return f"{word} ({gap:+.4f} ± {error:.4f})"


def _needed_flops(found: dict[str, list[Result]], block: int) -> str:
    """F_dense / F_sparse at equal loss, from the two dense models' line in log FLOPs: eps must
    stay below it.
    """
    from effcompile.ir.sparsity import MATCHED_BREAK_EVEN

    one, two, sparse = found["dense"], found["dense 2×"], found[f"dynamic {block}"]
    slope = (_mean(two) - _mean(one)) / math.log(two[0].flops / one[0].flops)
    limit, quoted = MATCHED_BREAK_EVEN[block]
    published = (
        f"published {limit}"
        if quoted
        else f"not published; {limit} by linear interpolation of published losses"
    )
    if slope >= 0:
        return (
            f"- F_dense / F_sparse at equal loss, blocks of {block}: the larger dense model is no "
            f"better here ({published})"
        )
    ratio = one[0].flops / sparse[0].flops * math.exp((_mean(sparse) - _mean(one)) / slope)
    return (
        f"- F_dense / F_sparse at equal loss, blocks of {block}: {ratio:.2f} ({published}): eps must "
        "be below that to win"
    )


def efficiency(setup: Setup, rounds: int) -> list[str]:
    """eps of every block size, forward and backward, measured now."""
    import torch

    training, _ = texts()
    torch.set_num_threads(1)
    batch, rows = batch_of(training, setup, setup.batch, seeded(0)), []
    for block in BLOCKS:
        model, _, sparsity = prepared(setup, Variant(block=block), 0)
        found = sparsity.measure(lambda model=model: loss_on(model, batch), rounds=rounds).efficiency
        assert found is not None
        run_as = sparsity.figures().layers[0].execution
        rows.append(
            [
                str(block),
                f"{found.eps:.2f}",
                f"{found.break_even:.1f}",
                f"{found.dense_seconds / found.sparse_seconds:.2f}",
                run_as,
            ]
        )
    columns = ["block", "eps", "break-even, same layers", "× dense", "run as"]
    return [
        "Time per sparse FLOP over time per dense FLOP, one thread:",
        "",
        *_common.markdown(columns, rows),
    ]


def by_variant(results: Sequence[Result]) -> dict[str, list[Result]]:
    return {
        name: [r for r in results if r.variant == name] for name in dict.fromkeys(r.variant for r in results)
    }


def _mean(results: Sequence[Result]) -> float:
    return statistics.mean(r.loss for r in results)


def _spread(results: Sequence[Result]) -> float:
    return statistics.stdev(r.loss for r in results) if len(results) > 1 else 0.0


if __name__ == "__main__":
    raise SystemExit(main())
