"""Tiny models, their training in one process, and the same step on forked gloo ranks: the oracle shares no
code with the lowering.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutput

from effcompile.backends.torch.ranks import Ranks, spread_parameters
from effcompile.backends.torch.training import StepRunner
from effcompile.capture.source import Source
from effcompile.core import torch_compat_memory
from effcompile.estimate.storages import graph_storages
from effcompile.ir.step import Step
from effcompile.ops.workspace import workspace_bytes
from effcompile.proof.training.alive import alive_bytes
from effcompile.schedules.blocks import Blocks
from effcompile.schedules.emit import Emitted, emit
from effcompile.schedules.into_blocks import cut_into_blocks
from effcompile.schedules.simulate import simulate

VOCABULARY, WIDTH = 67, 32  # 67 rows divide by no number of ranks
STEPS = 3
Inputs = Mapping[str, Tensor]

_COMMON = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DECODER = {
    **_COMMON,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "use_cache": False,
    "max_position_embeddings": 32,
}


def _gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=WIDTH,
            n_layer=2,
            n_head=4,
            n_positions=32,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def _t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
        patch_size=4, num_labels=5, **_NO_DROPOUT,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


class Layer(nn.Module):
    """A block of the model below."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Tied(nn.Module):
    """Layers between a table and the head that it is tied to: captured in a fraction of the time of a
    transformer.
    """

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(
            loss=nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())
        )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER)),
    "gpt2": _gpt2,
    "bert": lambda: hf.BertForMaskedLM(
        hf.BertConfig(**_COMMON, **_NO_DROPOUT, intermediate_size=48, max_position_embeddings=32)
    ),
    "t5": _t5,
    "vit": _vit,
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_DECODER, head_dim=8)),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**_DECODER, num_local_experts=2, num_experts_per_tok=2)
    ),
}


def model_of(name: str) -> nn.Module:
    """A fresh model, the same at every call."""
    torch.manual_seed(0)
    return MODELS[name]().train()


def batch_of(name: str, examples: int) -> Inputs:
    """Its inputs, labels among them."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {
            "pixel_values": torch.randn(examples, 3, 16, 16, generator=generator),
            "labels": torch.arange(examples) % 5,
        }
    ids = torch.randint(1, VOCABULARY, (examples, 12), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def part(inputs: Inputs, rank: int, ranks: int) -> dict[str, Tensor]:
    """One rank's part of a batch."""
    return {name: value.chunk(ranks)[rank].clone() for name, value in inputs.items()}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What training in one process is: per step the loss and all gradients, and the parameters after it."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: list[dict[str, Tensor]]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum: unlike Adam's, its update does not blow rounding up."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def trained(model: nn.Module, inputs: Inputs) -> Trained:
    """STEPS eager steps of a copy of the model on the whole batch."""
    model = copy.deepcopy(model)
    optimizer = optimizer_of(model)
    losses, gradients, parameters = [], [], []
    for _ in range(STEPS):
        loss = model(**inputs).loss
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        parameters.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return Trained(losses=losses, gradients=gradients, parameters=parameters)


def blocks_of(step: Step) -> Blocks:
    """The step in blocks, with the workspace of our own operators."""
    held = graph_storages(step.graph, lambda node: node.meta["val"])
    ours = {
        n: workspace_bytes(n.target, _values(n.args), n.kwargs) or 0
        for n in held.workspace
        if n.op == "call_function"
    }
    held = replace(held, workspace={n: max(size, ours.get(n, 0)) for n, size in held.workspace.items()})
    return cut_into_blocks(step, held, lambda node: 1.0)


def _values(args: Any) -> Any:
    return torch.fx.map_arg(args, lambda node: node.meta["val"])


@functools.cache
def source_of(name: str) -> tuple[Source, Step]:
    """A model with two examples and their step, captured once for all tests: of the batch that is one rank's
    part for two of them.
    """
    source = Source(model=model_of(name), args=(), kwargs=part(batch_of(name, 4), 0, 2))
    return source, source.capture()


def schedules(step: Step) -> Iterator[tuple[str, Blocks, Emitted]]:
    """With all kept that the backward reads, and with all made again that can be: gathers too."""
    cut = blocks_of(step)
    yield "all kept", cut, emit(cut, cut.decidable)
    entering = frozenset(s for block in cut.blocks for s in block.entering)
    yield "only what enters a block kept", cut, emit(cut, entering)


@dataclass(frozen=True, kw_only=True)
class OnRank:
    """What a rank found: per step its loss, the largest error of a gradient and of a parameter, with its
    name; the peak, simulated too.
    """

    losses: list[float]
    gradients: list[tuple[float, str]]
    parameters: list[tuple[float, str]]
    peaks: list[int]
    predicted: int
    replicas_equal: bool


def run_rank(
    rank: int, model: nn.Module, inputs: Inputs, cut: Blocks, emitted: Emitted, wanted: Trained, ranks: int
) -> OnRank:
    """STEPS steps of an emitted schedule on this rank, compared with one process."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    spread = cut.step.spread
    assert spread is not None
    mine = part(inputs, rank, ranks)
    on = Ranks(mesh=mesh, spread=spread)
    runner = StepRunner(model, cut.step, emitted, ranks=on)
    runner.guarded = False
    spread_parameters(model, on)
    optimizer = optimizer_of(model)
    base = alive_bytes("cpu", model, mine, list(cut.step.constants.values()))
    losses, gradients, parameters, peaks = [], [], [], []
    for step in range(STEPS):
        with torch_compat_memory.watched_memory("cpu") as peak:
            loss = runner.loss((), mine)
            loss.backward()
        peaks.append(base + peak())
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / ranks)
        gradients.append(
            worst_error(
                {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, wanted.gradients[step]
            )
        )
        optimizer.step()
        optimizer.zero_grad()
        parameters.append(worst_error(dict(model.named_parameters()), wanted.parameters[step]))
        del loss
    equal = all(
        _equal_everywhere(p.detach(), ranks) for p in model.parameters() if not isinstance(p, DTensor)
    )
    return OnRank(
        losses=losses, gradients=gradients, parameters=parameters, peaks=peaks,
        predicted=simulate(cut, emitted).peak_bytes, replicas_equal=equal,
    )  # fmt: skip


def _equal_everywhere(tensor: Tensor, ranks: int) -> bool:
    found = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(found, tensor.contiguous())
    return all(torch.equal(tensor, other) for other in found)


def worst_error(found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest error relative to the tensor's norm, or to a thousandth of the usual norm where the tensor
    is nothing but rounding.
    """
    assert found.keys() == wanted.keys()
    whole = {
        n: v.detach().full_tensor() if isinstance(v, DTensor) else v.detach()
        for n, v in found.items()
        if v is not None
    }
    usual = (
        sum(float(v.square().sum()) for v in wanted.values()) / sum(v.numel() for v in wanted.values())
    ) ** 0.5
    errors = [
        (float((whole[n] - v).norm()) / max(float(v.norm()), 1e-3 * usual * v.numel() ** 0.5), n)
        for n, v in wanted.items()
    ]
    return max(errors)
