"""Whole models on a GPU beside torch eager and torch.compile: time of a call or a step, the allocator's peak,
and what was predicted.

    python benchmarks/gpu_models.py train --shares 0.6 0.35      # budgets as shares of eager's peak
    python benchmarks/gpu_models.py call --model bert --dtype bfloat16 [--max-error 0.02]     # bert | llama
    python benchmarks/gpu_models.py generate      # tokens/s, and whether the tokens are eager's

Trained is GPT-2 124M, fp32, 8 x 1024, AdamW. Medians of synchronised calls, contestants in turn, after
compiling and planning all of them. `--tiny` runs on a CPU, to see that it runs. Calls are recorded as CUDA
graphs under EFFCOMPILE_CUDA_GRAPHS=1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from rich.console import Console
from torch import Tensor, nn

import effcompile

MIB = 2**20
ROUNDS, CALLS = 3, 20
Step = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("train", "call", "generate"))
    parser.add_argument(
        "--shares", nargs="*", type=float, default=[0.6, 0.35], help="budgets, as shares of eager's peak"
    )
    parser.add_argument("--model", choices=("bert", "llama"), default="bert")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--max-error", type=float)
    parser.add_argument("--tiny", action="store_true", help="a toy on whatever there is")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here that PyTorch can use; --tiny runs a toy without one")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{time.strftime('%Y-%m-%d')}",
        flush=True,
    )
    {"train": train, "call": call, "generate": generate}[options.what](options, device)


# ------------------------------------------------------------------ training


def train(options: argparse.Namespace, device: str) -> None:
    rows, tokens = (2, 16) if options.tiny else (8, 1024)
    toy = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 500, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(use_cache=False, **(toy if options.tiny else {}))
    ids = torch.randint(config.vocab_size, (rows, tokens), device=device)

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config).to(device).train()

    def told_of(name: str, model: nn.Module, run: Callable[..., Any], note: str = "") -> int:
        return told(name, model, lambda: run(input_ids=ids, labels=ids).loss, note)

    model = fresh()
    peak = told_of("eager", model, model)
    model = fresh()
    told_of("torch.compile", model, torch.compile(model))
    del model
    for share in options.shares if peak else [None]:
        released()
        mine = fresh()
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-4)
        budget = {} if share is None else {"memory": int(peak * share)}
        start = time.perf_counter()
        planned = effcompile.optimize(
            mine, inputs={"input_ids": ids, "labels": ids}, mode="training", optimizer=optimizer, **budget
        )
        took = time.perf_counter() - start
        planned.report(Console(width=120))
        predicted = planned.plan.predicted
        foreseen = (
            f"budget {budget.get('memory', 0) / MIB:.0f} MiB, predicted "
            f"{(predicted.peak_bytes or 0) / MIB:.0f}, planned in {took:.0f} s"
        )
        told_of(f"effcompile at {share}", planned, planned.train(), foreseen)


def told(name: str, model: nn.Module, loss: Step, note: str = "") -> int:
    """Time steps with an AdamW of their own; the allocator's peak over them."""
    released()
    optimizer, taken, most = torch.optim.AdamW(model.parameters(), lr=1e-4), [], 0
    for _ in range(8):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        awaited()
        taken.append(time.perf_counter() - start)
        most = max(most, torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
    reserved = torch.cuda.max_memory_reserved() / MIB if torch.cuda.is_available() else 0.0
    figures = (
        f"{statistics.median(taken[2:]) * 1e3:9.2f} ms  peak {most / MIB:9.1f} MiB  reserved {reserved:9.1f}"
    )
    print(f"== {name:20s} {figures}  loss {float(value.detach()):.4f}  {note}", flush=True)
    return most


# ------------------------------------------------------------------ inference


def call(options: argparse.Namespace, device: str) -> None:
    model = made(options.model, options.tiny).to(device, getattr(torch, options.dtype))
    rows, tokens = (2, 16) if options.tiny else ((8, 128) if options.model == "bert" else (4, 512))
    ids = torch.randint(model.config.vocab_size, (rows, tokens), device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    goal = {} if options.max_error is None else {"max_error": options.max_error}
    planned = effcompile.optimize(model, inputs=inputs, **goal)
    planned.report(Console(width=120))
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        wanted = model(**inputs)[0].double()
        found = planned(**inputs)[0].double()
        runs = {
            "eager": lambda: model(**inputs),
            "reduce-overhead": lambda: compiled(**inputs),
            "effcompile": lambda: planned(**inputs),
        }
        for name, seconds in in_turn(runs):
            print(
                f"== {options.model} {rows} x {tokens} {options.dtype} {name:16s} {seconds * 1e3:9.3f} ms",
                flush=True,
            )
    print(f"error {float((found - wanted).norm() / wanted.norm()):.2e}, backend {planned.plan.backend}")


def in_turn(runs: dict[str, Callable[[], Any]]) -> Iterator[tuple[str, float]]:
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            for at in range(CALLS + 3):
                awaited()
                start = time.perf_counter()
                run()
                awaited()
                taken[name] += [time.perf_counter() - start] * (at >= 3)
    for name, values in taken.items():
        yield name, statistics.median(values)


def generate(options: argparse.Namespace, device: str) -> None:
    model = made("llama", options.tiny).to(device, getattr(torch, options.dtype))
    ids = torch.randint(model.config.vocab_size, (1, 32), device=device)
    planned = effcompile.optimize(model, inputs={"input_ids": ids}, mode="generation", context=256)
    planned.report(Console(width=120))
    contestants = {"eager": model, "effcompile": planned}
    runs = {
        name: partial(each.generate, ids, max_new_tokens=64, do_sample=False)
        for name, each in contestants.items()
    }
    texts = {name: run() for name, run in runs.items()}
    for name, seconds in in_turn(runs):
        print(f"== generate {name:16s} {64 / seconds:9.1f} tokens/s", flush=True)
    print(f"equal tokens: {torch.equal(texts['eager'], texts['effcompile'])}")


def made(name: str, tiny: bool) -> Any:
    """BERT-base, or a Llama of 187 M parameters; random weights."""
    torch.manual_seed(0)
    toy = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 500,
    }
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(**(toy if tiny else {}))).eval()
    wide = {
        "num_hidden_layers": 8,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": 32000,
    }
    config = transformers.LlamaConfig(**(toy if tiny else wide), num_key_value_heads=2 if tiny else 4)
    return transformers.LlamaForCausalLM(config).eval()


def awaited() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def released() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
