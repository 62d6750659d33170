"""Peak resident memory of planning: a whole `optimize` of a training step, or of inference, in a process of
its own, sampled from outside.

    python benchmarks/planning_memory.py [model ...] [--threads 2]

What is resident may be a quarter and 1 GiB above the larger of the model and the budget. The original step is
run where it fits in that; where it does not, its row says what it needs, and the plan was compared with the
model's own step run leanly.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import header, use_threads

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model: how it is made, and what is asked for; `backend`: of inference, where that is asked for."""

    make: Callable[[], tuple[Any, dict[str, Any]]]
    budget: int = 0
    backend: str = ""
    max_error: float | None = None
    passes: tuple[str, ...] | None = None
    optimizer: bool = True


def filled(kind: Callable[[], Any]) -> Any:
    """A model with small random weights, made without the initialisation that takes minutes for a billion of
    them.
    """
    import torch
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = kind()
    model.tie_weights()  # left out with the initialisation
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), block.numel()):
                piece = flat[start : start + block.numel()]
                piece.copy_(
                    block[: piece.numel()].roll(number + start // 997)
                ) if parameter.dim() > 1 else piece.fill_(1.0)
    return model.train()


def llama(width: int, layers: int, tokens: int, dtype: str = "float32") -> tuple[Any, dict[str, Any]]:
    """(a Llama, one row of ids with their labels)."""
    import torch
    import transformers as hf

    config = hf.LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, intermediate_size=width * 11 // 4,
        num_attention_heads=width // 128, vocab_size=32000, max_position_embeddings=1024,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 32000, (1, tokens), generator=torch.Generator().manual_seed(1))
    return filled(lambda: hf.LlamaForCausalLM(config).to(getattr(torch, dtype))), {
        "input_ids": ids,
        "labels": ids.clone(),
    }


def gpt2() -> tuple[Any, dict[str, Any]]:
    """(GPT-2 124M, two rows of 512 ids with their labels)."""
    import torch
    import transformers as hf

    ids = torch.randint(0, 50257, (2, 512), generator=torch.Generator().manual_seed(1))
    return filled(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False))), {
        "input_ids": ids,
        "labels": ids.clone(),
    }


def bert() -> tuple[Any, dict[str, Any]]:
    """(BERT-base with its masked-language head, four rows of 256 ids with their labels)."""
    import torch
    import transformers as hf

    ids = torch.randint(5, 30000, (4, 256), generator=torch.Generator().manual_seed(1))
    return filled(lambda: hf.BertForMaskedLM(hf.BertConfig())), {"input_ids": ids, "labels": ids.clone()}


ROWS: Mapping[str, Row] = {
    "gpt2-124m": Row(make=gpt2, budget=1280 << 20, optimizer=False),
    "bert-110m": Row(make=bert, budget=1 * GIB, optimizer=False),
    "llama-0.2b": Row(make=lambda: llama(1024, 8, 512), budget=2 * GIB),
    "llama-0.9b": Row(make=lambda: llama(2048, 16, 512), budget=9 * GIB, max_error=0.02, passes=("offload",)),
    **{
        f"llama-0.1b {backend}": Row(make=lambda: llama(768, 8, 128), backend=backend)
        for backend in ("torch-eager", "torch-inductor", "onnxruntime", "openvino")
    },
    "llama-1.7b": Row(
        make=lambda: llama(2560, 20, 256, "bfloat16"), budget=14 * GIB, max_error=0.02, passes=("offload",)
    ),
}


def child(name: str) -> None:
    """Plan, verify and measure one model, then step once; what the plan says goes to the output."""
    import torch

    import effcompile
    from effcompile.core.findings import Unmeasured

    row = ROWS[name]
    model, inputs = row.make()
    if row.backend:
        return answered(model, {"input_ids": inputs["input_ids"]}, row.backend)
    optimizer = (lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)) if row.optimizer else None
    goal: dict[str, Any] = {"mode": "training", "memory": row.budget, "max_error": row.max_error}
    planned = effcompile.optimize(
        model, inputs=inputs, optimizer=optimizer, passes=list(row.passes) if row.passes else None, **goal
    )
    plan = planned.plan
    planned(**inputs)["loss"].backward()
    if planned.optimizer is not None:
        planned.optimizer.step()
    told = {
        "model": sum(p.numel() * p.element_size() for p in model.parameters()),
        "predicted": plan.predicted.peak_bytes,
        "measured": plan.measured.peak_bytes if plan.measured else None,
        "checks": [f"{c.error:.1e}" for c in plan.checks],
        "original": next((note.because for note in plan.notes if isinstance(note, Unmeasured)), "measured"),
    }  # fmt: skip
    print(json.dumps(told))


def answered(model: Any, inputs: dict[str, Any], backend: str) -> None:
    """Plan, verify and measure inference, then call it once."""
    import effcompile

    planned = effcompile.optimize(model.eval(), inputs=inputs, backend=backend)
    planned(**inputs)
    plan = planned.plan
    told = {
        "model": sum(p.numel() * p.element_size() for p in model.parameters()),
        "predicted": plan.predicted.peak_bytes, "measured": plan.measured.peak_bytes,
        "checks": [f"{c.error:.1e}" for c in plan.checks], "original": "measured",
    }  # fmt: skip
    print(json.dumps(told))


def watched(name: str, threads: int) -> tuple[dict[str, Any] | None, int, float]:
    """(what the child told, None where it failed; its highest resident bytes; seconds)."""
    start, highest = time.perf_counter(), [0]
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", name, "--threads", str(threads)],
        stdout=subprocess.PIPE,
        text=True,
    )

    def sample() -> None:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            found = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
            highest[0] = max([highest[0], *(int(line.split()[1]) * 1024 for line in found)])
            time.sleep(0.05)

    watcher = threading.Thread(target=sample, daemon=True)
    watcher.start()
    output, _ = process.communicate()
    watcher.join()
    told = json.loads(output.splitlines()[-1]) if process.returncode == 0 else None
    return told, highest[0], time.perf_counter() - start


def line(name: str, row: Row, told: Mapping[str, Any] | None, peak: int, seconds: float) -> str:
    """One model's row of the table."""
    size = lambda nbytes: "–" if nbytes is None else f"{nbytes / GIB:.2f} GiB"  # noqa: E731
    if told is None:
        cells = ["–", size(row.budget), "–", size(peak), "failed", "–", "–"]
    else:
        allowed = int(1.25 * max(told["model"], row.budget)) + GIB
        figures = f"{size(told['predicted'])}, {size(told['measured'])}"
        verdict = f"{size(peak)} {'✔' if peak <= allowed else '✘'}"
        cells = [
            size(told["model"]),
            size(row.budget),
            size(allowed),
            verdict,
            figures,
            ", ".join(told["checks"]),
            told["original"],
        ]
    return f"| {' | '.join([name, *cells, f'{seconds / 60:.1f}'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", default="")
    asked = parser.parse_args()
    use_threads(asked.threads)
    if asked.child:
        return child(asked.child)
    print("\n".join(header("Peak resident memory of planning, verifying and one step", asked.threads)))
    print(
        "| model | parameters | budget | allowed | peak resident | plan: predicted, measured | errors | "
        "original step | minutes |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in asked.models:
        print(line(name, ROWS[name], *watched(name, asked.threads)), flush=True)
    return None


if __name__ == "__main__":
    main()
