"""Training steps of tiny models, captured, cut, and with their operators' workspaces measured on this
machine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from effcompile.backends.torch.training import StepRunner
from effcompile.capture import capture_training
from effcompile.core import torch_compat_memory
from effcompile.core.goal import Goal
from effcompile.core.reasons import Unsupported
from effcompile.estimate import operators
from effcompile.estimate.roofline import moved_bytes
from effcompile.estimate.storages import graph_storages
from effcompile.ir.plan import Declined
from effcompile.ir.step import Step
from effcompile.machine.machines import load_target
from effcompile.ops.workspace import workspace_bytes
from effcompile.passes.training.base import Case, StepContext, StepPass
from effcompile.passes.training.forms import forms
from effcompile.planner.remat import Group
from effcompile.schedules.blocks import Blocks
from effcompile.schedules.emit import emit
from effcompile.schedules.into_blocks import cut_into_blocks
from effcompile.search.training.operator_costs import OperatorCosts

VOCABULARY = 96
Batch = dict[str, torch.Tensor]
Results = tuple[torch.Tensor, dict[str, torch.Tensor]]


def context(*, here: bool = False, **forbidden: str) -> StepContext:
    """What passes propose for: an exact goal on a machine that is not here.

    `forbidden`: kind → an option that is refuted.
    """
    figures = OperatorCosts(target=load_target("cpu-generic"), here=False)
    refuted = dict.fromkeys(forbidden.items(), Unsupported("it was run, and did not hold"))
    return replace(figures.context(Goal(mode="training"), refuted), here=here)


def forms_of(step: Step, *passes: StepPass, **forbidden: str) -> tuple[list[Case], list[Declined]]:
    """The forms of a step that these passes have, and what they decline."""
    found = forms(passes, Case(step=step), context(**forbidden))
    return found.cases, list(found.declined)


class Layer(nn.Module):
    """A residual MLP; reads a second stream too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x + skip)))))


class Skips(nn.Module):
    """Layer i also reads what layer i − 2 returned, as a U-Net's do; the loss of x and y is returned by the
    forward.
    """

    def __init__(self, layers: int = 4, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        earlier = [x, x]
        for layer in self.layers:
            earlier.append(layer(earlier[-1], earlier[-3] if len(earlier) > 2 else x))
        return nn.functional.cross_entropy(self.head(earlier[-1]), y)


def gpt2(layers: int = 2, dropout: float = 0.1, **changes: Any) -> tuple[nn.Module, Batch]:
    """(GPT-2 in training mode, ids with their labels)."""
    import transformers as hf

    torch.manual_seed(0)
    shape = {
        "n_layer": layers,
        "n_head": 2,
        "n_embd": 32,
        "n_positions": 32,
        "vocab_size": VOCABULARY,
        "use_cache": False,
    }
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = hf.GPT2Config(**{**shape, **drops, "bos_token_id": 0, "eos_token_id": 0, **changes})
    model = hf.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, VOCABULARY, (2, 16))
    return model, {"input_ids": ids, "labels": ids.clone()}


def t5(layers: int = 2) -> tuple[nn.Module, Batch]:
    """(a T5 with so many encoder and as many decoder layers, its batch)."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=VOCABULARY, num_layers=layers, num_decoder_layers=layers, d_model=16, d_kv=8, num_heads=2,
        d_ff=32, dropout_rate=0.1, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(1, VOCABULARY, (2, 12))
    return hf.T5ForConditionalGeneration(config).train(), {
        "input_ids": ids,
        "labels": torch.randint(1, VOCABULARY, (2, 7)),
    }


def albert() -> tuple[nn.Module, Batch]:
    """(an ALBERT whose three layers share their weights, its batch)."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.AlbertConfig(
        vocab_size=VOCABULARY, embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=48, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
        max_position_embeddings=32,
    )  # fmt: skip
    ids = torch.randint(1, VOCABULARY, (2, 12))
    return hf.AlbertForMaskedLM(config).train(), {
        "input_ids": ids,
        "labels": torch.randint(1, VOCABULARY, (2, 12)),
    }


def skips() -> tuple[nn.Module, Batch]:
    """(the residual MLP whose layers also read an earlier one's result, its batch)."""
    torch.manual_seed(0)
    return Skips().train(), {"x": torch.randn(6, 24), "y": torch.randint(0, 8, (6,))}


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "gpt2": gpt2,
    "skips": skips,
    "t5": t5,
    "t5 of one layer": partial(t5, 1),
    "albert": albert,
}


@cache
def cut_model(name: str) -> tuple[nn.Module, Batch, Blocks]:
    """(model, batch, its step in blocks) of one of MODELS; made once, so tests leave it as it was."""
    model, batch = MODELS[name]()
    return model, batch, cut_step(capture_training(model, (), batch))


def cut_step(step: Step, measure: bool = True) -> Blocks:
    """A step in blocks, with workspaces measured here (or only traced) and the bytes that an operator moves
    as its seconds.
    """
    held = graph_storages(step.graph, lambda node: node.meta["val"])
    known: dict[str, operators.Measured] = {}
    if measure:
        operators.measure((n for n in step.graph.nodes if not held.is_free(n)), known, seconds_each=0.0)

    def workspace(node: Any, traced: int) -> int:
        found = known.get(operators.key(node))
        ours = workspace_bytes(
            node.target, [arg.meta.get("val") if hasattr(arg, "meta") else arg for arg in node.args]
        )
        return max(traced, found.workspace if found else 0, ours or 0)

    exact = replace(held, workspace={node: workspace(node, size) for node, size in held.workspace.items()})
    return cut_into_blocks(step, exact, moved_bytes)


def everything(cut: Blocks) -> frozenset[int]:
    """All storages that a block may keep."""
    return cut.decidable


def run_schedule(
    model: nn.Module, cut: Blocks, batch: Batch, kept: frozenset[int], groups: tuple[Group, ...] = ()
) -> tuple[Results, int]:
    """((loss, gradients by name), the allocator's highest bytes) of an emitted step, from one seed; the model
    stays as it was.
    """
    runner = StepRunner(model, cut.step, emit(cut, kept, groups))
    return measured(lambda: runner.loss((), batch), model, cut.given_bytes)


def eager(model: nn.Module, batch: Batch) -> Results:
    """(loss, gradients by name) of the model itself, from the seed of `run_schedule`."""

    def loss() -> torch.Tensor:
        outputs = model(**batch)
        return outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]

    return measured(loss, model, 0)[0]


def measured(loss: Callable[[], torch.Tensor], model: nn.Module, base: int) -> tuple[Results, int]:
    """((loss, gradients by name), highest bytes of the allocator plus `base`) of one step."""
    model.zero_grad(set_to_none=True)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(3)
    with torch_compat_memory.memory_profile() as profile:
        value = loss()
        value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return (value.detach(), gradients), base + torch_compat_memory.peak_of_memory_events(profile)


def differing(found: Results, wanted: Results) -> list[str]:
    """What is not the same, bit by bit: "loss", or parameters' names."""
    names = [
        name for name in wanted[1].keys() | found[1].keys() if name not in found[1] or name not in wanted[1]
    ]
    names += [
        name for name, grad in wanted[1].items() if name in found[1] and not torch.equal(found[1][name], grad)
    ]
    return sorted(names) + ["loss"] * (not torch.equal(found[0], wanted[0]))


def twin(model: nn.Module) -> nn.Module:
    """A copy with its own parameters, for the eager run beside."""
    return copy.deepcopy(model)
