"""What planned generations keep: encoder-decoders beside generate(), declared memories, the time of planning.

    python benchmarks/generation_bars.py seq2seq [--max-error 0.01] [--new 16,64,128,224]  # T5, BART, Whisper
    python benchmarks/generation_bars.py states [--max-error 0.6]       # Mamba, Mamba-2, Jamba, Qwen3-Next
    python benchmarks/generation_bars.py budgets                       # ten memories, three models
    python benchmarks/generation_bars.py planning [--shape qwen2.5-0.5b]   # seconds, cold

Weights are random. Texts of exact plans must be equal; of others it is told of how many inputs they are.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from generation import AUTO, SHAPES, model_of

import effcompile
from effcompile.backends.torch.regions import Region
from effcompile.core import torch_compat_memory
from effcompile.core.findings import TokenRates

#: T5-small, BART-base and Whisper-tiny as they are published.
_SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {
        "d_model": 512,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "vocab_size": 32128,
        "decoder_start_token_id": 0,
    },
    "bart": {
        "d_model": 768,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "vocab_size": 50265,
    },
    "whisper": {
        "d_model": 384,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_ffn_dim": 1536,
        "decoder_ffn_dim": 1536,
        "encoder_attention_heads": 6,
        "decoder_attention_heads": 6,
        "vocab_size": 51865,
    },
}
#: Mamba and Mamba-2 of 130 M weights as they are published, and hybrids of some layers.
_HYBRID = {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "vocab_size": 16000}
_STATES: dict[str, dict[str, Any]] = {
    "mamba": {"hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280},
    "mamba2": {
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "vocab_size": 50288,
        "num_heads": 24,
        "head_dim": 64,
        "n_groups": 1,
    },
    "jamba": {
        **_HYBRID,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {
        **_HYBRID,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 4096,
    },
}
_SMALL = {"num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 2000, "hidden_size": 256}
_BUDGETED: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL, "num_key_value_heads": 2, "intermediate_size": 704},
    "gpt2": {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 2000, "n_positions": 512},
    "mistral": {**_SMALL, "num_key_value_heads": 2, "intermediate_size": 704, "sliding_window": 64},
}


def made(kind: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = getattr(transformers, AUTO.get(kind, "AutoModelForCausalLM")).from_config(config).eval().float()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    for name in ("forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens", "suppress_tokens"):
        setattr(model.generation_config, name, None)
    return model


def seq2seq(options: argparse.Namespace) -> None:
    """Each planned once, for the longest text, and timed at every length; each round has its own input."""
    lengths = sorted(int(each) for each in options.new.split(","))
    for kind in options.models.split(","):
        model = made(kind, _SEQ2SEQ[kind])
        given = [
            {"input_features": torch.randn(1, 80, 3000)}
            if kind == "whisper"
            else {"input_ids": torch.randint(3, 2000, (1, 128))}
            for _ in range(options.rounds)
        ]
        longest = lengths[-1]
        goal = {"context": 2 * longest, "prompt": 1, "new": longest, "max_error": options.max_error}
        planned = effcompile.optimize(
            model, inputs=given[0], mode="generation", backend=options.backend, **goal
        )
        for new in lengths:
            how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            race(kind, planned, model, given, how)
        seconds = [note for note in planned.plan.notes if "encoder takes" in str(note)]
        error = planned.plan.measured.error
        print(f"    error {error:.1e}, predicted {planned.plan.predicted.seconds:.3f} s,", end=" ")
        print(f"measured {planned.plan.measured.seconds:.3f} s for {longest} tokens;", *seconds, flush=True)


def states(options: argparse.Namespace) -> None:
    """Each planned once; behind a prompt of 128 tokens."""
    for kind in options.models.split(","):
        model, new = made(kind, _STATES[kind]), int(options.new)
        goal = {"context": 128 + 2 * new, "prompt": 128, "new": new, "max_error": options.max_error}
        planned = effcompile.optimize(model, mode="generation", backend="torch-eager", **goal)
        how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        text = {"input_ids": torch.randint(3, 2000, (1, 128))}
        race(kind, planned, model, [text] * options.rounds, how)
        print(*(f"    {note}" for note in planned.plan.notes if isinstance(note, TokenRates)), sep="\n")


def race(kind: str, planned: Any, model: Any, given: list[dict[str, Any]], how: dict[str, Any]) -> None:
    """Both in turn, an input after the other, and a line of it."""
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    alike = 0
    for each in given:
        tokens: dict[str, torch.Tensor] = {}
        for name, one in (("ours", planned), ("theirs", model)):
            start = time.perf_counter()
            tokens[name] = one.generate(**each, **how)
            times[name].append(time.perf_counter() - start)
        alike += torch.equal(*tokens.values())
    ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
    same = f"{alike} of {len(given)} texts equal"
    print(
        f"{kind:8} {how['max_new_tokens']:4} tokens: generate() {statistics.median(times['theirs']):6.3f} s, "
        f"ours {statistics.median(times['ours']):6.3f} s, {ratio:.2f} times faster; {same}; "
        f"{planned.plan.backend}, {regions(planned)}; {torch.get_num_threads()} threads, "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def regions(planned: Any) -> str:
    """How many calls of ours a step is, and which linears and attentions of it are in none."""
    graph = getattr(planned.lowered.run, "graph", None)
    nodes = [node.target for node in graph.nodes if node.op == "call_function"] if graph is not None else []
    left = sum("linear" in str(each) or "attention" in str(each) for each in nodes)
    return f"{sum(isinstance(each, Region) for each in nodes)} call(s) a step and {left} operators beside"


def budgets(options: argparse.Namespace) -> None:
    """The peak that the plan says was measured, and one watched here over a call of the whole context."""
    context, over = 256, 0
    for kind, settings in _BUDGETED.items():
        model = made(kind, settings)
        how = {"mode": "generation", "context": context, "prompt": 128, "new": 128, "max_error": 0.5}
        goal = {**how, "backend": "torch-eager"}
        most = effcompile.optimize(model, **{**goal, "max_error": None}).plan.measured.peak_bytes
        for part in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3):
            memory = int(most * part)
            try:
                planned = effcompile.optimize(model, memory=memory, **goal)
            except effcompile.EffcompileError as error:
                print(f"{kind:8} {memory:>11,} B  {str(error).splitlines()[0][:120]}", flush=True)
                continue
            weights = planned.plan.measured.weight_bytes
            ids = torch.randint(3, 2000, (1, 128))
            with torch_compat_memory.watched_memory("cpu") as peak:
                planned.generate(ids, max_new_tokens=context - 128, min_new_tokens=context - 128)
            held, said = weights + peak(), planned.plan.measured.peak_bytes
            over += held > memory or said > memory
            print(f"{kind:8} {memory:>11,} B  planned {said:>11,}  watched {held:>11,}", flush=True)
    print(f"{over} above their memory")


class _Steps:
    """Seconds of each step of planning: wall, and of all of this process's threads."""

    def __init__(self) -> None:
        self.taken: dict[str, tuple[float, float]] = {}

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        before = self.taken.get(name, (0.0, 0.0))
        self.taken[name] = (
            before[0] + time.perf_counter() - wall,
            before[1] + time.process_time() - cpu,
        )

    def update(self, name: str, done: int, total: int) -> None:
        return None


def planning(options: argparse.Namespace) -> None:
    steps = _Steps()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EFFCOMPILE_CACHE"] = folder
        model = model_of(options.shape, 1024)
        start, cpu = time.perf_counter(), time.process_time()
        goal = {"context": 1024, "prompt": 512, "new": 128, "max_error": 0.6}
        planned = effcompile.optimize(model, mode="generation", progress=steps, **goal)
        wall, used = time.perf_counter() - start, time.process_time() - cpu
    planned.report()
    for name, (seconds, busy) in steps.taken.items():
        print(f"{name:40} {seconds:7.1f} s {busy:7.1f} CPU s")
    print(
        f"{options.shape}: planned cold in {wall:.1f} s ({used:.1f} CPU s of this process), of which the "
        f"solve {planned.plan.certificate.seconds:.2f} s; load {os.getloadavg()[0]:.1f}, "
        f"{torch.get_num_threads()} threads"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("seq2seq", "states", "budgets", "planning"))
    parser.add_argument("--max-error", type=float)
    parser.add_argument("--new", default="64", help="tokens, several with commas between")
    parser.add_argument("--models")
    parser.add_argument("--backend", choices=("torch-eager", "onnxruntime"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    all_of = {"seq2seq": _SEQ2SEQ, "states": _STATES}.get(options.what, {})
    options.models = options.models or ",".join(all_of)
    {"seq2seq": seq2seq, "states": states, "budgets": budgets, "planning": planning}[options.what](options)


if __name__ == "__main__":
    main()
