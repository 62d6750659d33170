"""Linears that no input reaches: the same bits with each of them computed once, others never."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pass_helpers import LOOSE, context, plan_with, split
from torch import Tensor, nn
from transformers import DebertaV2Config, DebertaV2Model

import effcompile
from effcompile.backends.torch import TorchEager
from effcompile.capture.inference import capture
from effcompile.passes import load_passes, propose_all
from effcompile.passes.precompute import PRECOMPUTED, Precompute
from effcompile.passes.same_each_call import constant_linears
from effcompile.search.bound import groups
from effcompile.sites.parts import linears


def deberta(*, shared: bool) -> DebertaV2Model:
    """`shared`: positions are projected by the weights of queries and keys, as in its third version."""
    config = DebertaV2Config(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=96, vocab_size=200,
        relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], share_att_key=shared,
        norm_rel_ebd="layer_norm", max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return DebertaV2Model(config).eval()


def ids(*shape: int) -> dict[str, Tensor]:
    drawn = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": drawn, "attention_mask": torch.ones_like(drawn)}


class Coordinates(nn.Module):
    """An MLP of coordinates makes biases, as Swin v2's does: its second linear alone reads the first's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 32), nn.Linear(32, 16, bias=False)
        self.table: Tensor
        self.register_buffer("table", torch.randn(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (16 * torch.sigmoid(self.second(torch.relu(self.first(self.table.sign())))))


class Drawn(nn.Module):
    """Linears of random numbers, of what an input reaches, of a table that is written to before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(8, 8)
        self.table: Tensor
        self.register_buffer("table", torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        given = {
            "drawn": lambda: torch.rand(4, 8),
            "reached": lambda: self.table * x.sum(),
            "sized": lambda: self.table[:1].expand(x.shape[0], 8),
            "held": lambda: self.table.tanh(),
        }[self.kind]()
        return x @ self.linear(given).T


@pytest.mark.parametrize(("kind", "count"), [("drawn", 0), ("reached", 0), ("sized", 0), ("held", 1)])
def test_only_what_is_the_same_in_each_call_is_found(kind: str, count: int) -> None:
    program = capture(Drawn(kind).eval(), (torch.randn(3, 8),), {})
    assert len(constant_linears(program)) == count


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_computed_once_is_the_same_to_the_bit(shared: bool) -> None:
    model = deberta(shared=shared)
    program = capture(model, (), ids(2, 12))
    found = [site.site for site in constant_linears(program)]
    assert len(found) == 4, found
    edited = Precompute().apply(program, plan_with(dict.fromkeys(found, PRECOMPUTED)))
    assert not constant_linears(edited)
    assert len(linears(edited)) == len(linears(program)) - 4
    bounded = [sum(len(group) * count for group, count in groups(each).items()) for each in (program, edited)]
    assert bounded[0] == bounded[1] == len(linears(edited)), "the bound never counted them"
    one, some = (TorchEager().lower(each, None, []) for each in (program, edited))  # type: ignore[arg-type]
    for asked in (ids(2, 12), ids(1, 5), ids(3, 20)):
        flat = program.flat_inputs((), asked)
        assert torch.equal(one(*flat)[0], some(*flat)[0])


def test_what_the_option_says_of_bytes_is_so() -> None:
    for shared in (True, False):
        program = capture(deberta(shared=shared), (), ids(2, 12))
        given = context(goal=LOOSE, backend="torch-eager")
        offered, _ = split(propose_all(load_passes(["quantize", "precompute"]), program, given)[0])
        found = [site.site for site in constant_linears(program)]
        edited = Precompute().apply(program, plan_with(dict.fromkeys(found, PRECOMPUTED)))
        foretold = sum(
            offered[site].option(PRECOMPUTED).cost.weight_bytes
            - offered[site].option("fp32").cost.weight_bytes
            for site in found
        )
        lowered = [TorchEager().lower(each, None, []) for each in (program, edited)]  # type: ignore[arg-type]
        more = lowered[1].weight_bytes - lowered[0].weight_bytes
        # what they alone read, a table and its norm and biases, goes with them and is not counted on
        table = 16 * 64 * 4
        assert foretold - 4 * 64 * 4 - table - 2 * 64 * 4 <= more <= foretold, (shared, more, foretold)


def test_one_that_is_read_by_such_linears_alone_is_computed_with_them() -> None:
    program = capture(Coordinates().eval(), (torch.randn(3, 16),), {})
    first, second = (site.site for site in constant_linears(program))
    choices, _ = split(Precompute().propose(program, context()))
    assert choices[first].option(PRECOMPUTED).requires == {second: (PRECOMPUTED,)}
    assert choices[first].option(PRECOMPUTED).cost.weight_bytes == 0
    once = Precompute().apply(program, plan_with({second: PRECOMPUTED, first: PRECOMPUTED}))
    assert not constant_linears(once)
    flat = program.flat_inputs()
    assert torch.equal(program.module(*flat)[0], once.module(*flat)[0])
    alone = Precompute().apply(program, plan_with({second: PRECOMPUTED}))
    assert not constant_linears(alone)


@pytest.mark.parametrize("backend", ["torch-eager", "onnxruntime"])
def test_a_whole_plan_takes_it_where_bytes_allow(backend: str, tmp_path: Path) -> None:
    model, asked = deberta(shared=False), ids(2, 12)
    found = effcompile.optimize(model, asked, backend=backend)
    taken = {d.site: d.applied for d in found.plan.decisions if (d.kind, d.option) == ("linear", PRECOMPUTED)}
    assert set(taken.values()) == {PRECOMPUTED} and len(taken) == 4
    found.save(tmp_path)
    opened = effcompile.load(tmp_path)
    for other in (asked, ids(3, 7)):
        with torch.no_grad():
            assert torch.allclose(found(**other)[0], model(**other)[0], atol=1e-5)
            assert torch.equal(found(**other)[0], opened(**other)[0])
    with torch.no_grad():
        model.encoder.rel_embeddings.weight[0] += 1
    with pytest.raises(effcompile.GuardError):
        found(**asked)
