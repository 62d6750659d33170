"""A GPT-2 124M training step (fp32, CPU): eager, HF checkpointing and torch's activation budgets beside
effcompile, interleaved.

    python benchmarks/training.py [--batch 2] [--seq 512] [--layers 12] [--threads 1] [--rounds 3]
                                  [--budgets 1232,1000,861,806,700,600] [--inductor 1.0,0.75,0.5,0.25,0.1]
                                  [--out FILE]

Peak: the highest running sum of all allocator events of one step, above parameters and inputs; gradients (498
MB at 124M) are part of it, as in a real step. Time: CPU seconds of the process for forward and backward, the
least of the rounds, each round running every way once. Budgets are in MB above the parameters, to compare
with the peers' peaks. Exit 1 when one of our steps was above its budget.
"""

from __future__ import annotations

import argparse
import copy
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _common
from _common import told

MB = 1e6


@dataclass(kw_only=True)
class Way:
    """One way to run the step."""

    name: str
    step: Callable[[], Any]
    model: Any
    ours: bool = False
    budget: float | None = None
    peak: float = 0.0
    cpu: list[float] = field(default_factory=list)
    note: str = ""


def main() -> int:
    options = _options()
    _common.use_threads(options.threads)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch

    lines = _common.header("A training step within a budget", options.threads)
    print("\n".join(lines), flush=True)
    torch.manual_seed(0)
    model, batch = _model(options)
    ways = [_eager(model, batch), _checkpointed(model, batch)]
    ways += [_inductor(model, batch, float(budget)) for budget in options.inductor]
    base = sum(p.numel() * p.element_size() for p in model.parameters()) + sum(
        t.nbytes for t in batch.values()
    )
    ways += _planned(model, batch, [float(budget) for budget in options.budgets], base)
    ways = [way for way in ways if way is not None]
    for way in ways:
        with told(f"{way.name}: peak"):
            way.peak = _peak(way)
    with told(f"timing {len(ways)} ways, {options.rounds} rounds"):
        for turn in range(options.rounds):
            for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                way.cpu.append(_cpu_seconds(way))
    text = [*_table(ways), "", *_verdicts(ways)]
    print("\n".join(text), flush=True)
    rows = [{"name": w.name, "peak": w.peak, "budget": w.budget, "cpu": w.cpu, "note": w.note} for w in ways]
    _common.write_out(options.out, lines + text, {"rows": rows})
    return int(any(way.ours and way.budget is not None and way.peak > way.budget for way in ways))


def _options() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budgets", type=words, default=["1232", "1000", "861", "806", "700", "600"])
    parser.add_argument("--inductor", type=words, default=["1.0", "0.75", "0.5", "0.25", "0.1"])
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def _model(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=options.layers,
        n_embd=options.width,
        n_head=options.width // 64,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # else HF logs inside the forward, which breaks torch.compile's graph
    model.config.use_cache = False
    ids = torch.randint(0, config.vocab_size, (options.batch, options.seq))
    return model, {"input_ids": ids, "labels": ids.clone()}


def _eager(model: Any, batch: dict[str, Any]) -> Way:
    return Way(name="torch eager", step=lambda: model(**batch).loss, model=model)


def _checkpointed(model: Any, batch: dict[str, Any]) -> Way:
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Way(name="HF gradient checkpointing", step=lambda: other(**batch).loss, model=other)


def _inductor(model: Any, batch: dict[str, Any], budget: float) -> Way | None:
    """torch.compile with its activation_memory_budget; the model's code is shared, the compiled function its
    own.
    """
    import torch
    import torch._functorch.config as functorch

    torch._dynamo.config.recompile_limit = 64
    functorch.activation_memory_budget = budget
    other = copy.copy(model)
    other.forward = _own_code(type(model).forward).__get__(other)
    compiled = torch.compile(other.forward, dynamic=False)
    with told(f"compile, activation budget {budget}"):
        start = time.perf_counter()
        compiled(**batch).loss.backward()
        seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    functorch.activation_memory_budget = 1.0
    return Way(
        name=f"torch.compile, activation budget {budget}",
        step=lambda: compiled(**batch).loss,
        model=model,
        note=f"{seconds:.0f} s",
    )


def _own_code(function: Any) -> Any:
    """A copy of a function with a code object of its own, so that Dynamo keeps its compilation apart."""
    import types

    inner = function
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    code = inner.__code__.replace(co_name=f"{inner.__code__.co_name}_{id(object())}")
    return types.FunctionType(code, inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__)


def _planned(model: Any, batch: dict[str, Any], budgets: list[float], base: int) -> list[Way]:
    """Our step at every budget, planned and verified as a user has it."""
    import effcompile
    from effcompile.core.errors import InfeasibleError

    ways = []
    for budget in budgets:
        start = time.perf_counter()
        try:
            with told(f"effcompile: plan and verify within {budget:.0f} MB"):
                step = effcompile.optimize(
                    model, inputs=batch, mode="training", memory=int(budget * MB + base)
                )
        except InfeasibleError as error:
            print(f"  {error}")
            continue
        seconds = time.perf_counter() - start
        way = Way(
            name=f"effcompile, ≤ {budget:.0f} MB",
            step=lambda s=step: s(**batch).loss,
            model=model,
            ours=True,
            budget=budget,
        )
        way.note = (
            f"predicted {(step.plan.predicted.peak_bytes - base) / MB:.1f} MB, planned in {seconds:.0f} s"
        )
        ways.append(way)
    return ways


def _peak(way: Way) -> float:
    from effcompile.core import torch_compat_memory

    way.model.zero_grad(set_to_none=True)
    with torch_compat_memory.memory_profile() as profile:
        way.step().backward()
    way.model.zero_grad(set_to_none=True)
    return torch_compat_memory.peak_of_memory_events(profile) / MB


def _cpu_seconds(way: Way) -> float:
    start = time.process_time()
    way.step().backward()
    seconds = time.process_time() - start
    way.model.zero_grad(set_to_none=True)
    return seconds


def _table(ways: list[Way]) -> list[str]:
    eager = min(ways[0].cpu)
    rows = [
        [
            w.name,
            f"{w.peak:.1f}",
            f"{min(w.cpu):.2f}",
            f"{min(w.cpu) / eager:.3f}",
            _standing(w, ways),
            w.note,
        ]
        for w in sorted(ways, key=lambda w: -w.peak)
    ]
    return _common.markdown(["way", "peak MB", "CPU s", "÷ eager", "dominated by", "note"], rows)


def _standing(way: Way, ways: list[Way]) -> str:
    """A way of the other side that needs no more memory and no more time."""
    rivals = [o for o in ways if o.ours != way.ours and o.peak <= way.peak and min(o.cpu) <= min(way.cpu)]
    return min(rivals, key=lambda o: min(o.cpu)).name if rivals else ""


def _verdicts(ways: list[Way]) -> list[str]:
    lines = []
    for way in (w for w in ways if not w.ours):
        fitting = [o for o in ways if o.ours and o.peak <= way.peak]
        best = min(fitting, key=lambda o: min(o.cpu), default=None)
        if best is None:
            lines.append(f"- {way.name}: nothing of ours within {way.peak:.1f} MB")
            continue
        share = min(best.cpu) / min(way.cpu)
        word = "dominated" if share <= 1 else "NOT dominated"
        lines.append(
            f"- {way.name} ({way.peak:.1f} MB): {word} by {best.name} ({best.peak:.1f} MB, {share:.3f}× "
            "its time)"
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
