"""Bytes against nats per token on trained weights: one bit width for all matrices, and bits per matrix as
plans choose them.

A small Llama over 2048 tokens is trained here on sources of the Python standard library (some minutes, kept
in $EFFCOMPILE_BENCH) and judged on files that it has not seen, told through the lowered step as generation
runs it: weights and activations are rounded as there.

    python benchmarks/bits_front.py [--train-seconds 420] [--errors 0.01,0.02,0.04,0.08,0.12] [--out FILE]

"bytes" are those of the matrices that a token reads: the head, and not the table that it looks a row up in.
q4_0 is llama.cpp's (its head in q8_0), which `int4_groups` are to the rounding of their scales; q4_K is
emulated: weights rounded to nearest, activations exact.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common

if TYPE_CHECKING:
    import torch

CONTEXT, BATCH, HELD_OUT, CALIBRATION, VOCABULARY = 128, 16, 96, 16, 2048
SIZES = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 768, "vocab_size": VOCABULARY, "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}  # fmt: skip


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of the training and of the held-out files, by a byte-pair tokenizer of the former."""
    import tokenizers
    import torch
    from trained_lm import split_files

    training, held_out = (text.decode(errors="ignore") for text in split_files())
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(training[:2_000_000].splitlines(keepends=True), trainer)
    made = [
        words.encode_batch([text[at : at + 100_000] for at in range(0, len(text), 100_000)])
        for text in (training, held_out)
    ]
    return tuple(torch.tensor([token for part in parts for token in part.ids]) for parts in made)  # type: ignore[return-value]


def windows(text: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """(count, CONTEXT + 1) at random places."""
    import torch

    starts = random.Random(seed).sample(range(len(text) - CONTEXT - 1), count)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts])


def trained(text: torch.Tensor, seconds: float) -> tuple[Any, str]:
    """The kept model, or a new one: AdamW under a rate that falls to zero as the time runs out."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    )
    kept = _common.work_folder() / f"bits_front_{seconds:g}s.pt"
    if not kept.exists():
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)
        start, step, losses = time.perf_counter(), 0, list[float]()
        while (spent := (time.perf_counter() - start) / seconds) < 1:
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, (step + 1) / 30) * 0.5 * (1 + math.cos(math.pi * spent))
            batch = windows(text, BATCH, seed=step)
            loss = model(batch, labels=batch, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses, step = [*losses[-19:], float(loss)], step + 1
            if step % 50 == 0:
                print(
                    f"step {step}, {statistics.mean(losses):.3f} nats, {spent:.0%}",
                    file=sys.stderr,
                    flush=True,
                )
        torch.save({"weights": model.state_dict(), "steps": step, "loss": statistics.mean(losses)}, kept)
    state = torch.load(kept, weights_only=True)
    model.load_state_dict(state["weights"])
    return (
        model.eval(),
        f"{state['steps']} steps of {BATCH} × {CONTEXT} tokens, last training loss {state['loss']:.3f} "
        "nats per token",
    )


def nats(run: Any, text: torch.Tensor) -> float:
    """Cross entropy per token of windows (n, CONTEXT + 1)."""
    import torch

    total = 0.0
    with torch.no_grad():
        for batch in text.split(BATCH):
            logits = run(input_ids=batch[:, :-1]).logits
            total += float(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
                )
            )
    return total / text[:, 1:].numel()


def q4_k(weight: torch.Tensor) -> torch.Tensor:
    """llama.cpp's Q4_K, to nearest: 8 groups of 32 of 4-bit codes; 6-bit scales and minima of them, each with
    a scale in fp16: 4.5 bits.
    """
    groups = weight.reshape(-1, 8, 32)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2)
    scale, least = (high - low) / 15, -low
    rounded = []
    for each in (scale, least):
        unit = (each.amax(1, keepdim=True) / 63).half().float().clamp(min=1e-12)
        rounded.append(((each / unit).round().clamp(0, 63) * unit)[..., None])
    codes = ((groups + rounded[1]) / rounded[0].clamp(min=1e-12)).round().clamp(0, 15)
    return (codes * rounded[0] - rounded[1]).view_as(weight)


def q6_k(weight: torch.Tensor) -> torch.Tensor:
    """Q6_K, to nearest: 16 groups of 16 with 6-bit codes, 8-bit scales of them and one in fp16:
    6.5625 bits.
    """
    groups = weight.reshape(-1, 16, 16)
    scale = groups.abs().amax(2) / 31
    unit = (scale.amax(1, keepdim=True) / 127).half().float().clamp(min=1e-12)
    scale = ((scale / unit).round() * unit)[..., None].clamp(min=1e-12)
    return ((groups / scale).round().clamp(-32, 31) * scale).view_as(weight)


def mixed(model: Any, text: torch.Tensor) -> tuple[int, float]:
    """Q4_K_M: Q6_K for the table, and for values and downs of every second layer; Q4_K for the rest. (bytes,
    nats).
    """
    import copy

    import torch

    emulated, total = copy.deepcopy(model), 0.0
    with torch.no_grad():
        for name, weight in emulated.named_parameters():
            if weight.dim() == 2:
                layer = int(name.split(".")[2]) if ".layers." in name else 0
                finer = "embed" in name or (layer % 2 == 0 and ("v_proj" in name or "down_proj" in name))
                weight.copy_(q6_k(weight) if finer else q4_k(weight))
                total += weight.numel() * (6.5625 if finer else 4.5) / 8
    return int(total), nats(lambda **given: emulated(**given, use_cache=False), text)


def front(
    model: Any, training: torch.Tensor, held_out: torch.Tensor, errors: list[float]
) -> list[tuple[str, int, float, str]]:
    """(way, bytes that a token reads of matrices, nats per token, what it is made of), smallest first."""
    from decoding import built

    import effcompile
    from effcompile.capture.generation import capture_step
    from effcompile.ir.formats import FP32, LINEAR_FORMATS, WeightFormat
    from effcompile.sites.parts import linears

    step = capture_step(model)
    sites = linears(step.program)
    weights = {site.site: step.program.tensor(site.weight) for site in sites}
    size = lambda held: sum(held[name].stored_bytes(*tensor.shape) for name, tensor in weights.items())  # noqa: E731
    head = max(weights, key=lambda name: weights[name].shape[0])
    four, eight = LINEAR_FORMATS["int4_groups"], LINEAR_FORMATS["int8_groups"]
    uniform: dict[str, dict[str, WeightFormat]] = {
        "uniform int4 (q4_0, its head too)": dict.fromkeys(weights, four),
        "q4_0, head q8_0": {**dict.fromkeys(weights, four), head: eight},
        "uniform int8 (q8_0)": dict.fromkeys(weights, eight),
    }
    rows = [
        (
            "fp32",
            size(dict.fromkeys(weights, FP32)),
            nats(lambda **given: model(**given, use_cache=False), held_out),
            "",
        )
    ]
    for way, held in uniform.items():
        rows.append((way, size(held), nats(built(model, step, held, CONTEXT)[0], held_out), made_of(held)))
    rows.append(("q4_K_M-like", *mixed(model, held_out), "q4_K and q6_K"))
    calibration = [
        {"input_ids": batch[:, :-1]} for batch in windows(training, CALIBRATION, seed=10**6).split(8)
    ]
    for error in errors:
        made = effcompile.optimize(
            model, calibration[0], mode="generation", context=CONTEXT, prompt=96, new=32, minimize="memory",
            max_error=error, calibration=calibration, backend="torch-eager",
        )  # fmt: skip
        forms = made.plan.forms()
        held = {name: (forms[name].weights if name in forms else None) or FP32 for name in weights}
        found = max(check.error for check in made.plan.checks)
        rows.append(
            (
                f"ours, error ≤ {error:g}",
                size(held),
                nats(made, held_out),
                f"{made_of(held)}; error {found:.3f}",
            )
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return sorted(rows, key=lambda row: row[1])


def made_of(held: Mapping[str, Any]) -> str:
    """How many matrices have which format."""
    names = [each.name for each in held.values()]
    return ", ".join(f"{names.count(name)} {name}" for name in sorted(set(names)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train-seconds", type=float, default=420.0)
    parser.add_argument(
        "--errors",
        type=lambda text: [float(word) for word in text.split(",")],
        default=[0.01, 0.02, 0.04, 0.08, 0.12],
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--out", type=Path, help="writes FILE.md and FILE.json")
    options = parser.parse_args()
    _common.use_threads(options.threads)
    training, held_out = tokens()
    model, how = trained(training, options.train_seconds)
    if options.train_only:
        return
    unseen = windows(held_out, HELD_OUT, seed=1)
    lines = _common.header("Bits per matrix on trained weights", options.threads)
    found = front(model, training, unseen, options.errors)
    exact = next(loss for way, _, loss, _ in found if way == "fp32")
    lines += [
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M weights; {how}; "
        f"{unseen[:, 1:].numel()} tokens not seen.",
        "",
    ]
    lines += ["| way | bytes a token | nats per token | more than fp32 | matrices |", "|---|---|---|---|---|"]
    lines += [
        f"| {way} | {size:,} | {loss:.4f} | {loss - exact:+.4f} | {made} |" for way, size, loss, made in found
    ]
    print("\n".join(lines))
    _common.write_out(options.out, lines, {"front": found})


if __name__ == "__main__":
    main()
