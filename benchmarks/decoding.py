"""One token behind a cache, and prompts: Hugging Face's forward, ours with each format of weights and cache,
and other engines where it is said where they are; interleaved, beside a read stream.

    python benchmarks/decoding.py --shape quarter --contexts 128,1024 --formats
    int8_groups,int4_groups,int4_groups/bf16 --rounds 16 [--llama FOLDER --llama-headers FOLDER FOLDER]
    [--genai PYTHON] [--openvino PYTHON]

Nothing is priced or chosen: all linears are held in the format, `/bf16` or `/int8` says how the cache is,
norms, gates and rotations are fused. `openvino:w4` and `onnxruntime:w4` are steps of ours there. Tokens are
given, not sampled, and errors are those of the logits. "of the stream": bytes that a token reads, a second,
by the stream's. "A B x name": times faster than that one, of the prompt and of a token.

llama.cpp: the folder of its libraries (`npm pack @node-llama-cpp/linux-x64` has one, built for each kind of
CPU) and those of llama.h and ggml.h. Models of the peers are made from ours, by their own tools, in --files.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from _decoding_peers import Peer, Sizes, build_int4, llama_shim, quantize, save_folder
from _gguf import write as write_gguf
from generation import SHAPES, model_of

from effcompile.backends import usable_for_steps
from effcompile.capture.caches import new_cache
from effcompile.capture.generation import GenerationStep, capture_step
from effcompile.compiler.generation.lower import lower_step
from effcompile.core.cost import Cost
from effcompile.core.goal import Goal
from effcompile.ir.figures import Certificate, Totals
from effcompile.ir.formats import LINEAR_FORMATS, TABLE_INT8_GROUPS, TABLE_INT8_ROWS, Form, WeightFormat
from effcompile.ir.plan import Decision, Plan
from effcompile.passes.norm_gate_rotary import FUSED, Rows
from effcompile.runtime.generation.stepper import Stepper
from effcompile.runtime.generation.steps import CacheRoom
from effcompile.sites.parts import embeddings, linears
from effcompile.sites.rows import row_sites

_CACHES = {"bf16": "bfloat16", "int8": "int8", "int4": "uint8"}
#: Where → what its tables are held in beside linears in codes.
_TABLES = {"": TABLE_INT8_GROUPS, "openvino": TABLE_INT8_ROWS, "onnxruntime": None}
_STREAM = torch.ones(1 << 26)


class Racer(Protocol):
    """What answers token by token."""

    #: Bytes of weights that a token reads, and those of its cache for each token before.
    weights: int
    row: int

    def evaluate(self, ids: torch.Tensor, afresh: bool) -> tuple[float, torch.Tensor]:
        """Seconds, and the logits of the last of these tokens (1, S), the first of all or behind the last."""


@dataclass(kw_only=True)
class Here:
    """A forward in this process."""

    run: Callable[..., Any]
    model: Any
    weights: int
    row: int
    cache: Any = None

    def evaluate(self, ids: torch.Tensor, afresh: bool) -> tuple[float, torch.Tensor]:
        self.cache = new_cache(self.model) if afresh else self.cache
        given, start = {"past_key_values": self.cache, "use_cache": True}, time.perf_counter()
        logits = self.run(input_ids=ids, **given, logits_to_keep=1).logits
        return time.perf_counter() - start, logits[0, -1]


@dataclass(kw_only=True)
class Beside:
    """Another engine."""

    peer: Peer
    weights: int
    row: int

    def evaluate(self, ids: torch.Tensor, afresh: bool) -> tuple[float, torch.Tensor]:
        seconds, logits = self.peer.evaluate(ids[0].numpy(), afresh)
        return seconds, torch.from_numpy(logits.copy())


def racer(model: Any, step: GenerationStep, name: str, context: int) -> Here:
    """Ours, in a format of LINEAR_FORMATS; before a colon stands where, if not on torch."""
    backend, _, name = name.rpartition(":")
    family, _, cache = name.partition("/")
    step = replace(step, layout=step.layout.narrowed(_CACHES[cache])) if cache else step
    table = _TABLES[backend]
    tables = embeddings(step.program) if family != "fp32" and table is not None else []
    forms = {site.site: LINEAR_FORMATS[family] for site in linears(step.program)}
    held = {**forms, **{site.site: table for site in tables}}
    run, weights = built(model, step, held, context, backend or "torch-eager")
    looked_up = sum(table.stored_bytes(site.count, site.width) for site in tables)
    return Here(run=run, model=model, weights=weights - looked_up, row=step.layout.nbytes(1, 1))


def built(
    model: Any,
    step: GenerationStep,
    held: Mapping[str, WeightFormat],
    context: int,
    backend: str = "torch-eager",
) -> tuple[Stepper, int]:
    """A step whose linears and tables are held so, on torch with norms, gates and rotations fused; and the
    bytes of its weights.
    """
    rows = row_sites(step.program) if backend == "torch-eager" else []
    forms = {site.site: Form(word=FUSED) for site in rows}
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
        target_line="", backend=backend, decisions=decisions, declined=(), certificate=proof,
        baseline=Totals(), predicted=Totals(),
    )  # fmt: skip
    program = (
        Rows()
        .apply(step.program, plan)
        .tagged({site: form for site, form in forms.items() if form.weights}, "quantize")
    )
    lowered, parts = lower_step(
        step, program, usable_for_steps(backend)[0], plan, CacheRoom(context=context, chunk=512)
    )
    return Stepper(lowered, type(model).forward, model.config), parts["step"].weight_bytes


def peers(options: argparse.Namespace, model: Any, tokens: int, row: int) -> dict[str, Racer]:
    """The engines that were asked for, with files of this model; `row`: bytes of its cache for a token."""
    found: dict[str, Racer] = {}
    sizes = Sizes(tokens, options.threads, model.config.vocab_size)
    if options.llama is not None:
        shim = llama_shim(options.llama.resolve(), options.llama_headers, options.files)
        plain = options.files / f"{options.shape}-bf16.gguf"
        write_gguf(model, plain)
        for kind in options.llama_types.split(","):
            file = options.files / f"{options.shape}-{kind}.gguf"
            quantize(shim, plain, file, kind)
            peer = Peer(sys.executable, "llama.cpp", str(shim), file, sizes)
            found[f"llama.cpp {kind}"] = Beside(peer=peer, weights=file.stat().st_size, row=row // 2)
    folder = options.files / options.shape
    for engine, python, how in _int4(options):
        if not (folder / "config.json").exists():
            save_folder(model, folder)
        made = options.files / f"{options.shape}-{engine}"
        if not made.exists():
            build_int4(python, engine, folder, made)
        for setting in how:
            name = f"{engine} int4 {setting}".strip()
            size = sum(file.stat().st_size for file in made.rglob("*") if file.suffix in (".data", ".bin"))
            found[name] = Beside(peer=Peer(python, engine, setting, made, sizes), weights=size, row=row)
    return found


def _int4(options: argparse.Namespace) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(engine, its interpreter, its settings) of those that were named. OpenVINO multiplies in fp32 or in
    bf16.
    """
    if options.genai is not None:
        yield "genai", options.genai, ("",)
    if options.openvino is not None:
        yield "openvino", options.openvino, ("f32", "bf16")


def race(racers: Mapping[str, Racer], vocabulary: int, context: int, rounds: int, starts: int) -> None:
    ids = torch.randint(3, vocabulary, (1, context + rounds), generator=torch.Generator().manual_seed(1))
    first: dict[str, list[float]] = {name: [] for name in racers}
    for _ in range(starts):
        for name, one in racers.items():
            first[name].append(one.evaluate(ids[:, :context], True)[0])
    seconds: dict[str, list[float]] = {name: [] for name in (*racers, "stream")}
    errors = dict.fromkeys(racers, 0.0)
    for at in range(context, context + rounds):
        logits = {}
        for name, one in racers.items():
            taken, logits[name] = one.evaluate(ids[:, at : at + 1], False)
            seconds[name].append(taken)
        start = time.perf_counter()
        _STREAM.sum()
        seconds["stream"].append(time.perf_counter() - start)
        told = next(iter(logits.values()))
        errors = {
            name: max(errors[name], float((made - told).norm() / told.norm()))
            for name, made in logits.items()
        }
    show(racers, seconds, first, errors, context)


def show(
    racers: Mapping[str, Racer],
    seconds: Mapping[str, list[float]],
    first: Mapping[str, list[float]],
    errors: Mapping[str, float],
    context: int,
) -> None:
    """A line for each; ratios are medians of those of one round, to the model's own and to each peer's."""
    stream = _STREAM.nbytes / statistics.median(seconds["stream"])
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg()[:2])
    threads = torch.get_num_threads()
    print(f"context {context}: stream {stream / 1e9:.1f} GB/s, {threads} threads, load {load}")
    stock = [name for name, one in racers.items() if not isinstance(one, Here) or one.run is one.model]
    for name, one in racers.items():
        each, read = statistics.median(seconds[name]), one.weights + one.row * context
        prompt = statistics.median(first[name])
        ratios = "  ".join(
            f"{_ratio(first[other], first[name]):.2f} {_ratio(seconds[other], seconds[name]):.2f} x {other}"
            for other in stock
            if other != name
        )
        print(
            f"  {name:18} prefill {context / prompt:7.1f} tokens/s   token {each * 1e3:7.2f} ms "
            f"({1 / each:6.1f}/s)   {read / 1e6:6.0f} MB, {read / each / stream:4.2f} of the stream   error "
            f"{errors[name]:.3f}   {ratios}"
        )


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="quarter")
    parser.add_argument("--contexts", default="128,1024")
    parser.add_argument("--formats", default="fp32,int8_groups,int4_groups,int4_groups/bf16")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--starts", type=int, default=3, help="prefills of each")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--llama", type=Path, help="the folder of llama.cpp's libraries")
    parser.add_argument("--llama-headers", type=Path, nargs="*", default=[], help="of llama.h and ggml.h")
    parser.add_argument("--llama-types", default="q4_0,q8_0")
    parser.add_argument("--genai", help="a Python that has onnxruntime-genai")
    parser.add_argument("--openvino", help="a Python that has openvino, nncf and optimum-intel")
    parser.add_argument("--files", type=Path, help="where files of peers are made")
    options = parser.parse_args()
    absent = [name for name in ("llama", "genai", "openvino") if getattr(options, name) is None]
    if absent:
        print("not beside " + ", ".join(f"{name} (--{name} does not say where it is)" for name in absent))
    options.files = options.files or Path(tempfile.mkdtemp(prefix="decoding-"))
    options.files.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    contexts = [int(context) for context in options.contexts.split(",")]
    longest = max(contexts) + options.rounds
    model = model_of(options.shape, longest)
    step = capture_step(model)
    own, row = sum(parameter.nbytes for parameter in model.parameters()), step.layout.nbytes(1, 1)
    racers: dict[str, Racer] = {"Hugging Face": Here(run=model, model=model, weights=own, row=row)}
    racers |= {name: racer(model, step, name, longest) for name in options.formats.split(",")}
    racers |= peers(options, model, longest, row)
    with torch.no_grad():
        for context in contexts:
            race(racers, model.config.vocab_size, context, options.rounds, options.starts)


if __name__ == "__main__":
    main()
