"""Generation against Hugging Face's generate(): seconds of both regimes, interleaved in one run, with a read
stream beside them.

    python benchmarks/generation.py --shape small --context 512 --new 64 [--memory 200MiB] [--max-error 0.05]
    [--backend torch-eager]
    python benchmarks/generation.py --architectures [--backend openvino]   # tokens of 26 beside their own

Weights are random. A stream of as many bytes as the model has is read before and after: a machine whose
bandwidth changed meanwhile is seen in its two figures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import effcompile

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 1000},
    "small": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408, "vocab_size": 8000},
    # a quarter of the layers and of the vocabulary: the same bytes by kind, in a quarter of the time
    "quarter": {"hidden_size": 896, "num_hidden_layers": 6, "intermediate_size": 4864, "vocab_size": 37984},
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "intermediate_size": 4864,
        "vocab_size": 151936,
    },
    # TinyLlama's sizes; Qwen2's biases of q, k and v stay
    "llama-1.1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "intermediate_size": 5632,
        "vocab_size": 32000,
    },
}
_HEADS = {
    "tiny": (4, 2),
    "small": (8, 2),
    "quarter": (14, 2),
    "qwen2.5-0.5b": (14, 2),
    "llama-1.1b": (32, 4),
}
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
    "intermediate_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
GQA = {**TINY, "num_key_value_heads": 2}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 32,
}
DELTA = {
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
ENCODED = {"vocab_size": 128, "d_model": 64}
LAYERS = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
FFN = {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": GQA,
    "qwen3": {**GQA, "head_dim": 16},
    "gemma2": {**GQA, "head_dim": 16, "sliding_window": 16},
    "gemma3_text": {
        **GQA,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 512},
    "gpt_neox": TINY,
    "phi3": {**GQA, "pad_token_id": 0},
    "mistral": {**GQA, "sliding_window": 16},
    "mixtral": {**GQA, "num_local_experts": 4},
    "olmo2": GQA,
    "bloom": {**TINY, "n_layer": 2, "n_head": 4},
    "falcon": TINY,
    "opt": {**TINY, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "deepseek_v3": {
        **TINY,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "mamba": {**TINY, "state_size": 8},
    "falcon_mamba": {**TINY, "state_size": 8},
    "mamba2": {**TINY, "num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 16, "chunk_size": 32},
    "jamba": {**GQA, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8},
    "bamba": {**GQA, **MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**GQA, **MAMBA2, "mamba_d_ssm": 128, "head_dim": 16},
    "lfm2": {**GQA, "layer_types": ["conv", "full_attention"]},
    "qwen3_next": {**GQA, **DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_5_text": {**GQA, **DELTA},
    "t5": {
        **ENCODED,
        "decoder_start_token_id": 0,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
    },
    "bart": {**ENCODED, "decoder_start_token_id": 2, **LAYERS, **FFN},
    "whisper": {
        **ENCODED,
        **LAYERS,
        **FFN,
        "max_source_positions": 50,
        "num_mel_bins": 8,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "decoder_start_token_id": 1,
    },
}


AUTO = {
    "t5": "AutoModelForSeq2SeqLM",
    "bart": "AutoModelForSeq2SeqLM",
    "whisper": "AutoModelForSpeechSeq2Seq",
}


def model_of(shape: str, context: int) -> Any:
    heads, groups = _HEADS[shape]
    config = transformers.Qwen2Config(
        **SHAPES[shape],
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=max(context, 64),
        tie_word_embeddings=shape != "llama-1.1b",
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def stream(nbytes: int) -> float:
    """Bytes a second of one thread's reads; the fastest of three."""
    data = torch.ones(max(nbytes, 1 << 26) // 4)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.nbytes / min(times)


def seconds(generate: Callable[..., Any], ids: torch.Tensor, new: int) -> float:
    start = time.perf_counter()
    generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return time.perf_counter() - start


def race(arguments: argparse.Namespace) -> None:
    model = model_of(arguments.shape, arguments.context)
    prompt = arguments.context - arguments.new
    goal = {
        "memory": arguments.memory,
        "max_error": arguments.max_error,
        "context": arguments.context,
        "prompt": prompt,
        "new": arguments.new,
    }
    planned = effcompile.optimize(model, mode="generation", backend=arguments.backend, **goal)
    planned.report()
    for note in planned.plan.notes:
        print("  ", note)
    ids = torch.randint(3, model.config.vocab_size, (1, prompt))
    weights = planned.plan.measured.weight_bytes
    before = stream(weights)
    found: dict[str, list[tuple[float, float]]] = {"effcompile": [], "generate()": []}
    for _ in range(arguments.rounds):
        for name, run in (("effcompile", planned.generate), ("generate()", model.generate)):
            first = seconds(run, ids, 1)
            found[name].append(
                (first, (seconds(run, ids, 1 + arguments.new // 2) - first) / (arguments.new // 2))
            )
    after = stream(weights)
    print(
        f"stream {before / 1e9:.1f} GB/s before, {after / 1e9:.1f} after; {torch.get_num_threads()} threads"
    )
    for name, times in found.items():
        first, each = (statistics.median(column) for column in zip(*times, strict=True))
        then = f"then {each * 1e3:7.2f} ms a token ({1 / each:6.1f}/s)"
        print(f"{name:12} first token {first * 1e3:8.1f} ms ({prompt / first:7.1f} tokens/s)   {then}")
    ratios = [
        tuple(b / a for a, b in zip(x, y, strict=True))
        for x, y in zip(found["effcompile"], found["generate()"], strict=True)
    ]
    print(
        "times faster: first token {:.2f}, each token {:.2f} (medians of pairs)".format(
            *(statistics.median(r) for r in zip(*ratios, strict=True))
        )
    )


def architectures(new: int, backend: str) -> None:
    """Greedy tokens of exact steps beside the model's own generate(), of a row alone and of a left-padded
    one.
    """
    equal = 0
    for kind, settings in ARCHITECTURES.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **settings)
        model = (
            getattr(transformers, AUTO.get(kind, "AutoModelForCausalLM")).from_config(config).eval().float()
        )
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        planned = as_it_is(model, new + 16, backend)
        if isinstance(planned, str):
            print(f"{kind:12} refused: {planned}", flush=True)
            continue
        text, how = (
            torch.randint(3, 120, (2, 9)),
            {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False},
        )
        given = {"input_features": torch.randn(2, 8, 100)} if kind == "whisper" else {"input_ids": text}
        alike = torch.equal(planned.generate(**given, **how), model.generate(**given, **how))
        padded = (
            "no padding of its own"
            if config.is_encoder_decoder
            else f"left-padded {_padded(planned, text[:1], how)}"
        )
        equal += alike
        print(
            f"{kind:12} {new} greedy tokens of two rows {'equal' if alike else 'DIFFER'}, {padded}",
            flush=True,
        )
    print(f"{equal} of {len(ARCHITECTURES)} architectures: equal tokens")


def _padded(planned: Any, row: torch.Tensor, how: dict[str, Any]) -> str:
    wide = torch.cat([torch.zeros((1, 4), dtype=torch.int64), row], 1)
    mask = (torch.arange(wide.shape[1])[None] >= 4).to(torch.int64)
    alone, made = planned.generate(row, **how), planned.generate(wide, attention_mask=mask, **how)
    return "equal" if torch.equal(made[:, 4:], alone) else "DIFFERS"


def as_it_is(model: Any, context: int, backend: str) -> Any:
    """The model's steps lowered as they are: nothing is priced or chosen. A text where that is refused."""
    from effcompile.backends import refusal, usable_for_steps
    from effcompile.capture.generation import capture_step
    from effcompile.compiler.generation.lower import lower_step
    from effcompile.core.goal import Goal
    from effcompile.ir.figures import Certificate, Totals
    from effcompile.ir.plan import Plan
    from effcompile.runtime.generation.executable import GenerationExecutable
    from effcompile.runtime.generation.steps import CacheRoom

    step = capture_step(model)
    proof = Certificate(
        status="", objective=0.0, bound=0.0, gap=0.0, sites=0, alternatives=0, seconds=0.0, solver=""
    )
    plan = Plan(
        model="", fingerprint="", parameters=0, goal=Goal.of(mode="generation", context=context), target="",
        target_line="", backend=backend, decisions=(), declined=(), certificate=proof,
        baseline=Totals(), predicted=Totals(),
    )  # fmt: skip
    (runs,) = usable_for_steps(backend)
    if (reason := refusal(runs, step.program, plan.goal)) is not None:
        return str(reason)
    lowered, parts = lower_step(step, step.program, runs, plan, CacheRoom(context=context, chunk=512))
    return GenerationExecutable(model, step, lowered, plan, parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--memory")
    parser.add_argument("--max-error", type=float)
    parser.add_argument("--backend")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--architectures", action="store_true")
    parser.add_argument("--tokens", type=int, default=256, help="new ones with --architectures")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    if arguments.architectures:
        architectures(arguments.tokens, arguments.backend or "torch-eager")
    else:
        race(arguments)


if __name__ == "__main__":
    main()
