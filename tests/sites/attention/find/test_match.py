"""Each piece of the normal form on a small module: what the match says, that it is true, and that the
rewritten graph equals eager.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from match_helpers import MIN, Attend, B, D, H, Model, S, check_words, close, exported, inputs, only
from torch import Tensor, nn

from effcompile.sites.attention.find.normal_form import AttentionMatch, NotThisFormError
from effcompile.sites.attention.rewrite import Masking, Rewritten, rewrite


def plain(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return close(q @ k.transpose(2, 3) * 0.3, v)


def divided(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return close((q @ k.mT + torch.where(hidden, MIN, 0.0)) / math.sqrt(D), v)


def masked(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return close((q @ k.mT).masked_fill(hidden, MIN), v)


def masked_in_place(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    scores = q @ k.mT
    scores *= 0.3
    scores += m.slopes[:, None, None] * torch.arange(q.shape[2])
    scores.masked_fill_(hidden, MIN)
    return close(scores, v)


def shown(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return close(torch.where(~hidden, q @ k.mT, torch.tensor(MIN)), v)


def capped(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return close(
        torch.tanh(q @ k.mT * 0.3 / 2.0) * 2.0
        + torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, MIN),
        v,
    )


def sunk(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3 + torch.where(hidden, MIN, 0.0)
    sinks = m.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    scores = torch.cat([scores, sinks], -1)
    scores = scores - scores.max(-1, keepdim=True).values
    return torch.softmax(scores, -1)[..., :-1] @ v


def sunk_first(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    rows = (m.row_scale * q).sum(-1, keepdim=True)  # a sink per row, not per head
    return torch.softmax(torch.cat([rows, q @ k.mT], -1), -1)[..., 1:] @ v


def relative(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    i = torch.arange(q.shape[2])
    bias = m.table[:, (i[:, None] - i).clamp(-S, S - 1) + S]
    return close((q @ k.mT + bias).masked_fill(hidden, MIN) * 0.5, v)


def biased_mask(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Bias and mask are one sum, as in BEiT."""
    i = torch.arange(q.shape[2])
    return close(q @ k.mT + (m.table[:, (i[:, None] - i).abs()] + torch.where(hidden, MIN, 0.0)), v)


def alibi(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    b, h, s, d = q.shape
    slopes = (m.slopes[:, None] * torch.arange(s))[None].expand(b, -1, -1).reshape(b * h, 1, s)
    q3, k3, v3 = (t.reshape(b * h, s, d) for t in (q, k, v))
    scores = slopes.baddbmm(q3, k3.transpose(1, 2), beta=0.5, alpha=0.3).view(b, h, s, s)
    weights = torch.softmax(scores + torch.where(hidden, MIN, 0.0), -1)
    return torch.bmm(weights.view(b * h, s, s), v3).view(b, h, s, d)


def three_axes(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    b, h, s, d = q.shape
    merged = torch.where(hidden, MIN, 0.0).expand(b, h, s, s).reshape(b * h, s, s)
    return close(torch.bmm(q.reshape(-1, s, d) * 0.3, k.reshape(-1, s, d).mT) + merged, v.reshape(-1, s, d))


def einsums(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    q, k, v = (t.permute(2, 0, 1, 3) for t in (q, k, v))
    weights = torch.softmax(torch.einsum("ibnd,jbnd->bnij", q, k) - 1e30 * hidden.float(), -1)
    return torch.einsum("bnij,jbnd->ibnd", weights, v)


def windows(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Two windows per picture, their masks added in five axes, as in Swin."""
    rows = q.shape[2] // 2
    q, k, v = (t.unflatten(2, (2, rows)).transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    mask = torch.zeros(2, rows, rows)
    mask[1, :, 0] = -100.0
    scores = (q @ k.mT).view(-1, 2, H, rows, rows) + mask[None, :, None]
    return close(scores.view(-1, H, rows, rows), v)


def cosine(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    scores = (
        nn.functional.normalize(q, dim=-1) @ nn.functional.normalize(k, dim=-1).mT * torch.exp(m.row_scale)
    )
    return close(scores.masked_fill(hidden, MIN), v)


def upcast(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    scores = q.float() @ k.float().mT
    weights = torch.softmax(scores.masked_fill(hidden, MIN), -1, dtype=torch.float32).to(v.dtype)
    return nn.functional.dropout(weights, 0.5, training=False) @ v


def repeated(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    b, kv, s, _ = k.shape
    k, v = (t[:, :, None].expand(b, kv, H // kv, s, t.shape[3]).reshape(b, H, s, t.shape[3]) for t in (k, v))
    return masked(m, q, k, v, hidden)


def interleaved(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    times = H // k.shape[1]
    return masked(m, q, k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1), hidden)


def five_axes(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = (grouped @ k.unsqueeze(2).mT).masked_fill(hidden.unsqueeze(1), MIN)
    return close(scores, v.unsqueeze(2)).flatten(1, 2)


def sdpa(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=~hidden, scale=0.3, enable_gqa=k.shape[1] != H
    )


def sdpa_causal(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


#: attend, heads of k and v, width of v, and what the match says
FORMS: list[tuple[Attend, int, int, dict[str, Any]]] = [
    (plain, H, D, {"scale": 0.3, "edits": ""}),
    (plain, H, D + 4, {"scale": 0.3, "edits": ""}),
    (divided, H, D, {"scale": D**-0.5, "edits": "F+"}),
    (masked, H, D, {"scale": 1.0, "edits": "Fx"}),
    (masked, 1, D, {"kv": 1, "edits": "Fx"}),
    (masked_in_place, H, D, {"scale": 0.3, "edits": "mFx"}),
    (shown, H, D, {"edits": "Fx"}),
    (capped, H, D, {"scale": 0.3, "softcap": 2.0, "edits": "F+"}),
    (sunk, H, D, {"sink": 1, "edits": "F+"}),
    (sunk_first, H, D, {"sink": 3, "edits": ""}),
    (relative, H, D, {"scale": 0.5, "edits": "bFx", "factor": 0.5}),
    (biased_mask, H, D, {"edits": "bF+"}),
    (alibi, H, D, {"scale": 0.3, "edits": "mF+", "factor": 0.5}),
    (three_axes, H, D, {"scale": 0.3, "edits": "m"}),
    (einsums, H, D, {"edits": "m", "factor": -1.0}),
    (windows, H, D, {"edits": "m"}),
    (cosine, H, D, {"edits": "Fx"}),
    (upcast, H, D, {"edits": "Fx", "dropout": 0.0}),
    (repeated, 2, D, {"kv": 2, "edits": "Fx"}),
    (interleaved, 2, D + 4, {"kv": 2, "edits": "Fx"}),
    (five_axes, 2, D, {"kv": 2, "edits": "Fx"}),
    (sdpa, H, D, {"scale": 0.3, "edits": "Fx", "empty": "zero"}),
    (sdpa, 2, D, {"kv": 2, "edits": "Fx", "empty": "zero"}),
    (sdpa_causal, H, D, {"scale": D**-0.5, "causal": True, "edits": ""}),
]
NAMES = [f"{attend.__name__}-{kv}-{value}" for attend, kv, value, _ in FORMS]


def letters(found: AttentionMatch) -> str:
    """One per edit: b bias, m mask; F a fill, x overwritten, + added."""
    words = {True: "F+", False: "Fx"}
    return "".join(words[edit.added] if edit in found.fills else edit.kind[0] for edit in found.edits)  # type: ignore[union-attr]


@pytest.mark.parametrize("functional", [False, True], ids=["in place", "functional"])
@pytest.mark.parametrize(("attend", "kv", "value", "said"), FORMS, ids=NAMES)
def test_the_match_says_what_the_graph_computes(
    attend: Attend, kv: int, value: int, said: dict[str, Any], functional: bool
) -> None:
    graph = exported(Model(attend, kv, value), *inputs(), functional=functional)
    found = only(graph)
    assert letters(found) == said["edits"]
    assert found.k.shape[1] == found.v.shape[1] == said.get("kv", H)
    for name in ("scale", "softcap", "causal", "empty", "dropout"):
        assert getattr(found, name) == pytest.approx(said.get(name, getattr(found, name)))
    if "factor" in said:
        assert found.terms[0].factor == pytest.approx(said["factor"])
    assert (0 if found.sink is None else len(found.sink.shape)) == said.get("sink", 0)
    check_words(graph, found, *inputs())


@pytest.mark.parametrize(("attend", "kv", "value", "said"), FORMS, ids=NAMES)
@pytest.mark.parametrize("form", ["attention", "sdpa"])
def test_the_rewritten_graph_is_the_model(
    attend: Attend, kv: int, value: int, said: dict[str, Any], form: Any
) -> None:
    model = Model(attend, kv, value)
    graph = exported(model, *inputs())
    (outcome,) = rewrite(graph.graph, forms=(form,))
    if form == "sdpa" and ("softcap" in said or "sink" in said):
        assert "SDPA has no" in str(getattr(outcome, "reason", ""))
        return
    assert isinstance(outcome, Rewritten), outcome.reason
    assert not any(
        "softmax" in str(node.target) or "matmul" in str(node.target) for node in graph.graph.nodes
    )
    torch.testing.assert_close(graph(*inputs()), model(*inputs()), rtol=1e-5, atol=1e-5)
    if form == "attention":
        # where finfo.min hides a whole row, SDPA has other gradients: `training=True` refuses it
        same_as(model, graph, *inputs())


def same_as(model: nn.Module, graph: nn.Module, *args: Tensor) -> None:
    """Outputs and gradients of the model's parameters and of its first input."""
    x = args[0].requires_grad_()
    direction = torch.randn(model(*args).shape, generator=torch.Generator().manual_seed(2))
    own = dict(graph.named_parameters())
    used = [name for name, _ in model.named_parameters() if name in own]
    truth, mine = model(*args), graph(*args)
    torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(mine, [x, *(own[name] for name in used)], direction, allow_unused=True)
    theirs = torch.autograd.grad(
        truth, [x, *(model.get_parameter(name) for name in used)], direction, allow_unused=True
    )
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize(("attend", "kv", "value", "said"), FORMS, ids=NAMES)
def test_sizes_stay_dynamic(attend: Attend, kv: int, value: int, said: dict[str, Any]) -> None:
    """Matched at one size, run at another: no size of the example is written into the graph."""
    model, auto = Model(attend, kv, value), torch.export.Dim.AUTO
    axes = {0: auto} if attend is windows else {0: auto, 1: auto}
    graph = exported(
        model, *inputs(3), dynamic=({**axes}, {0: auto} if attend is windows else {0: auto, 2: auto, 3: auto})
    )
    (outcome,) = rewrite(graph.graph)
    assert isinstance(outcome, Rewritten), outcome.reason
    other = inputs(5, S if attend is windows else S + 3)
    torch.testing.assert_close(graph(*other), model(*other), rtol=1e-5, atol=1e-5)


def test_bf16_is_not_widened() -> None:
    """Queries and keys are upcast for the scores only: the call reads them in bf16, and answers in bf16."""
    model, (x, hidden) = Model(upcast).bfloat16(), inputs()
    graph = exported(model, x.bfloat16(), hidden)
    found = only(graph)
    assert {operand.val.dtype for operand in (found.q, found.k, found.v)} == {torch.bfloat16}
    rewrite(graph.graph)
    mine, truth = graph(x.bfloat16(), hidden).float(), model(x.bfloat16(), hidden).float()
    assert float((mine - truth).norm() / truth.norm()) < 1e-2


def test_the_call_knows_its_module_and_shape() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Model(masked)

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            return self.layer(x, hidden)

    graph = exported(Outer(), *inputs())
    (outcome,) = rewrite(graph.graph)
    assert isinstance(outcome, Rewritten)
    assert outcome.match.site == "layer"
    assert outcome.node.name == "layer_attention"
    assert [entry[0] for entry in outcome.node.meta["nn_module_stack"].values()][-1] == "layer"
    assert outcome.node.meta["val"][0].shape == (B, H, S, D)


def test_layers_share_one_mask() -> None:
    def twice(m: Model, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return masked(m, masked(m, q, k, v, hidden), k, v, hidden)

    graph = exported(Model(twice), *inputs())
    outcomes = rewrite(graph.graph)
    assert len({outcome.node.args[5] for outcome in outcomes if isinstance(outcome, Rewritten)}) == 1
    assert len(outcomes) == 2


def test_other_maskings_may_be_given_or_refused() -> None:
    graph = exported(Model(masked), *inputs())

    def refuse(found: AttentionMatch) -> Masking:
        raise NotThisFormError("not today")

    (outcome,) = rewrite(graph.graph, masking=refuse)
    assert str(getattr(outcome, "reason", "")) == "not today"
    (outcome,) = rewrite(graph.graph, masking=lambda found: Masking(hi=0, chunk=3))
    assert isinstance(outcome, Rewritten)
    assert outcome.node.kwargs == {"scale": 1.0, "hi": 0, "chunk": 3}


@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention(weights: bool) -> None:
    """torch's own module, with and without the weights that nobody reads; padding on the right."""

    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            return self.attention(x, x, x, key_padding_mask=hidden, need_weights=weights)[0]

    hidden = torch.zeros(B, S, dtype=torch.bool)
    hidden[1, -2:] = True
    model, x = Self(), torch.randn(B, S, 16)
    graph = exported(model, x, hidden)
    check_words(graph, only(graph), x, hidden)
    (outcome,) = rewrite(graph.graph)
    assert isinstance(outcome, Rewritten), outcome.reason
    same_as(model, graph, x, hidden)
