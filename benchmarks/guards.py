"""What the guards cost: seconds of all checks of one call, beside the call itself, for a tiny model,
BERT-base 1×128 and a GPT-2 step.

    python benchmarks/guards.py [tiny] [bert] [gpt2]

The checks are those of the model's state (a share of its weights' bytes included), of the arguments, and of
the tensors among them (shapes, and of ids that they are rows of the table). The model's own call stands for
the planned one: what a plan saves makes the share larger by as much.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import process_time
from typing import Any

import torch
import transformers as hf
from torch import nn

from effcompile.capture import capture
from effcompile.capture.state import ModelGuards
from effcompile.capture.training_inputs import StepInputs
from effcompile.runtime.inputs import GraphInputs


def seconds(run: Callable[[], object], least: float = 0.5) -> float:
    """Processor seconds of one run: the least of five series, as other processes do not count in them."""
    run()
    found = []
    for _ in range(5):
        start, count = process_time(), 0
        while process_time() - start < least / 5:
            run()
            count += 1
        found.append((process_time() - start) / count)
    return min(found)


def checks(model: nn.Module, kwargs: dict[str, Any], *, training: bool) -> tuple[Callable[[], object], int]:
    """All that a call checks before it runs, and how many guards there are."""
    if training:
        state, step = ModelGuards(model, training=True), StepInputs(model, (), kwargs)
        return lambda: (state.check(), step.leaves((), kwargs)), len([*state.listed(), *step.listed()])
    program = capture(model, (), kwargs)
    held, call, inputs = program.state, program.call, GraphInputs(program)
    assert held is not None and call is not None
    held.settle()
    return lambda: (held.check(), inputs.fitting(call.take((), kwargs))), len(inputs.guards())


def row(name: str, model: nn.Module, kwargs: dict[str, Any], *, training: bool) -> str:
    check, count = checks(model, kwargs, training=training)

    def run() -> None:
        if training:
            model(**kwargs).loss.backward()
            model.zero_grad()
        else:
            with torch.no_grad():
                model(**kwargs)

    cost, whole = seconds(check), seconds(run)
    return f"{name:24s} {count:7d} {cost * 1e6:12.1f} µs {whole * 1e3:12.2f} ms {cost / whole:10.3%}"


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down, self.temperature = (
            nn.Linear(64, 256),
            nn.Dropout(0.1),
            nn.Linear(256, 64),
            1.0,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.relu(self.up(x)))) / self.temperature


def main(names: list[str]) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 1000, (1, 128))
    print(f"{'model':24s} {'guards':>7s} {'checks':>15s} {'call':>15s} {'share':>10s}")
    if not names or "tiny" in names:
        print(row("tiny MLP", Tiny().eval(), {"x": torch.randn(8, 64)}, training=False))
    if not names or "bert" in names:
        bert = hf.BertModel(hf.BertConfig()).eval()
        print(
            row(
                "BERT-base 1×128",
                bert,
                {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
                training=False,
            )
        )
    if not names or "gpt2" in names:
        gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config()).train()
        print(row("GPT-2 step 1×128", gpt2, {"input_ids": ids, "labels": ids}, training=True))


if __name__ == "__main__":
    main(sys.argv[1:])
