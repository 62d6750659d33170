"""What the controller does not take, and that it says what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparse_helpers import LINEARS, Tiny, tiny
from torch import nn

import effcompile


def refused(
    model: nn.Module, says: str, optimizer: torch.optim.Optimizer | None = None, **request: Any
) -> None:
    trainer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    before = dict(model.named_parameters())
    with pytest.raises(effcompile.UsageError, match=says):
        effcompile.DynamicSparsity(model, trainer, **{"block": 4, **request})
    assert dict(model.named_parameters()).keys() == before.keys()  # nothing was changed on the way
    assert all(
        not p.eq(0).all() for name, p in model.named_parameters() if name.removesuffix(".weight") in LINEARS
    )


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"sparsity": 1.0}, r"sparsity = 1\.0 must be at least 0 and below 1"),
        ({"sparsity": -0.1}, r"sparsity = -0\.1"),
        ({"sparsity": float("nan")}, "sparsity = nan"),
        ({"block": 0}, "block = 0"),
        ({"block": 4.0}, r"block = 4\.0"),
        ({"block": 6}, r"Blocks of 6 × 6 do not divide .*16 × 16.* Nearest that do: 4 or 8"),
        ({"block": 32}, r"Nearest that do: 16\. Or leave"),
        ({"prune_ratio": 0.0}, "updates=0"),
        ({"updates": -1}, "updates = -1"),
        ({"updates": 10, "steps": 10}, "no training between 10 updates"),
        ({"growth": "fast"}, "one of 'random', 'gradient'"),
        ({"distribution": "local"}, "'uniform', 'global'"),
        ({"layers": "blocks.*"}, r"layers=\['blocks"),
        ({"layers": []}, "names no layer"),
        ({"layers": ["blocks.*.upp"]}, r"No linear layer is named 'blocks.*.upp'"),
        ({"initial": "dense", "execution": "blocks"}, "execution='masked'"),
        ({"initial": "snip"}, "initial = 'snip'"),
        ({"initial": {"blocks.0.up": torch.ones(8, 4)}}, "mask for every sparse layer"),
        ({"layers": ["head"], "initial": {"head": torch.ones(8, 4)}}, "another model"),
    ],
    ids=str,
)
def test_requests(request_: dict[str, Any], says: str) -> None:
    refused(tiny(), says, **request_)


def test_blocks_of_a_size_without_kernels() -> None:
    refused(tiny(), "blocks are 1, 4, 8", block=2, execution="blocks")


def test_a_linear_of_another_kind_is_no_block_sparse_layer() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = tiny()
    model.blocks[1].down = Scaled(32, 16)
    refused(model, r"'blocks\.1\.down' cannot be held as blocks: it is a Scaled", execution="blocks")


def test_tied_weights() -> None:
    model = tiny()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    refused(model, r"'blocks\.0\.up' is tied to blocks\.1\.up\.weight")


def test_frozen_weights() -> None:
    model = tiny()
    model.blocks[0].up.weight.requires_grad_(False)
    refused(model, r"'blocks\.0\.up' is frozen.*requires_grad_\(True\)")


def test_quantised_weights() -> None:
    model = tiny()
    weight = nn.Parameter(torch.ones(32, 16, dtype=torch.int8), requires_grad=False)
    model.blocks[0].up.weight = weight
    refused(model, r"'blocks\.0\.up' is quantised")


def test_lazy_weights() -> None:
    model = tiny()
    model.blocks[0].up = nn.LazyLinear(32)
    with pytest.raises(effcompile.UsageError, match="Run one batch"):
        effcompile.DynamicSparsity(model, torch.optim.AdamW(model.head.parameters()), block=4)


def test_a_weight_that_the_optimizer_does_not_train() -> None:
    model = tiny()
    refused(
        model,
        "does not train the weight of 'blocks.0.mix'",
        optimizer=torch.optim.AdamW(model.head.parameters()),
    )


def test_an_optimizer_with_one_history_for_all() -> None:
    model = tiny()
    refused(
        model, "LBFGS cannot train under a moving pattern", optimizer=torch.optim.LBFGS(model.parameters())
    )


def test_a_model_without_repeated_blocks_asks_for_names() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    model = Plain()
    refused(model, "layers=.* of up, down")
    sparsity = effcompile.DynamicSparsity(
        model, torch.optim.AdamW(model.parameters()), layers=["up"], block=4
    )
    assert list(sparsity.masks()) == ["up"]


def test_growth_by_gradient_without_a_backward() -> None:
    model = tiny()
    sparsity = effcompile.DynamicSparsity(
        model, torch.optim.AdamW(model.parameters()), block=4, updates=1, steps=2, growth="gradient"
    )
    with pytest.raises(effcompile.UsageError, match="no backward before this update"):
        sparsity.step()


def test_growth_by_gradient_at_the_very_first_step() -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    sparsity = effcompile.DynamicSparsity(model, optimizer, block=4, updates=6, steps=12, growth="gradient")
    model(torch.randint(0, 16, (2, 5))).sum().backward()
    optimizer.step()
    sparsity.step()
    assert sparsity.state_dict()["updates_done"] == 1


def test_given_masks_are_used_as_they_are() -> None:
    model = Tiny()
    mask = torch.zeros(32, 16)
    mask[0, 0] = mask[31, 15] = 1
    sparsity = effcompile.DynamicSparsity(
        model,
        torch.optim.AdamW(model.parameters()),
        layers=["blocks.0.up"],
        block=4,
        initial={"blocks.0.up": mask},
    )
    assert sparsity.masks()["blocks.0.up"].nonzero().tolist() == [[0, 0], [7, 3]]
    assert sparsity.figures().layers[0].empty_rows == 6
