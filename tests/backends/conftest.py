"""A two-layer transformer as a Program, made without the capture layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from effcompile.ir.program import Program, TensorSpec

WIDTH, ROWS, VOCABULARY = 64, 16, 97


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, 2, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        x = self.norm(x + self.out(heads.transpose(1, 2).reshape(b, s, WIDTH)))
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(ids)))


def ids_of(batch: int, rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, rows), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="package")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="package")
def program(model: nn.Module) -> Program:
    ids = ids_of(2, ROWS)
    axes = ({0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("seq", min=2, max=512)},)
    with torch.no_grad():
        exported = torch.export.export(model, (ids,), dynamic_shapes=axes, strict=False).run_decompositions(
            {}
        )
    module = exported.module()
    for node in [n for n in module.graph.nodes if n.op == "call_module"]:
        module.graph.erase_node(node)
    module.recompile()
    return Program(
        name="Tiny",
        module=module,
        args=(ids,),
        kwargs={},
        inputs=(TensorSpec(name="ids", dtype="int64", shape=("batch", "seq")),),
        outputs=(TensorSpec(name="out", dtype="float32", shape=("batch", "seq", WIDTH)),),
        dynamic_shapes=axes,
    )
