"""What a planned training step was predicted to take, beside what it takes once it runs step after step.

    python benchmarks/predictions.py [--models bert,llama,vit,gpt2] [--share 1] [--rounds 5] [--threads 2]

Each model is planned within a share of the memory that keeping everything needs, without a limit at 1; the
planned step and the original's run in turn, gradients let go in between, and the second least of
the rounds counts. "when planned" is the plan's own measurement, of a step whose memory is new.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _common

Model = tuple[Any, dict[str, Any]]


def main() -> None:
    options = _options()
    _common.use_threads(options.threads)
    warnings.filterwarnings("ignore")
    lines = _common.header("Training steps, predicted and steady", options.threads)
    print("\n".join(lines), flush=True)
    rows = []
    for name in options.models.split(","):
        with _common.told(name):
            rows.append([name, *_row(MODELS[name](), options)])
    columns = [
        "model",
        "peak",
        "predicted",
        "when planned",
        "steady",
        "predicted ÷ steady",
        "original, steady",
    ]
    table = _common.markdown(columns, rows)
    print("\n".join(table))
    _common.write_out(options.out, [*lines, *table], {"rows": rows})


def _row(made: Model, options: argparse.Namespace) -> list[str]:
    import effcompile

    model, batch = made
    whole = effcompile.plan(model, inputs=batch, mode="training").baseline
    assert whole is not None and whole.peak_bytes is not None
    memory = None if options.share >= 1 else int(options.share * whole.peak_bytes)
    planned = effcompile.optimize(model, inputs=batch, mode="training", memory=memory)
    plan = planned.plan
    steps = {"planned": planned, "original": model}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            seconds[name].append(_seconds(step, batch))
    steady, original = (sorted(seconds[name])[1] for name in steps)
    when = plan.measured.seconds if plan.measured else None
    return [
        f"{plan.peak_bytes / 2**20:.0f} MiB",
        f"{plan.predicted.seconds:.3f} s",
        "" if when is None else f"{when:.3f} s",
        f"{steady:.3f} s",
        f"{plan.predicted.seconds / steady:.2f}",
        f"{original:.3f} s",
    ]


def _seconds(step: Any, batch: dict[str, Any]) -> float:
    start = time.perf_counter()
    step(**batch).loss.backward()
    spent = time.perf_counter() - start
    for parameter in step.parameters():
        parameter.grad = None
    return spent


def _text(vocabulary: int, batch: int, length: int) -> dict[str, Any]:
    import torch

    ids = torch.randint(5, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids}


def _bert() -> Model:
    import transformers as hf

    return hf.BertForMaskedLM(hf.BertConfig(num_hidden_layers=6)).train(), _text(30_000, 8, 128)


def _llama() -> Model:
    import transformers as hf

    config = hf.LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=6, num_attention_heads=8, vocab_size=8000
    )
    return hf.LlamaForCausalLM(config).train(), _text(8000, 4, 256)


def _vit() -> Model:
    import torch
    import transformers as hf

    config = hf.ViTConfig(num_hidden_layers=4, num_labels=10)
    images = {"pixel_values": torch.randn(8, 3, 224, 224), "labels": torch.randint(0, 10, (8,))}
    return hf.ViTForImageClassification(config).train(), images


def _gpt2() -> Model:
    import transformers as hf

    return hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False)).train(), _text(50_000, 2, 512)


MODELS: dict[str, Callable[[], Model]] = {"bert": _bert, "llama": _llama, "vit": _vit, "gpt2": _gpt2}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
