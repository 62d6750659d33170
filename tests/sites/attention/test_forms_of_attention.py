"""Attention in one form: normalised, told its mask, written out again, and by FlexAttention; always equal to
the model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from generation_models import more
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import effcompile
from effcompile.capture import capture
from effcompile.capture.verify import relative_error
from effcompile.core.errors import LoweringError
from effcompile.ir.program import Program
from effcompile.ops.flex_attention import attention_flex
from effcompile.ops.visibility import Visibility
from effcompile.report.masks import mask_words
from effcompile.sites.attention import closed_masks as known
from effcompile.sites.attention import normalise, rewrite
from effcompile.sites.attention.closed_masks import (
    dense_mask,
    in_closed_form,
    is_causal,
    mask_of,
    set_causal,
    set_flex,
    visible_keys,
)
from effcompile.sites.attention.expand import expand, ours, without_ours
from effcompile.sites.attention.normalise import normalised
from effcompile.sites.parts import attentions

WIDTH, HEADS = 32, 4


class Attends(nn.Module):
    """Self-attention as separate operators.

    `window`: keys on the left that are seen, 0 for all. `cap`: softcap. `pads`: reads a mask.
    """

    def __init__(self, *, window: int = 0, causal: bool = True, cap: float = 0.0) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.window, self.causal, self.cap = window, causal, cap

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.project(x).split(WIDTH, -1))
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        if self.cap:
            scores = torch.tanh(scores / self.cap) * self.cap
        i, j = torch.arange(s)[:, None], torch.arange(s)
        seen = (j <= i) if self.causal else torch.ones(s, s, dtype=torch.bool)
        if self.window:
            seen = seen & (i - j < self.window)
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        scores = scores + torch.where(seen, 0.0, torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, WIDTH))


def captured(model: nn.Module, *, padded: bool = False, s: int = 24) -> tuple[Program, nn.Module]:
    """The program as captured, with dynamic batch and length."""
    torch.manual_seed(0)
    inputs = (torch.randn(2, s, WIDTH), *((torch.ones(2, s, dtype=torch.long),) if padded else ()))
    return capture(model.eval(), inputs, {}), model


def differs(program: Program, model: nn.Module, *, padded: bool = False) -> float:
    """Largest relative error at the example's length and at another, with padding that leaves every query a
    key.
    """
    worst = 0.0
    for s in (24, 41):
        x, mask = torch.randn(3, s, WIDTH), torch.ones(3, s, dtype=torch.long)
        mask[1, s // 2 :] = 0
        inputs = (x, mask) if padded else (x,)
        with torch.no_grad():
            worst = max(worst, relative_error(program.module(*inputs), model(*inputs)))
    return worst


def told(program: Program) -> Program:
    edited = program.editable("test")
    in_closed_form(edited, [site.node for site in attentions(edited)])
    edited.graph.eliminate_dead_code()
    edited.module.recompile()
    return edited


def test_written_out_attention_becomes_sdpa_and_is_known_to_have_been_eager() -> None:
    program, model = captured(Attends(), padded=True)
    found = normalised(program)
    (site,) = attentions(found)
    assert site.eager and not site.ours and site.mask is not None and not program.left
    assert found.history == program.history and not attentions(program)
    assert differs(found, model, padded=True) < 1e-6


def test_sdpa_stays_the_node_that_it_is() -> None:
    class Fused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(x.shape)

    program, _ = captured(Fused())
    assert normalised(program) is program
    (site,) = attentions(program)
    assert site.causal and not site.eager and mask_of(program, site.node) is None


@pytest.mark.parametrize(("window", "text"), [(0, "causal"), (5, "causal ∧ window 5")])
def test_masks_are_told_in_closed_form(window: int, text: str) -> None:
    program, model = captured(Attends(window=window), padded=True)
    found = normalised(program)
    (site,) = attentions(found)
    mask = mask_of(found, site.node)
    assert (
        mask is not None
        and mask_words(mask.form).startswith(text)
        and not mask.static
        and not mask.guards
        and not is_causal(mask)
    )
    assert mask_of(found, site.node) is mask, "found once"
    closed = told(found)
    (site,) = attentions(closed)
    assert site.ours and site.mask is None
    assert differs(closed, model, padded=True) < 1e-6


def test_a_causal_mask_is_said_to_sdpa() -> None:
    program, model = captured(Attends())
    found = normalised(program)
    mask = mask_of(found, attentions(found)[0].node)
    assert mask is not None and is_causal(replace(mask, guards=()))
    edited = found.editable("test")
    set_causal(edited, [attentions(edited)[0].node])
    edited.graph.eliminate_dead_code()
    edited.module.recompile()
    (site,) = attentions(edited)
    assert site.causal and site.mask is None
    assert not any("where" in str(n.target) for n in edited.graph.nodes), (
        "the dense mask is not made any more"
    )
    assert differs(edited, model) < 1e-6


def test_a_softcap_is_ours_and_can_be_written_out() -> None:
    program, model = captured(Attends(cap=2.0), padded=True)
    found = normalised(program)
    assert attentions(found)[0].ours and differs(found, model, padded=True) < 1e-6
    plain = without_ours(found)
    assert not ours(plain) and plain.history == found.history and differs(plain, model, padded=True) < 1e-6
    closed = told(found)
    assert differs(closed, model, padded=True) < 1e-6
    with pytest.raises(LoweringError, match="mask in closed form"):
        without_ours(closed)


def test_visible_keys_count_whole_tiles() -> None:
    program, _ = captured(Attends(window=8), s=256)
    found = normalised(program)
    mask = mask_of(found, attentions(found)[0].node)
    assert mask is not None and mask.counts[64] == (9, 0, 7)
    assert visible_keys(mask, 256) == 112  # 7 of 16 tiles


def test_flex_takes_static_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "effcompile.ops.flex_attention._compiled", lambda: torch.nn.attention.flex_attention.flex_attention
    )
    program, model = captured(Attends(window=7, cap=3.0))
    closed = told(normalised(program))
    set_flex(closed, ours(closed))
    closed.module.recompile()
    (site,) = attentions(closed)
    assert site.ours and str(site.node.target) == "effcompile.attention_flex.default"
    assert differs(closed, model) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("form", [{"lo": -20, "hi": 5}, {"chunk": 32, "hi": 0}, *more({"hi": 0})], ids=str)
def test_flex_equals_the_dense_mask(form: dict[str, int]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 150, 16), torch.randn(2, 2, 150, 16), torch.randn(2, 2, 150, 16)
    dense = Visibility(**form).dense(2, 150, 150)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    found = attention_flex(q, k, v, scale=0.25, **form)
    assert found.is_contiguous() and relative_error(found, wanted) < 1e-6


def test_expanding_needs_numbers_added_to_the_scores() -> None:
    program, model = captured(Attends(cap=2.0))
    found = normalised(program)
    edited = replace(found).editable("test")
    expand(edited.graph, ours(edited))
    edited.graph.lint()
    edited.module.recompile()
    assert not attentions(edited) and differs(edited, model) < 1e-6


class Stack(nn.Module):
    """Two attentions under one padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attends(), Attends()])

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, attention_mask)
        return x


def test_a_mask_is_recovered_once_and_the_graph_matched_once_however_often_it_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[str] = Counter()

    def counted(module: ModuleType, name: str) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, **named: (counts.update([name]), original(*args, **named))[1]
        )

    counted(known, "recover_mask")
    counted(normalise, "match")
    counted(rewrite, "match")
    torch.manual_seed(0)
    model = Stack().eval()
    program = normalised(capture(model, (torch.randn(2, 24, WIDTH), torch.ones(2, 24, dtype=torch.long)), {}))
    assert counts == {"match": 1}
    dense = {mask for site in attentions(program) if (mask := dense_mask(site.node)) is not None}
    for _ in range(3):  # for each backend, and for each that is lowered
        assert all(mask_of(program, site.node) is not None for site in attentions(program))
        edited = program.editable("test")
        told = in_closed_form(edited, [site.node for site in attentions(edited)])
        edited.graph.eliminate_dead_code()
        edited.module.recompile()
        assert len(told) == 2 and differs(edited, model, padded=True) < 1e-5
    assert counts == {"recover_mask": len(dense), "match": 1}
    assert len(dense) == 2, "each layer of this model computes its own"


class Gated(nn.Module):
    """Attention to what the model's own values let it see, and to oneself."""

    def __init__(self, *, learned: bool) -> None:
        super().__init__()
        self.project, self.learned = nn.Linear(WIDTH, 3 * WIDTH), learned
        self.gates = nn.Parameter(torch.linspace(-1, 1, 64))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.project(x).split(WIDTH, -1))
        open_ = self.gates[:s].expand(b, s) if self.learned else q.mean((1, 3))
        seen = (open_ > 0)[:, None, None, :] | torch.eye(s, dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


@pytest.mark.parametrize("learned", [False, True])
def test_a_mask_of_the_models_own_values_is_priced_as_if_all_were_seen(learned: bool) -> None:
    """Its tiles are not counted: no plan was found for such a model."""
    model, x = Gated(learned=learned).eval(), torch.randn(2, 32, WIDTH)
    program = capture(model, (x,), {})
    (site,) = attentions(program)
    mask = mask_of(program, site.node)
    assert mask is not None and not mask.counts and visible_keys(mask, 32) == 32
    assert effcompile.plan(model, inputs=(x,), passes=["attention"]).decisions is not None
