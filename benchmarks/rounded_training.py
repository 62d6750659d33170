"""Training with values in 8 bits: compressed activations, and 8-bit optimizer states, against exact training.

    python benchmarks/rounded_training.py [--steps 300] [--seeds 3] [--architectures gpt2,llama,...] [--out
    FILE]

First, per architecture (small HuggingFace configs, dropout 0): the leanest plan with compression alone, its
bytes between forward and backward, and the cosine of its whole gradient with eager's. Second, a byte-level
GPT-2 trained on the sources of the standard library, each way from the same seeds and batches: loss on unseen
files as training goes, and whether the means lie within the spread of the exact runs. Bytes of the 8-bit
states are counted in their state_dict beside the plan's figure. Exit 1 when a cosine is below 0.999, a curve
ends outside the noise, or bytes differ.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import _common
import trained_lm
from _common import told
from _step_models import build

ARCHITECTURES = (
    "gpt2",
    "llama",
    "bert",
    "t5",
    "vit",
    "mistral",
    "qwen3",
    "gemma2",
    "opt",
    "bloom",
    "roberta",
    "bart",
)
LEAST_COSINE = 0.999
CONTEXT, BATCH, MARKS = 128, 8, 6
WAYS = ("exact", "compressed activations", "8-bit AdamW", "both")


def main() -> int:
    options = _options()
    _common.use_threads(options.threads)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    lines = _common.header("Training with values in 8 bits", options.threads)
    print("\n".join(lines), flush=True)
    rows = []
    for name in options.architectures:
        with told(name):
            rows.append(_gradient(name))
    cells = [
        [
            r["name"],
            f"{r['whole'] / 1e6:.2f}",
            f"{r['packed'] / 1e6:.2f}",
            f"{r['error']:.1e}",
            f"{r['cosine']:.6f}",
        ]
        for r in rows
    ]
    text = _common.markdown(
        ["architecture", "peak MB, exact", "peak MB, compressed", "error of the gradient", "its cosine"],
        cells,
    )
    print("\n".join(text), flush=True)
    curves, said = _curves(options.steps, options.seeds)
    text += ["", *curves, "", *said]
    print("\n".join(["", *curves, "", *said]), flush=True)
    _common.write_out(options.out, lines + text, {"rows": rows})
    return int(any(r["cosine"] < LEAST_COSINE for r in rows) or any("NOT" in line for line in said))


def _planned(model: Any, batch: dict[str, Any], *, compress: bool, eight_bit: bool = False) -> Any:
    """The model with the leanest plan that compression alone gives, or with nothing but its optimizer's
    states in 8 bits.
    """
    import torch

    from effcompile.backends.torch.training import StepRunner
    from effcompile.core.errors import InfeasibleError
    from effcompile.core.goal import Goal
    from effcompile.ops.optimizers import EIGHT_BIT
    from effcompile.proof.training import confirm, timed
    from effcompile.search.request import Task
    from effcompile.search.training.build import build_plan
    from effcompile.search.training.levers import Subsets
    from effcompile.search.training.work import make_work

    timed._TIMING_SECONDS = 0.0
    goal = Goal(mode="training", max_error=0.1)
    passes = [
        "compress.share=0.01",
        "checkpoint.patience=1",
        "no-loss_head",
        "no-attention",
        "states.eight_bit=true",
        "states.offload=false",
    ]
    adam: Callable[[Any], Any] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False)  # noqa: E731
    work = make_work(Task.of(model, (), batch, {"goal": goal, "passes": passes, "optimizer": adam}))
    found = work.prepare(work.capture(False))
    wanted = [
        p
        for p in found.variants
        if (p.case.states.form.name == EIGHT_BIT) == eight_bit and not p.case.states.consumed
    ]
    subsets = Subsets(
        found=[replace(found, variants=wanted[:1])], levers=work.passes.levers, figures=work.figures
    )
    least = None
    if compress:
        try:
            subsets.solve(("compress",), 1)
        except InfeasibleError as error:
            least = int(error.nearest["memory"])
    joint = subsets.solve(("compress",) if compress else (), least)
    plan = build_plan(joint, found, work.figures, goal)
    best = joint.schedule
    return confirm.verified(work, best.prepared, StepRunner(model, best.prepared.step, best.emitted), plan)[0]


def _gradient(name: str) -> dict[str, Any]:
    """How near the gradient of an architecture is, with all compressed that may be."""
    from effcompile.core.findings import Cosine

    model, batch = build(name)
    for module in model.modules():
        if hasattr(module, "p") and isinstance(module.p, float):
            module.p = 0.0
    _without_dropout(model)
    plan = _planned(model, batch, compress=True).plan
    found = plan.checks[0].note
    assert isinstance(found, Cosine), "nothing was compressed"
    return {
        "name": name, "whole": plan.measured_baseline.peak_bytes, "packed": plan.measured.peak_bytes,
        "error": plan.checks[0].error, "cosine": found.cosine,
    }  # fmt: skip


def _without_dropout(model: Any) -> None:
    """No attention of an HF model drops either: their rates are attributes of modules."""
    for module in model.modules():
        for name in ("attention_dropout", "dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


# ------------------------------------------------------------------ a small real run


def _curves(steps: int, seeds: int) -> tuple[list[str], list[str]]:
    """The table of losses as training goes, and what it says."""
    losses: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    states: list[tuple[int, int]] = []
    for seed in range(seeds):
        for way in WAYS:
            with told(f"{way}, seed {seed}"):
                curve, found = _run(way, seed, steps)
            losses[way].append(curve)
            states += [found] if found else []
    marks = [steps * (i + 1) // MARKS for i in range(MARKS)]
    rows = [
        [way, *(_mean_and_spread([curve[i] for curve in of]) for i in range(MARKS))]
        for way, of in losses.items()
    ]
    table = _common.markdown(["nats per byte, unseen files", *(f"step {mark}" for mark in marks)], rows)
    return table, [*_verdicts(losses), *_bytes(states)]


def _mean_and_spread(values: Sequence[float]) -> str:
    return (
        f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"
        if len(values) > 1
        else f"{values[0]:.4f}"
    )


def _verdicts(losses: dict[str, list[list[float]]]) -> list[str]:
    """Each way's mean difference from the exact run of the same seed, beside how far exact runs of two seeds
    lie apart.
    """
    ends = {way: [curve[-1] for curve in of] for way, of in losses.items()}
    exact = ends["exact"]
    noise = 2 * statistics.stdev(exact) if len(exact) > 1 else math.inf
    said = []
    for way in WAYS[1:]:
        apart = statistics.mean(b - a for a, b in zip(exact, ends[way], strict=True))
        verdict = "within" if apart <= noise else "NOT within"
        said.append(
            f"{way}: {apart:+.4f} against exact at the end, {verdict} the noise of seeds (± {noise:.4f})"
        )
    return said


def _bytes(states: Sequence[tuple[int, int]]) -> list[str]:
    """Bytes of 8-bit states, counted and planned."""
    return [
        f"8-bit states: {real} bytes in state_dict, {planned} planned: "
        f"{'equal' if abs(real / planned - 1) < 1e-3 else 'NOT equal'} ({100 * (real / planned - 1):+.3f} %)"
        for real, planned in dict.fromkeys(states)
    ]


def _run(way: str, seed: int, steps: int) -> tuple[list[float], tuple[int, int] | None]:
    """Losses on unseen files at the marks; and bytes of 8-bit states, counted and planned."""
    import torch
    import transformers as hf

    torch.manual_seed(seed)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = hf.GPT2Config(
        vocab_size=256, n_embd=128, n_layer=3, n_head=4, n_positions=CONTEXT, use_cache=False, **drops
    )
    model = hf.GPT2LMHeadModel(config).train()
    seen, unseen = trained_lm.split_files()
    batch = _batch(seen, seed, 0)
    sizes = None
    if way == "exact":
        step, optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    else:
        step = _planned(
            model, batch, compress=way != "8-bit AdamW", eight_bit=way != "compressed activations"
        )
        optimizer = step.optimizer
    judged = _batch(unseen, 10**6, 0, count=64)
    curve = []
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (number + 1) / 30) * 0.5 * (1 + math.cos(math.pi * number / steps))
        optimizer.zero_grad()
        step(**_batch(seen, seed, number)).loss.backward()
        optimizer.step()
        if (number + 1) % (steps // MARKS) == 0:
            with torch.no_grad():
                curve.append(float(model.eval()(**judged).loss))
            model.train()
    if way in ("8-bit AdamW", "both"):
        planned = next(d for d in step.plan.decisions if d.kind == "optimizer states").cost.bytes_kept
        sizes = (_state_bytes(optimizer), planned)
    return curve[:MARKS], sizes


def _state_bytes(optimizer: Any) -> int:
    """Bytes of the tensors in an optimizer's state_dict, those inside subclasses too; the step counts are on
    the CPU side, not counted.
    """
    import torch

    def size(value: Any) -> int:
        if hasattr(value, "__tensor_flatten__"):
            return sum(size(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0

    return sum(size(v) for state in optimizer.state_dict()["state"].values() for name, v in state.items())


def _batch(text: bytes, seed: int, number: int, count: int = BATCH) -> dict[str, Any]:
    """Windows of bytes, the labels the bytes themselves (HF shifts them)."""
    ids = trained_lm.windows(text, count, seed=seed * 100_003 + number)[:, :CONTEXT]
    return {"input_ids": ids, "labels": ids.clone()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architectures", type=lambda text: text.split(","), default=list(ARCHITECTURES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
