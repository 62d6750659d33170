"""One token behind a cache: Hugging Face's forward and ours with each format of weights and cache,
interleaved, beside a read stream.

    python benchmarks/decoding.py --shape quarter --contexts 128,1024 --formats
    int8_groups,int4_groups,int4_groups/bf16 --rounds 16

Nothing is priced or chosen: all linears are held in the format, `/bf16` or `/int8` says how the cache is,
norms, gates and rotations are fused. Tokens are given, not sampled, and errors are those of the logits. "of
the stream": bytes that a token reads, a second, by the stream's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from generation import SHAPES, model_of

from effcompile.backends import load_backend
from effcompile.capture.caches import new_cache
from effcompile.capture.generation import GenerationStep, capture_step
from effcompile.compiler.generation.lower import lower_step
from effcompile.core.cost import Cost
from effcompile.core.goal import Goal
from effcompile.ir.figures import Certificate, Totals
from effcompile.ir.formats import LINEAR_FORMATS, TABLE_INT8_ROWS, Form, WeightFormat
from effcompile.ir.plan import Decision, Plan
from effcompile.passes.norm_gate_rotary import FUSED, Rows
from effcompile.runtime.generation.stepper import Stepper
from effcompile.runtime.generation.steps import CacheRoom
from effcompile.sites.parts import embeddings, linears
from effcompile.sites.rows import row_sites

_CACHES = {"bf16": "bfloat16", "int8": "int8"}
_STREAM = torch.ones(1 << 26)


@dataclass(frozen=True, kw_only=True)
class Racer:
    """A forward, the bytes of weights that a token reads, and those of its cache for each token before."""

    run: Callable[..., Any]
    weights: int
    row: int


def racer(model: Any, step: GenerationStep, name: str, context: int) -> Racer:
    """Ours, in a format of LINEAR_FORMATS."""
    family, _, cache = name.partition("/")
    step = replace(step, layout=step.layout.narrowed(_CACHES[cache])) if cache else step
    tables = embeddings(step.program) if family != "fp32" else []
    forms = {site.site: LINEAR_FORMATS[family] for site in linears(step.program)}
    run, weights = built(model, step, {**forms, **{site.site: TABLE_INT8_ROWS for site in tables}}, context)
    looked_up = sum(TABLE_INT8_ROWS.stored_bytes(site.count, site.width) for site in tables)
    return Racer(run=run, weights=weights - looked_up, row=step.layout.nbytes(1, 1))


def built(
    model: Any, step: GenerationStep, held: Mapping[str, WeightFormat], context: int
) -> tuple[Stepper, int]:
    """A step whose linears and tables are held so, with norms, gates and rotations fused; and the bytes of
    its weights.
    """
    forms = {site.site: Form(word=FUSED) for site in row_sites(step.program)}
    forms |= {site: Form(weights=weights) for site, weights in held.items()}
    decisions = tuple(
        Decision(
            site=site,
            kind="",
            option=form.name,
            baseline="",
            by="",
            cost=Cost(),
            baseline_cost=Cost(),
            form=form,
        )
        for site, form in forms.items()
    )
    proof = Certificate(
        status="", objective=0.0, bound=0.0, gap=0.0, sites=0, alternatives=0, seconds=0.0, solver=""
    )
    plan = Plan(
        model="", fingerprint="", parameters=0, goal=Goal.of(mode="generation", context=context), target="",
        target_line="", backend="torch-eager", decisions=decisions, declined=(), certificate=proof,
        baseline=Totals(), predicted=Totals(),
    )  # fmt: skip
    program = (
        Rows()
        .apply(step.program, plan)
        .tagged({site: form for site, form in forms.items() if form.weights}, "quantize")
    )
    lowered, parts = lower_step(
        step, program, load_backend("torch-eager"), plan, CacheRoom(context=context, chunk=512)
    )
    return Stepper(lowered, type(model).forward, model.config), parts["step"].weight_bytes


def race(racers: dict[str, Racer], model: Any, context: int, rounds: int) -> None:
    ids = torch.randint(
        3, model.config.vocab_size, (1, context + rounds), generator=torch.Generator().manual_seed(1)
    )
    caches, first = {}, {}
    for name, one in racers.items():
        caches[name], start = new_cache(model), time.perf_counter()
        one.run(input_ids=ids[:, :context], past_key_values=caches[name], use_cache=True, logits_to_keep=1)
        first[name] = time.perf_counter() - start
    seconds: dict[str, list[float]] = {name: [] for name in (*racers, "stream")}
    errors = dict.fromkeys(racers, 0.0)
    for at in range(context, context + rounds):
        logits = {}
        for name, one in racers.items():
            start = time.perf_counter()
            logits[name] = one.run(
                input_ids=ids[:, at : at + 1], past_key_values=caches[name], use_cache=True
            ).logits
            seconds[name].append(time.perf_counter() - start)
        start = time.perf_counter()
        _STREAM.sum()
        seconds["stream"].append(time.perf_counter() - start)
        told = next(iter(logits.values()))
        errors = {
            name: max(errors[name], float((made - told).norm() / told.norm()))
            for name, made in logits.items()
        }
    stream = _STREAM.nbytes / statistics.median(seconds["stream"])
    print(f"context {context}: stream {stream / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
    eager = next(iter(racers))
    for name, one in racers.items():
        each, read = statistics.median(seconds[name]), one.weights + one.row * context
        ratio = statistics.median(a / b for a, b in zip(seconds[eager], seconds[name], strict=True))
        print(
            f"  {name:18} prefill {context / first[name]:7.1f} tokens/s   token {each * 1e3:7.2f} ms "
            f"({1 / each:6.1f}/s)   {read / 1e6:6.0f} MB, {read / each / stream:4.2f} of the stream   error "
            f"{errors[name]:.3f}   {ratio:5.2f} x {eager}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="quarter")
    parser.add_argument("--contexts", default="128,1024")
    parser.add_argument("--formats", default="fp32,int8_groups,int4_groups,int4_groups/bf16")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    contexts = [int(context) for context in options.contexts.split(",")]
    longest = max(contexts) + options.rounds
    model = model_of(options.shape, longest)
    step = capture_step(model)
    own = sum(parameter.nbytes for parameter in model.parameters())
    racers = {"Hugging Face": Racer(run=model, weights=own, row=step.layout.nbytes(1, 1))}
    racers |= {name: racer(model, step, name, longest) for name in options.formats.split(",")}
    with torch.no_grad():
        for context in contexts:
            race(racers, model, context, options.rounds)


if __name__ == "__main__":
    main()
