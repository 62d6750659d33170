"""The attention operators: equal to attention written plainly, for every mask, and well behaved
as operators.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from attention_reference import Problem, run
from functorch.compile import make_boxed_func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

from effcompile.core.errors import UsageError
from effcompile.ops import attention_flash, attention_kernel
from effcompile.ops.attention import attention, attention_backward

INPUTS = ("q", "k", "v", "bias", "sink")


def problem(
    b: int = 2, h: int = 4, kv: int = 2, sq: int = 37, sk: int = 37, d: int = 8, dv: int = 8,
    dtype: torch.dtype = torch.float64, **terms: Any,
) -> Problem:  # fmt: skip
    torch.manual_seed(b + h + sq + sk + d)
    q, k, v = (
        torch.randn(shape, dtype=torch.float64).to(dtype)
        for shape in ((b, h, sq, d), (b, kv, sk, d), (b, kv, sk, dv))
    )
    return Problem(q=q, k=k, v=v, **terms)


def both(p: Problem, *, wide: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """[out, lse, gradients...] of the operator and of the reference, for one random gradient of out."""
    results = []
    for function in (lambda x: attention(*x.positional(), **x.form()), run):
        leaves = {
            name: getattr(p, name).detach().clone().requires_grad_()
            for name in INPUTS
            if getattr(p, name) is not None
        }
        out, lse = function(replace(p, **leaves))
        torch.manual_seed(7)
        grad = torch.randn(out.shape, dtype=torch.float64).to(p.q.dtype).to(out.dtype)
        results.append([out.detach(), lse.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)])
    return results[0], results[1]


def assert_equal(p: Problem, tolerance: float) -> None:
    for at, (ours, plain) in enumerate(zip(*both(p), strict=True)):
        assert ours.shape == plain.shape
        hidden = plain.isinf()
        assert bool((ours.isinf() == hidden).all()), at
        difference = (ours.double() - plain.double()).masked_fill(hidden, 0.0)
        size = plain.double().masked_fill(hidden, 0.0)
        assert float(difference.norm()) <= tolerance * float(size.norm()) + 0.01 * tolerance, (
            at,
            float(difference.norm() / size.norm()),
        )


LENGTHS = st.sampled_from([0, 1, 2, 5, 16, 33, 70, 150])
OFFSETS = st.one_of(st.none(), st.integers(-40, 40))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any combination of the mask's terms and of what changes a score; all lengths and widths."""
    b, kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    sq, sk = draw(LENGTHS), draw(LENGTHS)
    if draw(st.booleans()):
        sk = sq
    d = draw(st.sampled_from([1, 3, 8, 16]))
    terms: dict[str, Any] = {
        "lo": draw(OFFSETS), "hi": draw(OFFSETS), "chunk": draw(st.sampled_from([0, 0, 1, 7, 20])),
        "softcap": draw(st.sampled_from([0.0, 1.5])), "uniform_empty": draw(st.booleans()),
        "fills": draw(st.booleans()),
    }  # fmt: skip
    p = problem(b, kv * group, kv, sq, sk, d, draw(st.sampled_from([d, d, 5])), **terms)
    axes = lambda *full: tuple(n if draw(st.booleans()) else 1 for n in full)  # noqa: E731
    if draw(st.booleans()):
        p.bias = torch.randn(axes(b, kv * group, sq, sk), dtype=torch.float64)
    if draw(st.booleans()):
        p.sink = torch.randn(
            kv * group if draw(st.booleans()) else axes(b, kv * group, sq), dtype=torch.float64
        )
    masks(draw, p, axes)
    if draw(st.integers(0, 3)) == 0 and sq and sk:
        listed(p, axes(b, kv * group), draw(st.sampled_from([4, 16])), draw(st.sampled_from([8, 16])))
    return p


def masks(draw: st.DrawFn, p: Problem, axes: Any) -> None:
    (b, h, sq, _), sk = p.q.shape, p.k.shape[2]
    if draw(st.booleans()):
        documents, ordered = draw(st.integers(1, 4)), draw(st.booleans())
        p.q_ids, p.k_ids = (torch.randint(documents, (*axes(b), n)) for n in (sq, sk))
        if ordered:
            p.q_ids, p.k_ids = (ids.sort(1).values for ids in (p.q_ids, p.k_ids))
    if draw(st.booleans()):
        p.valid = torch.rand(*axes(b), sk) > draw(st.sampled_from([0.1, 0.5, 1.0]))
        p.valid[:, draw(st.integers(0, 40)) :] = False
    if draw(st.integers(0, 3)) == 0:
        p.mask = torch.rand(axes(b, h, sq, sk)) > 0.4


def listed(p: Problem, lead: tuple[int, ...], block_q: int, block_k: int) -> None:
    """Lists of tiles drawn at random: a quarter full, a quarter partial."""
    nq, nk = -(-p.q.shape[2] // block_q), -(-p.k.shape[2] // block_k)
    kind = torch.randint(4, (*lead, nq, nk))
    p.tiles, p.block_q, p.block_k = [], block_q, block_k
    for number in (0, 1):
        here = kind == number
        order = torch.sort(torch.where(here, torch.arange(nk), nk), -1).values
        p.tiles += [here.sum(-1).int(), torch.where(order < nk, order, 0).int()]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Equal values, in other strides."""
    if layout == "length before heads":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "width first":
        return x.mT.contiguous().mT
    if layout == "spread":
        return torch.stack([x, torch.full_like(x, torch.nan)], 3)[:, :, :, 0]
    return x[:1, :1].expand(x.shape) if layout == "expanded" else x


LAYOUTS = ("contiguous", "length before heads", "width first", "spread", "expanded")


@settings(max_examples=100, deadline=None)
@given(problems(), st.tuples(*(st.sampled_from(LAYOUTS) for _ in range(3))))
def test_equals_the_reference(p: Problem, layouts: tuple[str, ...]) -> None:
    """With blocks as small as they come, so that short lengths have many."""
    p = replace(
        p, **{name: laid_out(getattr(p, name), layout) for name, layout in zip("qkv", layouts, strict=True)}
    )
    blocks = mock.patch.multiple(attention_kernel, SCORES=1, EMPTY_SCORES=1)
    with blocks, mock.patch.object(attention_flash, "_SPAN_COST", 0):
        assert_equal(p, 1e-11)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_kernel_of_any_device_equals_the_reference(p: Problem) -> None:
    """Where the flash kernel would have been taken on a CPU too."""
    with (
        mock.patch.object(attention_flash, "_takes", return_value=False),
        mock.patch.object(attention_kernel, "SCORES", 1),
    ):
        assert_equal(p, 1e-11)


FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"hi": 0},
    "window": {"lo": -30, "hi": 0},
    "bias": {"bias": torch.randn(1, 4, 300, 300), "hi": 0},
    "slopes": {"bias": torch.randn(1, 4, 1, 300), "hi": 0, "sink": torch.randn(4)},
    "softcap": {"softcap": 3.0, "lo": -30, "hi": 30},
    "padded": {"valid": torch.arange(300) >= torch.tensor([[90], [0]]), "hi": 0},
    "documents": {"q_ids": torch.arange(300)[None] // 77, "k_ids": torch.arange(300)[None] // 77},
    "wide values": {"dv": 24, "chunk": 90},
}


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
    ids=["fp32", "bf16", "fp16"],
)
@pytest.mark.parametrize("name", FORMS)
def test_precision(name: str, dtype: torch.dtype, tolerance: float) -> None:
    p = problem(sq=300, sk=300, d=16, dtype=dtype, **{"dv": 16, **FORMS[name]})
    assert_equal(p, tolerance)
    again = both(p)[0]
    assert all(torch.equal(a, b) for a, b in zip(both(p)[0], again, strict=True)), (
        "the same call gives the same bits"
    )


def test_rows_that_see_nothing_depend_on_nothing() -> None:
    """0 and −inf, with and without a mask tensor, whatever a NaN in keys that nobody sees."""
    for terms in (
        {"lo": 40},
        {"valid": torch.zeros(1, 37, dtype=torch.bool)},
        {"mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)},
    ):
        p = problem(**terms)  # type: ignore[arg-type]
        p.k.fill_(torch.nan)
        out, lse = attention(*p.positional(), **p.form())
        assert not out.any() and bool((lse == -torch.inf).all())


def every_argument(dtype: torch.dtype = torch.float32) -> Problem:
    p = problem(
        b=1, sq=9, sk=9, dtype=dtype, hi=0, softcap=3.0, bias=torch.randn(1, 4, 1, 9), sink=torch.randn(4)
    )
    p.q_ids = p.k_ids = torch.arange(9)[None] // 4
    p.valid, p.mask = torch.arange(9)[None] > 1, torch.ones(1, 1, 9, 9, dtype=torch.bool)
    listed(p, (1, 1), 4, 4)
    return p


def differentiable(p: Problem) -> Problem:
    return replace(
        p,
        **{
            name: x.detach().clone().requires_grad_()
            for name in INPUTS
            if (x := getattr(p, name)) is not None
        },
    )


@pytest.mark.parametrize(
    "p",
    [problem(b=1, sq=9, sk=9, dtype=torch.float32, hi=0), every_argument()],
    ids=["plain", "every argument"],
)
def test_opcheck(p: Problem) -> None:
    torch.library.opcheck(attention, differentiable(p).positional(), p.form())
    out, lse = attention(*p.positional(), **p.form())
    torch.library.opcheck(
        attention_backward,
        (torch.randn_like(out), *p.positional()[:3], out, lse, *p.positional()[3:]),
        p.form(),
    )


class Layer(nn.Module):
    """Attention of a problem whose q is computed; everything else is captured."""

    def __init__(self, p: Problem) -> None:
        super().__init__()
        self.p = p

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = replace(self.p, q=q * 1.5, k=k, v=v)
        return attention(*p.positional(), **p.form())[0].sin()


def test_export_keeps_the_node() -> None:
    p = every_argument()
    exported = torch.export.export(Layer(p), (p.q, p.k, p.v)).run_decompositions()
    assert [n.target for n in exported.graph.nodes].count(torch.ops.effcompile.attention.default) == 1
    assert torch.equal(exported.module()(p.q, p.k, p.v), Layer(p)(p.q, p.k, p.v))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    p = every_argument()
    torch._dynamo.reset()
    found = []
    for layer in (Layer(p), torch.compile(Layer(p), backend=backend, fullgraph=True)):
        leaves = [t.detach().clone().requires_grad_() for t in (p.q, p.k, p.v)]
        out = layer(*leaves)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain)


def test_both_nodes_stand_in_the_joint_graph() -> None:
    p, seen = every_argument(), []

    def note(gm: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in gm.graph.nodes)
        return make_boxed_func(gm.forward)

    q = p.q.clone().requires_grad_()
    torch._dynamo.reset()
    torch.compile(Layer(p), backend=aot_autograd(fw_compiler=note, bw_compiler=note))(
        q, p.k, p.v
    ).sum().backward()
    assert "effcompile.attention.default" in seen and "effcompile.attention_backward.default" in seen
    assert q.grad is not None


def test_meta_tensors() -> None:
    p = problem(b=1, dtype=torch.bfloat16, dv=5)
    q, k, v = (t.to("meta").requires_grad_() for t in (p.q, p.k, p.v))
    out, lse = attention(q, k, v, scale=1.0)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
        (1, 4, 37, 5),
        torch.bfloat16,
        (1, 4, 37),
        torch.float32,
    )
    out.sum().backward()
    assert k.grad is not None and k.grad.shape == k.shape


def test_flops_count_what_is_visible() -> None:
    p = problem(b=2, h=4, kv=2, sq=64, sk=64, d=8, dv=4, hi=0)
    p.q.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        attention(*p.positional(), **p.form())[0].sum().backward()
    counts = counter.get_flop_counts()["Global"]
    pairs = 8 * int(p.dense()[0, 0].sum())
    assert counts[torch.ops.effcompile.attention] == 2 * pairs * (8 + 4)
    assert counts[torch.ops.effcompile.attention_backward] == 2 * pairs * (3 * 8 + 2 * 4)
    for terms in (
        {"lo": -5, "hi": 3},
        {"chunk": 10},
        {"lo": -70, "hi": -60},
        {"lo": -9, "hi": 0, "chunk": 16},
    ):
        p = problem(sq=50, sk=70, **terms)
        with FlopCounterMode(display=False) as counter:
            attention(*p.positional(), **p.form())
        assert counter.get_total_flops() == 2 * int(p.dense().sum()) * 16
    p = problem(sq=64, sk=64)
    listed(p, (1, 1), 16, 16)
    with FlopCounterMode(display=False) as counter:
        attention(*p.positional(), **p.form())
    assert counter.get_total_flops() == 2 * 8 * 256 * int(p.tiles[0].sum() + p.tiles[2].sum()) * 16


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"k": torch.zeros(2, 2, 37, 8, dtype=torch.float32)}, "k is torch.float32"),
        ({"v": torch.zeros(2, 2, 36, 8, dtype=torch.float64)}, "takes v of k's batch"),
        ({"q": torch.zeros(2, 3, 37, 8, dtype=torch.float64)}, "multiple of k's heads"),
        ({"q": torch.zeros(4, 37, 8, dtype=torch.float64)}, "q of 4 axes"),
        ({"bias": torch.ones(1, 1, 37, 37, dtype=torch.bool)}, "floating bias"),
        ({"bias": torch.ones(37, 37)}, "bias broadcastable"),
        ({"mask": torch.ones(1, 1, 37, 37)}, "boolean mask"),
        ({"valid": torch.ones(2, 36, dtype=torch.bool)}, "valid broadcastable"),
        ({"q_ids": torch.zeros(2, 37, dtype=torch.int64)}, "k_ids is missing"),
        ({"sink": torch.zeros(3)}, "sink broadcastable"),
        ({"chunk": -1}, "chunk 0"),
        ({"scale": float("nan")}, "finite scale"),
        ({"tiles": [torch.zeros(1, 1, 1, dtype=torch.int32)]}, "tiles as 4 or 8"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], named: str) -> None:
    p = replace(problem(), **change)
    with pytest.raises(UsageError, match=named):
        attention(*p.positional(), **p.form())
