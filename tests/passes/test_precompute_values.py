"""Values that are no linears' and that no input reaches: the same bits with each of them computed once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pass_helpers import context, plan_with, split
from torch import Tensor, nn
from transformers import (
    BeitConfig,
    BeitModel,
    BloomConfig,
    BloomModel,
    PreTrainedModel,
    SwinConfig,
    SwinModel,
    Swinv2Config,
    Swinv2Model,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

import effcompile
from effcompile.backends.torch import TorchEager
from effcompile.capture.inference import capture
from effcompile.passes.attention import Attention
from effcompile.passes.base import Choice
from effcompile.passes.precompute import COMPUTED, KIND, ONCE, PRECOMPUTED, Precompute
from effcompile.passes.same_each_call import held, same_each_call
from effcompile.sites.parts import weight_of

SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
BEIT = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2}
HEARD = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}


def images(*shape: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(*shape, 3, 32, 32, generator=torch.Generator().manual_seed(1))}


def waves(rows: int, length: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(rows, length, generator=torch.Generator().manual_seed(1))}


def words(*shape: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 90, shape, generator=torch.Generator().manual_seed(1))}


Case = tuple[Callable[[], PreTrainedModel], dict[str, Tensor], dict[str, Tensor]]
MODELS: dict[str, Case] = {
    "swin": (lambda: SwinModel(SwinConfig(window_size=4, **SWIN)), images(2), images(3)),
    "swin v2": (lambda: Swinv2Model(Swinv2Config(window_size=4, **SWIN)), images(2), images(3)),
    "beit": (
        lambda: BeitModel(
            BeitConfig(num_attention_heads=2, intermediate_size=48, use_relative_position_bias=True, **BEIT)
        ),
        images(2),
        images(1),
    ),
    "wav2vec2": (
        lambda: Wav2Vec2Model(
            Wav2Vec2Config(
                conv_dim=[16] * 7, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, **HEARD
            )
        ),
        waves(2, 1600),
        waves(1, 2400),
    ),
    "bloom": (
        lambda: BloomModel(BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=90)),
        words(2, 12),
        words(3, 20),
    ),
}


def made(name: str) -> tuple[PreTrainedModel, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, asked, other = MODELS[name]
    return model().eval(), asked, other


@pytest.mark.parametrize("name", list(MODELS))
def test_what_is_held_is_the_same_to_the_bit_at_all_sizes(name: str) -> None:
    model, asked, other = made(name)
    program = capture(model, (), asked)
    found = held(program)
    assert found
    sites = [each.site for each in found] + [each.by.site for each in found if each.by is not None]
    edited = Precompute().apply(program, plan_with(dict.fromkeys(sites, PRECOMPUTED)))
    assert not held(edited), "nothing but views is left"
    assert len(same_each_call(edited)) < len(same_each_call(program)) / 2
    one, some = (TorchEager().lower(each, None, []) for each in (program, edited))  # type: ignore[arg-type]
    gone = {site.site: site for each in found for site in (*each.behind, each.by) if site is not None}
    linear = sum(weight_of(program, site).nbytes for site in gone.values())
    told = sum(each.nbytes - each.frees for each in found) - linear
    assert some.weight_bytes - one.weight_bytes == told
    for given in (asked, other):
        flat = program.flat_inputs((), given)
        for first, second in zip(one(*flat), some(*flat), strict=True):
            assert torch.equal(first, second)


LOADED = """
import sys, torch, effcompile
opened, given = effcompile.load(sys.argv[1]), torch.load(sys.argv[2])
torch.save([opened(**each)[0] for each in given], sys.argv[3])
"""


def test_a_saved_one_gives_the_same_bits_in_another_process(tmp_path: Path) -> None:
    model, asked, other = made("swin")
    plain = effcompile.optimize(model, asked, backend="torch-eager", passes=["no-precompute"])
    found = effcompile.optimize(model, asked, backend="torch-eager")
    told = {d.applied for d in found.plan.decisions if d.kind == KIND}
    assert told == {PRECOMPUTED}
    assert found.plan.measured is not None
    assert found.plan.predicted.weight_bytes == found.plan.measured.weight_bytes
    found.save(tmp_path / "saved")
    torch.save([asked, other], tmp_path / "given.pt")
    paths = [str(tmp_path / each) for each in ("saved", "given.pt", "out.pt")]
    subprocess.run([sys.executable, "-c", LOADED, *paths], check=True, capture_output=True)
    for given, opened in zip((asked, other), torch.load(paths[2]), strict=True):
        assert torch.equal(opened, found(**given)[0])
        assert torch.equal(opened, plain(**given)[0])


class Made(nn.Module):
    """Scores with a bias that is made in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table: Tensor
        self.register_buffer("table", torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        kind, table = self.kind, self.table
        if kind == "drawn":
            return x + torch.rand(4, 8)
        if kind == "reached":
            return x + (table * x.sum()).tanh()
        if kind == "sized":
            return x + torch.arange(x.shape[0]).cos()[:, None, None]
        if kind == "a view":
            return x + table.t().reshape(4, 8)[:, :1].expand(4, 8)
        if kind == "expanded":
            return x * table[:1].tanh().expand(4, 8) + table[:1].tanh().expand(64, 4, 8).select(0, 1)
        if kind == "one of two":
            return x + table.max(dim=0).values
        return x + table.tanh().exp()


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("drawn", []),
        ("reached", []),
        ("sized", []),
        ("a view", [128]),
        ("expanded", [32]),
        ("one of two", [32]),
        ("held", [128]),
    ],
)
def test_only_what_is_the_same_in_each_call_is_held_and_no_larger_than_it_is_made(
    kind: str, sizes: list[int]
) -> None:
    program = capture(Made(kind).eval(), (torch.randn(3, 4, 8),), {})
    found = held(program)
    assert [each.nbytes for each in found] == sizes
    edited = Precompute().apply(
        program, plan_with(dict.fromkeys([each.site for each in found] or ["nowhere"], PRECOMPUTED))
    )
    flat = program.flat_inputs()
    if kind != "drawn":
        assert torch.equal(program.module(*flat)[0], edited.module(*flat)[0])
    assert not held(edited)


class Coordinates(nn.Module):
    """An MLP of coordinates makes biases: its first linear reads a buffer itself, as Swin v2's does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 32), nn.Linear(32, 4, bias=False)
        self.table: Tensor
        self.register_buffer("table", torch.randn(16, 2))
        self.places: Tensor
        self.register_buffer("places", torch.arange(16).repeat(4))

    def forward(self, x: Tensor) -> Tensor:
        made = self.second(torch.relu(self.first(self.table)))
        return x @ (16 * torch.sigmoid(made[self.places]))


def test_a_linear_of_a_buffer_is_computed_with_what_is_made_of_it() -> None:
    program = capture(Coordinates().eval(), (torch.randn(3, 64),), {})
    [value] = held(program)
    assert [site.site for site in value.behind] == ["second"] and value.by is None
    choices, _ = split(Precompute().propose(program, context()))
    assert choices["second"].option(PRECOMPUTED).requires == {value.site: (PRECOMPUTED,)}
    assert choices["second"].option(PRECOMPUTED).cost.weight_bytes == 0
    given, once = (choices[value.site].option(name).cost for name in (COMPUTED, PRECOMPUTED))
    assert once.seconds == 0 < given.seconds
    assert once.weight_bytes == 64 * 4 * 4
    assert given.weight_bytes == 4 * (2 * 32 + 32 + 16 * 2) + 8 * 64, "its first linear, table and places"
    edited = Precompute().apply(program, plan_with({value.site: PRECOMPUTED, "second": PRECOMPUTED}))
    assert not list(edited.calls(torch.ops.aten.linear.default))
    flat = program.flat_inputs()
    assert torch.equal(program.module(*flat)[0], edited.module(*flat)[0])


def test_nothing_is_held_where_memory_is_asked_for_or_does_not_allow_it() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(64, 64)
            self.row = nn.Parameter(torch.randn(64))

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x) @ torch.outer(self.row, self.row.repeat(64))

    model, x = Wide().eval(), torch.randn(2, 64)

    def option(**goal: object) -> set[str]:
        made = effcompile.plan(model, (x,), backend="torch-eager", **goal)
        return {d.option for d in made.decisions if d.kind == KIND}

    peak = effcompile.plan(model, (x,), backend="torch-eager").peak_bytes
    assert option() == {PRECOMPUTED}
    assert option(minimize="memory") == {COMPUTED}
    assert option(memory=peak - 4096) == {COMPUTED}


class Returned(nn.Module):
    """Returns what it makes of a weight beside what it makes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.row.exp()
        return x * made.tanh(), made[None]


def test_what_is_returned_is_the_callers() -> None:
    model, x = Returned().eval(), torch.randn(2, 64)
    [value] = held(capture(model, (x,), {}))
    assert len(value.computed) == 1 and value.frees == 0, "what is returned is made in each call"
    found = effcompile.optimize(model, (x,), backend="torch-eager")
    wanted = [each.clone() for each in found(x)]
    found(x)[1].zero_()
    for one, other in zip(found(x), wanted, strict=True):
        assert torch.equal(one, other)


class Split(nn.Module):
    """A linear of a table in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.table: Tensor
        self.register_buffer("table", torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.line(self.table.tanh()).chunk(2, dim=-1)
        return x @ one.T + (x * 2) @ other.T


def test_a_linear_whose_parts_are_read_is_held_whole() -> None:
    program = capture(Split().eval(), (torch.randn(3, 4),), {})
    [value] = held(program)
    assert value.by is not None and value.by.site == "line"
    edited = Precompute().apply(program, plan_with({"line": PRECOMPUTED, value.site: PRECOMPUTED}))
    assert not held(edited)
    flat = program.flat_inputs()
    assert torch.equal(program.module(*flat)[0], edited.module(*flat)[0])


class Causal(nn.Module):
    """Makes its causal mask of numbers in each call, of a length that is fixed."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(64)
        hidden = torch.zeros(64, 64).masked_fill(places[None] > places[:, None], float("-inf"))
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=hidden[None, None])


def test_a_mask_that_is_the_same_in_each_call_is_still_known_in_closed_form() -> None:
    program = capture(Causal().eval(), (torch.randn(1, 2, 64, 16),), {})
    [value] = held(program)
    [found] = [
        c for c in Attention().propose(program, context(backend="torch-eager")) if isinstance(c, Choice)
    ]
    [form] = [o.form for o in found.options if o.form.word == "causal"]
    plan = plan_with({found.site: form, value.site: ONCE})
    x = torch.randn(1, 2, 64, 16)
    lowered = TorchEager().lower(Precompute().apply(program, plan).tagged(plan.forms(), "test"), None, [[x]])
    assert torch.allclose(lowered(x)[0], Causal()(x), atol=1e-6)


def test_the_dense_form_of_such_a_mask_reads_what_is_held() -> None:
    program = capture(Causal().eval(), (torch.randn(1, 2, 64, 16),), {})
    [value] = held(program)
    edited = Precompute().apply(program, plan_with({value.site: PRECOMPUTED}))
    assert {node.target for node in edited.calls()} <= {
        torch.ops.aten.scaled_dot_product_attention.default,
        torch.ops.aten.unsqueeze.default,
    }


@pytest.mark.parametrize("changed", ["table", "places"])
def test_a_changed_weight_is_never_answered_with_what_was_held(changed: str) -> None:
    """As of any other weight: refused, run by the model, or planned again, as the user said."""

    def change(model: nn.Module) -> Tensor:
        with torch.no_grad():
            getattr(model, changed)[3] += 1
            return model(x)

    x = torch.randn(3, 64)
    for on_change in ("error", "eager", "replan"):
        model = Coordinates().eval()
        model.places %= 8
        found = effcompile.optimize(model, (x,), backend="torch-eager", on_change=on_change)
        assert PRECOMPUTED in {d.applied for d in found.plan.decisions if d.kind == KIND}
        before, wanted = found(x), change(model)
        assert not torch.allclose(before, wanted)
        if on_change == "error":
            with pytest.raises(effcompile.GuardError, match=changed):
                found(x)
        else:
            assert torch.allclose(found(x), wanted, atol=1e-5)
