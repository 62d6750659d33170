"""MLPs and residual linears in 8 bits as one call each: where they are, what is read off them, what they
give.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from form_names import form, forms
from torch import Tensor, nn

from effcompile.backends.torch import TorchEager
from effcompile.backends.torch.lowered import load
from effcompile.capture import capture
from effcompile.ir.program import Program
from effcompile.ops import bf16_linear, int8_mlp
from effcompile.sites.parts import add_norms, argument, attentions, linears

pytestmark = pytest.mark.skipif(
    int8_mlp.fallback_reason() is not None, reason=f"no kernel: {int8_mlp.fallback_reason()}"
)


class Block(nn.Module):
    """A transformer's, with its norm before or after; `watched`: somebody else reads what is between."""

    def __init__(self, *, norm_first: bool = False, watched: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.norm_first, self.watched = 2, norm_first, watched
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.act = nn.Linear(32, 80), nn.Linear(80, 32), nn.GELU()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)

    def attend(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(d, -1))
        made = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(made.transpose(1, 2).reshape(b, s, d))

    def mlp(self, x: Tensor) -> Tensor:
        between = self.act(self.up(x))
        made: Tensor = self.down(between)
        return made + between.mean() if self.watched else made

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self.attend(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.mlp(x))


def lowered(
    model: nn.Module, x: Tensor, *, fused: bool = True, narrow: bool = True, held: str = "int8_token"
) -> tuple[Program, object]:
    program = capture(model.eval(), (x,))
    tags = {site.site: held for site in linears(program)}
    tags |= {site.site: "fused" for site in add_norms(program) if fused and len(site.add.users) == 1}
    tags |= {site.site: "sdpa_bf16" for site in attentions(program) if narrow}
    return program, TorchEager().lower(program.tagged(forms(tags), "test"), None, [[x]])  # type: ignore[arg-type]


def called(made: object) -> list[str]:
    found = [n for n in made.program.graph.nodes if n.op == "call_function"]  # type: ignore[attr-defined]
    names = [str(n.target).removeprefix("effcompile.").removesuffix(".default") for n in found]
    return [
        name
        for name in names
        if name.startswith(("int8", "bf16_l", "bf16_m", "add_layer")) or "layer_norm" in name
    ]


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_block_is_three_calls_and_its_attention(norm_first: bool) -> None:
    model, x = Block(norm_first=norm_first), torch.randn(2, 32, 32)
    program, made = lowered(model, x)
    calls = [name for name in called(made) if name.startswith("int8")]
    assert calls == ["int8_linear", "int8_linear_residual", "int8_mlp"]
    assert norm_first != (called(made) == calls)  # sums that others read have norms of torch's
    applied = made.applied  # type: ignore[attr-defined]
    assert {applied[site.site] for site in linears(program)} == {form("int8_token")}
    norms = [applied[site.site].name for site in add_norms(program)]
    assert norms == (["split"] if norm_first else ["fused", "fused"])
    assert applied["act:gelu"].name == "erf"
    with torch.no_grad():
        wanted, found = model(x), made(x)[0]  # type: ignore[operator]
    assert 1e-5 < float((found - wanted).norm() / wanted.norm()) < 3e-2


@pytest.mark.skipif(bf16_linear.fallback_reason() is not None, reason=str(bf16_linear.fallback_reason()))
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_block_in_bf16_is_three_calls_too(norm_first: bool, tmp_path: Path) -> None:
    model, x = Block(norm_first=norm_first), torch.randn(2, 32, 32)
    program, made = lowered(model, x, held="bf16")
    calls = [name for name in called(made) if name.startswith("bf16")]
    assert calls == ["bf16_linear", "bf16_linear_residual", "bf16_mlp"]
    applied = made.applied  # type: ignore[attr-defined]
    assert {applied[site.site] for site in linears(program)} == {form("bf16")}
    assert applied["act:gelu"].name == "erf"
    with torch.no_grad():
        wanted, found = model(x), made(x)[0]  # type: ignore[operator]
    assert 1e-5 < float((found - wanted).norm() / wanted.norm()) < 5e-3
    (file,) = made.save(tmp_path)  # type: ignore[attr-defined]
    again = load(file)(x)
    assert torch.equal(again[0] if isinstance(again, (list, tuple)) else again, found)
    few = called(lowered(model, torch.randn(1, 8, 32), held="bf16")[1])
    assert not any(name.startswith("bf16") for name in few), "few tokens are oneDNN's"


def test_it_is_what_its_parts_give(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Block(), torch.randn(2, 32, 32)
    chained = lowered(model, x)[1]
    monkeypatch.setattr(int8_mlp, "fallback_reason", lambda: "asked for")
    parts = lowered(model, x)[1]
    assert called(parts) == [
        "int8_linear",
        "int8_linear",
        "add_layer_norm",
        *["int8_linear"] * 2,
        "add_layer_norm",
    ]
    assert chained.applied == parts.applied  # type: ignore[attr-defined]
    a, b = chained(x)[0], parts(x)[0]  # type: ignore[operator]
    assert float((a - b).norm() / b.norm()) < 1e-2


def test_what_somebody_else_reads_stays_and_so_do_few_rows_and_norms_of_a_compiler() -> None:
    watched = called(lowered(Block(watched=True), torch.randn(2, 32, 32))[1])
    assert "int8_mlp" not in watched and watched.count("int8_linear") == 3
    few = called(lowered(Block(), torch.randn(1, 31, 32))[1])
    assert set(few) == {"int8_linear", "add_layer_norm"}
    split = called(lowered(Block(), torch.randn(2, 32, 32), fused=False)[1])
    assert split.count("int8_mlp") == 1 and "int8_linear_residual" not in split


def test_projections_of_a_bf16_attention_are_bf16_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Block(), torch.randn(2, 32, 32)
    made = lowered(model, x)[1]
    (first, *_) = (n for n in made.program.graph.nodes if str(n.target) == "effcompile.int8_linear.default")  # type: ignore[attr-defined]
    assert argument(first, "narrow") and first.meta["val"].dtype is torch.bfloat16
    monkeypatch.setattr("effcompile.backends.torch.edit.narrow_projections", lambda program: None)
    assert torch.equal(made(x)[0], lowered(model, x)[1](x)[0])  # type: ignore[operator]
    plain = lowered(model, x, narrow=False)[1]
    assert not any("narrow" in n.kwargs for n in plain.program.graph.nodes)  # type: ignore[attr-defined]


class Shared(nn.Module):
    """Two attentions with one key and value; the second one's query is no linear's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, plain = (
            t.view(*x.shape[:2], 2, 16).transpose(1, 2)
            for t in (self.query(x), self.key(x), self.value(x), x.sin())
        )
        attend = nn.functional.scaled_dot_product_attention
        return attend(q, k, v) + attend(plain, k, v)


def test_an_attention_reads_one_dtype() -> None:
    """A projection that another attention needs in fp32 keeps those beside it in fp32, too."""
    made = lowered(Shared(), torch.randn(2, 32, 32))[1]
    assert not any("narrow" in node.kwargs for node in made.program.graph.nodes)  # type: ignore[attr-defined]


def test_a_saved_one_gives_the_same(tmp_path: Path) -> None:
    model, x = Block(), torch.randn(2, 32, 32)
    made = lowered(model, x)[1]
    (file,) = made.save(tmp_path)  # type: ignore[attr-defined]
    found = load(file)(x)
    assert torch.equal(found[0] if isinstance(found, (list, tuple)) else found, made(x)[0])  # type: ignore[operator]
