"""Does it fit? Training steps of large shapes on machines that are not here, planned without weights.

    python benchmarks/fit.py                      all rows
    python benchmarks/fit.py llama-7b-lora        one row

Each row: verdict, interval of the predicted peak, the instant that binds, what was decided about states, and
what planning took.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import effcompile


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model without data, a machine, an optimizer."""

    make: Callable[[], nn.Module]
    target: str
    length: int = 512
    batch: int = 1
    passes: tuple[str, ...] = ()


def llama(
    width: int, inner: int, layers: int, heads: int, groups: int, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """A Llama of this shape on the meta device."""
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=32000, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return hf.LlamaForCausalLM._from_config(config, dtype=dtype)


def gpt3(layers: int = 96) -> nn.Module:
    """GPT-3 175B's shape (Brown et al. 2020, table 2.1) as a GPT-2."""
    import transformers as hf

    config = hf.GPT2Config(n_layer=layers, n_head=96, n_embd=12288, n_positions=2048, use_cache=False)
    with torch.device("meta"):
        return hf.GPT2LMHeadModel._from_config(config, dtype=torch.bfloat16)


def lora(model: nn.Module) -> nn.Module:
    """The model with LoRA of rank 8 on queries and values."""
    import peft

    with torch.device("meta"):
        return peft.get_peft_model(
            model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )


LLAMA_7B = (4096, 11008, 32, 32, 32)
LLAMA_13B = (5120, 13824, 40, 40, 40)
LLAMA_70B = (8192, 28672, 80, 64, 8)
ON_HOST = ("states.in_backward=true",)

ROWS = {
    "llama-7b-lora": Row(make=lambda: lora(llama(*LLAMA_7B)), target="rtx4090"),
    "llama-7b-full": Row(make=lambda: llama(*LLAMA_7B), target="rtx4090"),
    "llama-13b-host": Row(
        make=lambda: llama(*LLAMA_13B, dtype=torch.float16), target="v100-32gb", passes=ON_HOST
    ),
    "llama-13b-device": Row(
        make=lambda: llama(*LLAMA_13B, dtype=torch.float16),
        target="v100-32gb",
        passes=("states.offload=false",),
    ),
    "llama-70b": Row(make=lambda: llama(*LLAMA_70B), target="h100-sxm", length=2048),
    "gpt3-175b": Row(make=gpt3, target="h100-sxm", length=2048),
}


def run(name: str, row: Row) -> None:
    """Plan a row and print it."""
    model = row.make().train()
    with torch.device("meta"):
        ids = torch.zeros(row.batch, row.length, dtype=torch.long)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    start, wall = time.process_time(), time.perf_counter()
    try:
        plan = effcompile.plan(
            model,
            batch,
            mode="training",
            target=row.target,
            optimizer=torch.optim.AdamW,
            passes=list(row.passes),
        )
        assert plan.fit is not None
        low, high, limit = (
            size / 1e9 for size in (plan.fit.low_bytes, plan.fit.high_bytes, plan.fit.limit_bytes)
        )
        said = f"{plan.fit.verdict}: {low:.1f} to {high:.1f} of {limit:.1f} GB, "
        said += f"highest at {plan.fit.instant}; " + ", ".join(
            d.option for d in plan.decisions if d.by == "states"
        )
    except effcompile.InfeasibleError as error:
        said = str(error)[:260]
    took = f"{time.process_time() - start:.0f} CPU s, {time.perf_counter() - wall:.0f} s wall"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{name:18} {row.target:10} {sum(p.numel() for p in model.parameters()) / 1e9:6.1f} B  {said}  "
        f"[{took}, {memory:.1f} GiB]"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(ROWS)}; all where none is given")
    asked = parser.parse_args().rows
    if unknown := [name for name in asked if name not in ROWS]:
        parser.error(f"there is no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    for chosen in asked or ROWS:
        run(chosen, ROWS[chosen])
