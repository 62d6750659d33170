"""Our linears in 8 bits in a lowered program: what follows them is computed inside, and the report says by
what.
"""

from __future__ import annotations

import pytest
import torch
from form_names import form, forms
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from effcompile.backends.torch import TorchEager
from effcompile.capture import capture
from effcompile.ops.fp32_attention import HeldAttention
from effcompile.ops.int8_linear import int8_linear, told
from effcompile.ops.tape import Tape
from effcompile.sites.parts import attentions, linears

ACTIVATIONS = {
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "relu": nn.ReLU(),
}


class Block(nn.Module):
    """`shared`: somebody else reads the linear's result too."""

    def __init__(self, activation: nn.Module, *, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.activation, self.shared = (
            nn.Linear(32, 80),
            nn.Linear(80, 32),
            activation,
            shared,
        )

    def forward(self, x: Tensor) -> Tensor:
        z = self.up(x)
        y = self.activation(z)
        return self.down(y + z if self.shared else y)


def called(program: object) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("after", ACTIVATIONS)
@pytest.mark.parametrize("shared", [False, True])
def test_what_follows_is_computed_inside_where_nobody_else_reads(after: str, shared: bool) -> None:
    model, x = Block(ACTIVATIONS[after], shared=shared).eval(), torch.randn(2, 7, 32)
    program = capture(model, (x,))
    tags = {site.site: "int8_token" for site in linears(program)}
    lowered = TorchEager().lower(program.tagged(forms(tags), "test"), None, [[x]])  # type: ignore[arg-type]
    names = called(lowered.program)
    assert (
        names.count("effcompile.int8_linear.default") == 2
        and any("elu" in n or "silu" in n for n in names) == shared
    )
    assert {site: lowered.applied[site] for site in tags} == {site: form("int8_token") for site in tags}
    gelu = {"gelu": "erf", "gelu_tanh": "tanh"}.get(after)
    assert (lowered.applied["activation:gelu"].name if gelu else None) == gelu
    with torch.no_grad():
        wanted, found = model(x), lowered(x)[0]
    assert 1e-5 < float((found - wanted).norm() / wanted.norm()) < 3e-2
    assert lowered.settings["int8 linears"] == told()


def test_nothing_is_said_where_there_are_none() -> None:
    model, x = Block(nn.GELU()).eval(), torch.randn(2, 7, 32)
    lowered = TorchEager().lower(capture(model, (x,)), None, [[x]])  # type: ignore[arg-type]
    assert "int8 linears" not in lowered.settings and int8_linear.default not in {
        n.target for n in lowered.program.graph.nodes
    }


def test_who_watches_operators_sees_them() -> None:
    model, x = Block(nn.GELU()).eval(), torch.randn(2, 7, 32)
    program = capture(model, (x,))
    tags = {site.site: "int8_token" for site in linears(program)}
    lowered = TorchEager().lower(program.tagged(forms(tags), "test"), None, [[x]])  # type: ignore[arg-type]
    alone = lowered(x)[0]
    with FlopCounterMode(display=False) as counted:
        watched = lowered(x)[0]
    assert counted.get_total_flops() == 2 * 14 * 32 * 80 * 2 and torch.equal(alone, watched)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert lowered(mode.from_tensor(torch.randn(3, 5, 32)))[0].shape == (3, 5, 32)


class Attention(nn.Module):
    """`swapped`: heads are counted before rows are, which no linear makes."""

    def __init__(self, *, swapped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.swapped = nn.Linear(32, 96), nn.Linear(32, 32), swapped

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.swapped:
            q, k, v = (t.reshape(x.shape[0], 4, -1, 8) for t in self.qkv(x).split(32, -1))
        else:
            q, k, v = (t.view(*x.shape[:2], 4, 8).transpose(1, 2) for t in self.qkv(x).split(32, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("word", "error"), [("sdpa_fp32", 1e-6), ("sdpa_bf16", 1e-2), ("sdpa_int8_token", 1e-2)]
)
def test_attentions_read_what_linears_made(swapped: bool, word: str, error: float) -> None:
    model, x = Attention(swapped=swapped).eval(), torch.randn(2, 7, 32)
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    program = capture(model, (x, mask))
    heads = {site.site: form(word) for site in attentions(program)}
    lowered = TorchEager().lower(program.tagged(heads, "test"), None, [])  # type: ignore[arg-type]
    for rows in (7, 7, 5):
        given = torch.randn(2, rows, 32), torch.ones(2, 1, rows, rows, dtype=torch.bool).tril()
        with torch.no_grad():
            torch.testing.assert_close(lowered(*given)[0], model(*given), rtol=10 * error, atol=error)
    tapes = [node.target for node in lowered._called._direct.graph.nodes if isinstance(node.target, Tape)]
    held = [step for tape in tapes for step in tape._steps if isinstance(step.does, HeldAttention)]
    assert len(held) == (not swapped)


class Turned(nn.Module):
    """`also`: what is rotated beside queries and keys: values (RoFormer's `rotary_value`), or nothing, where
    queries and keys are one.
    """

    def __init__(self, also: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.also = nn.Linear(32, 96), nn.Linear(32, 32), also

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], 4, 8).transpose(1, 2) for t in self.qkv(x).split(32, -1))
        turn = lambda t: torch.ops.effcompile.rotary(t, cos, sin, False)  # noqa: E731
        q, k = turn(q), turn(k)
        if self.also == "values":
            v = turn(v)
        elif self.also == "one":
            k = q
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("also", ["", "values", "one"])
def test_rotations_before_an_attention_are_carried_out(also: str) -> None:
    model, given = Turned(also).eval(), (torch.randn(2, 7, 32), *torch.randn(2, 1, 7, 8))
    program = capture(model, given)
    heads = {site.site: form("sdpa_fp32") for site in attentions(program)}
    lowered = TorchEager().lower(program.tagged(heads, "test"), None, [])  # type: ignore[arg-type]
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(lowered(*given)[0], model(*given), rtol=1e-5, atol=1e-6)
