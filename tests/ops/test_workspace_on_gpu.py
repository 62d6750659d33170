"""What our operators are taken to allocate on a GPU that is not here: what their tiled kernels do, not what a
processor's do.
"""

from __future__ import annotations

import pytest
import torch
from fx_calls import call_of
from torch import fx

from effcompile.machine.machines import load_target
from effcompile.ops import attention, loss_head  # noqa: F401  the operators
from effcompile.ops.workspace_on_gpu import calls_products
from effcompile.search.training.operator_costs import OperatorCosts

MIB = 1 << 20


def on_h100(found: fx.Node) -> int:
    return OperatorCosts(target=load_target("h100-sxm"), here=False).workspace(found, 0)


def test_a_loss_head_holds_one_chunk_of_logits() -> None:
    """16384 x 128256 in 8 chunks: 501 MiB of logits in bf16, where a processor's kernels take three times
    that.
    """
    x, weight = (torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (16384, 128256))
    target = torch.empty(16384, dtype=torch.long, device="meta")
    form = (1, -100, 1.0, 1.0, False, 8)
    call = call_of(
        torch.ops.effcompile.loss_head_gradients.default, x, weight, None, target, *form, [True, True, False]
    )
    assert on_h100(call) == pytest.approx(2048 * 128256 * 2, rel=0.01)
    loss = torch.empty((), device="meta")
    lse = torch.empty(16384, 1, device="meta")
    again = call_of(
        torch.ops.effcompile.loss_head_backward.default,
        loss,
        x,
        weight,
        None,
        target,
        lse,
        *form,
        [True, True, False],
    )
    assert on_h100(again) == pytest.approx(2048 * 128256 * 2, rel=0.01)
    first = call_of(torch.ops.effcompile.loss_head_forward.default, x, weight, None, target, *form)
    assert on_h100(first) < 2 * MIB
    assert all(map(calls_products, (call, again, first)))


def test_attention_holds_a_number_per_row_in_its_backward() -> None:
    q, k = (torch.empty(8, heads, 2048, 64, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    lse = torch.empty(8, 32, 2048, device="meta")
    forward = call_of(torch.ops.effcompile.attention.default, q, k, k, scale=0.125, hi=0)
    backward = call_of(torch.ops.effcompile.attention_backward.default, q, q, k, k, q, lse, scale=0.125, hi=0)
    assert on_h100(forward) == 0
    assert on_h100(backward) == 8 * 32 * 2048 * 4
    assert not calls_products(forward)
