"""Training steps of tiny models, captured with torch alone, and run node by node against eager."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

from effcompile.ir.roles import Entering, Enters, Leaves, Leaving, Roles
from effcompile.ir.step import Step

VOCABULARY = 197


class _Loss(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.loss(self.model, batch)


def hf_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def joint_step(model: nn.Module, batch: dict[str, torch.Tensor], loss: Callable[..., Any] = hf_loss) -> Step:
    """A Step without input checks: torch.export, then AOTAutograd's joint graph, as it is.

    `loss` may return (loss, *shown).
    """
    front = torch.export.export(_Loss(model, loss), (), batch).module()
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, front, (), batch)
    joint.graph_module.graph.set_codegen(fx.graph.CodeGen())
    module = fx.GraphModule(joint.graph_module, joint.graph_module.graph)
    holders = list(module.graph.find_nodes(op="placeholder"))
    # tied weights under the first of their names
    first = {id(p): name for name, p in model.named_parameters()}
    names = [first[id(model.get_parameter(name.removeprefix("model.")))] for name in joint.params_spec]
    n, m = len(names), len(names) + len(joint.buffers_spec)
    inputs, tangents = holders[m : m + len(batch)], holders[m + len(batch) :]
    count = len(module.graph.output_node().args[0]) - m - len(batch)
    results = module.graph.output_node().args[0]
    module.graph.output_node().args = (tuple(results[: count + n]),)
    entering = {node: Enters(Entering.PARAMETER, name) for node, name in zip(holders[:n], names, strict=True)}
    buffers = zip(holders[n:m], joint.buffers_spec, strict=True)
    entering |= {node: Enters(Entering.BUFFER, name.removeprefix("model.")) for node, name in buffers}
    entering |= {node: Enters(Entering.INPUT, node.name) for node in inputs} | {
        tangents[0]: Enters(Entering.TANGENT)
    }
    leaving = [
        Leaves(Leaving.LOSS),
        *[Leaves(Leaving.OUTPUT)] * (count - 1),
        *(Leaves(Leaving.GRADIENT, name) for name in names),
    ]
    return Step(
        name=type(model).__name__, module=module, roles=Roles(entering, tuple(leaving)), kwargs=batch,
        leaves=lambda args, kwargs: list(kwargs.values()), rebuild=lambda loss, shown: loss,
    )  # fmt: skip


def run(
    step: Step, model: nn.Module, batch: Mapping[str, torch.Tensor], tangent: float = 1.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, gradients by name) of the step's graph, node by node."""
    state = {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
    state |= dict(model.named_buffers(remove_duplicate=False))
    given: dict[fx.Node, Any] = {
        node: state[name] for node, name in (*step.parameters.items(), *step.buffers.items())
    }
    given |= dict(step.constants) | dict(zip(step.inputs, step.leaves((), dict(batch)), strict=True))
    holders = list(step.graph.find_nodes(op="placeholder"))
    dtype = step.loss.meta["val"].dtype
    values = [given[node] if node in given else torch.tensor(tangent, dtype=dtype) for node in holders]
    with torch.no_grad():
        results = fx.Interpreter(step.module).run(*values)
    named = step.roles.results(Leaving.GRADIENT, results)
    return results[0], {name: grad for name, grad in named.items() if grad is not None}


def eager(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    tangent: float = 1.0,
    loss: Callable[..., Any] = hf_loss,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, gradients by name) of the model itself."""
    model.zero_grad(set_to_none=True)
    value = loss(model, batch)
    value = value[0] if isinstance(value, tuple) else value
    value.backward(torch.tensor(tangent, dtype=value.dtype))
    return value.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_equal(got: Any, expected: Any, tolerance: float) -> None:
    """Loss and every gradient within `tolerance`, relative to the gradient's norm.

    A gradient that is zero but for rounding (a key's bias) is held to a millionth of the largest gradient's
    norm.
    """
    assert abs(float(got[0]) - float(expected[0])) <= tolerance * abs(float(expected[0])) or bool(
        got[0].isnan() & expected[0].isnan()
    )
    assert set(got[1]) == set(expected[1])
    floor = 1e-6 * max((float(grad.double().norm()) for grad in expected[1].values()), default=0.0)
    for name, grad in expected[1].items():
        assert grad.shape == got[1][name].shape and grad.dtype == got[1][name].dtype
        assert distance(got[1][name], grad, floor) <= tolerance, (
            f"{name}: {distance(got[1][name], grad, floor)}"
        )


def distance(a: torch.Tensor, b: torch.Tensor, floor: float = 1e-30) -> float:
    """Norm of a − b, relative to b's norm or `floor`, the larger of both."""
    return float((a.double() - b.double()).norm()) / max(float(b.double().norm()), floor, 1e-30)


def labels(batch: int, length: int, ignored: float = 0.0) -> torch.Tensor:
    """Random labels, the given share of them −100, in one run."""
    given = torch.randint(0, VOCABULARY, (batch, length))
    given.view(-1)[: int(given.numel() * ignored)] = -100
    return given


def tiny(
    name: str, batch: int = 2, length: int = 67, ignored: float = 0.0
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """(model in training mode without dropout, inputs and labels): gpt2, llama, bert, t5, gemma2, albert."""
    import transformers as hf

    torch.manual_seed(0)
    small: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
    }
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 128}
    causal = {**small, "num_key_value_heads": 2, "use_cache": False}
    dropless = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    gpt2 = {"vocab_size": VOCABULARY, "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 128, **dropless}
    t5 = {
        "vocab_size": VOCABULARY,
        "num_layers": 1,
        "num_decoder_layers": 1,
        "d_model": 16,
        "d_kv": 8,
        "num_heads": 2,
        "d_ff": 24,
    }
    starts = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False}
    made: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**causal, tie_word_embeddings=False)),
        "gemma2": lambda: hf.Gemma2ForCausalLM(
            hf.Gemma2Config(**causal, head_dim=8, final_logit_softcapping=2.0)
        ),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**small, **still)),
        "albert": lambda: hf.AlbertForMaskedLM(
            hf.AlbertConfig(**{**small, "num_hidden_layers": 3}, **still, embedding_size=16)
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5, **starts)),
    }
    model = made[name]().train()
    model.loss_type = "ForMaskedLM" if name in ("bert", "albert") else "ForCausalLM"
    ids = torch.randint(1, VOCABULARY, (batch, length))
    ids[:, :3] = 0  # BERT's padding index
    return model, {"input_ids": ids, "labels": labels(batch, length, ignored)}
