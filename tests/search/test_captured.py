"""What is not the model is not planned for, and what to do is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import effcompile
from effcompile.core.errors import CaptureError
from effcompile.core.goal import Goal
from effcompile.ops import grouped
from effcompile.search import captured
from effcompile.search.request import Request, Task


class MaskedWhereTraced(nn.Module):
    """Causal only where its input has no values, as Aimv2 is with a mask that keeps all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        causal = type(x) is not torch.Tensor
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=causal)


def test_a_model_that_is_another_one_while_it_is_traced() -> None:
    with pytest.raises(CaptureError, match=r"differs from the model on example.*set_attn_implementation"):
        effcompile.optimize(MaskedWhereTraced().eval(), (torch.randn(1, 2, 8, 4),))


def multiplies_in_groups(backend: str | None, most: int = 1 << 24) -> bool:
    """Whether the graph of a mixture of 4 experts has its tokens in groups; copied for each token of 8 and
    each of its 2 experts, a matrix of 32 by 16 in fp32 is 32 KiB.
    """
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes["num_key_value_heads"] = 2
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts)).eval()
    ids = {"input_ids": torch.randint(1, 64, (1, 8))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "_LITTLE", most)
        request = Request(goal=Goal(), backend=backend)
        program = captured.in_normal_form(Task(model=model, args=(), kwargs=ids, request=request))
    return any(grouped.multiplies_runs(node.target) for node in program.calls())


@pytest.mark.parametrize(
    ("backend", "most", "in_groups"),
    [
        ("torch-eager", 1 << 24, True),  # it copied 32 KiB, and of others as much as 1 GiB
        ("torch-inductor", 1 << 24, True),
        (None, 1 << 24, False),  # ONNX Runtime is among them
        (None, (1 << 15) - 1, True),
        ("onnxruntime", 1 << 10, False),
    ],
)
def test_no_experts_are_copied_for_backends_that_take_tokens_in_groups(
    backend: str | None, most: int, in_groups: bool
) -> None:
    if backend != "torch-eager":
        pytest.importorskip("onnxruntime")
    assert multiplies_in_groups(backend, most) is in_groups
