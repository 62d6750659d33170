"""Products of 16-bit matrices in float32: against float64, and what they allocate against the allocator's
trace.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from effcompile.core import torch_compat_memory
from effcompile.ops import wide
from effcompile.ops.workspace import workspace_bytes

SIZES = st.integers(1, 70)


@settings(max_examples=60, deadline=None)
@given(
    m=SIZES,
    k=SIZES,
    n=SIZES,
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    turned=st.tuples(st.booleans(), st.booleans()),
    more=st.sampled_from(["", "bias", "accumulate"]),
    piece=st.sampled_from([64, 1 << 10, 1 << 22]),
)
def test_each_element_is_rounded_once(
    m: int, k: int, n: int, dtype: torch.dtype, turned: tuple[bool, bool], more: str, piece: int
) -> None:
    generator = torch.Generator().manual_seed(m * k + n)
    a, b, out, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, n), (m, n), (n,))
    )
    a, b = (t.t().contiguous().t() if turn else t for t, turn in zip((a, b), turned, strict=True))
    wanted = a.double() @ b.double() + (
        bias.double() if more == "bias" else out.double() if more == "accumulate" else 0
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide, "_PIECE", piece)
        found = wide.mm_into(
            out, a, b, bias=bias if more == "bias" else None, accumulate=more == "accumulate"
        )
    assert found is out
    unit = torch.finfo(dtype).eps
    terms = a.double().abs() @ b.double().abs() + 4  # float32's sums are off by their own rounding
    assert bool(((found.double() - wanted).abs() <= 0.51 * unit * wanted.abs() + 1e-6 * terms).all())


def traced(call: object, *args: Tensor) -> int:
    with torch.no_grad(), torch_compat_memory.watched_memory("cpu") as peak:
        result = call(*args)  # type: ignore[operator]
    return peak() - result.nbytes


@pytest.mark.parametrize(("m", "k", "n"), [(256, 64, 700), (700, 64, 32), (900, 8, 900), (3, 5, 7)])
@pytest.mark.parametrize("piece", [1 << 14, 1 << 22])
def test_workspace_is_what_the_allocator_gives_out(
    m: int, k: int, n: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide, "_PIECE", piece)
    a, b, bias = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16().t(), torch.randn(n).bfloat16()
    for call, args in (
        (torch.ops.effcompile.wide_mm, (a, b)),
        (torch.ops.effcompile.wide_addmm, (bias, a, b)),
    ):
        expected = workspace_bytes(call.default, args)
        assert expected is not None and 0 <= expected - traced(call, *args) <= 16


@pytest.mark.parametrize("more", ["", "bias", "accumulate"])
@pytest.mark.parametrize("slow", [True, False])
def test_who_multiplies_is_measured(more: str, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "product_ratio", lambda dtype, device: 30.0 if slow else 1.0)
    seen: list[str] = []
    monkeypatch.setattr(wide, "_piece", lambda *args, real=wide._piece: (seen.append("wide"), real(*args)))
    torch.manual_seed(0)
    a, b, out, bias = (torch.randn(shape).bfloat16() for shape in ((6, 5), (5, 9), (6, 9), (9,)))
    wanted = a.double() @ b.double() + (
        bias.double() if more == "bias" else out.double() if more == "accumulate" else 0
    )
    wide.product_into(out, a, b, bias=bias if more == "bias" else None, accumulate=more == "accumulate")
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    assert (
        bool(seen) is slow and not wide.pays(torch.float32, "cpu") and not wide.pays(torch.bfloat16, "cuda")
    )


@settings(max_examples=40, deadline=None)
@given(
    rows=st.tuples(st.integers(1, 3), st.integers(9, 20)),
    k=st.integers(1, 70),
    n=st.integers(1, 70),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    biased=st.booleans(),
    spread=st.booleans(),
)
def test_a_linear_is_rounded_once(
    rows: tuple[int, int], k: int, n: int, dtype: torch.dtype, biased: bool, spread: bool
) -> None:
    """Of columns side by side, and of every second one."""
    generator = torch.Generator().manual_seed(k * n)
    x = torch.randn((*rows, 2 * k if spread else k), generator=generator).to(dtype)
    x = x[..., ::2] if spread else x
    weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((n, k), (n,)))
    found = wide.linear(x, weight, bias if biased else None)
    wanted = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    terms = x.double().abs() @ weight.double().abs().t() + 4
    unit = torch.finfo(dtype).eps
    assert found.dtype is dtype and found.shape == wanted.shape
    assert bool(((found.double() - wanted).abs() <= 0.51 * unit * wanted.abs() + 1e-6 * terms).all())


def test_a_linear_keeps_to_autocast_and_what_is_not_finite_to_its_row() -> None:
    x, weight = torch.ones(20, 6, dtype=torch.float16), torch.ones(5, 6, dtype=torch.float16)
    x[3, 1] = torch.nan
    found = wide.linear(x, weight)
    assert found[3].isnan().all() and int(found.isnan().sum()) == 5
    with torch.autocast("cpu", torch.bfloat16):
        assert wide.linear(x, weight).dtype is torch.bfloat16
    assert wide.linear(x[:0], weight).shape == (0, 5)
