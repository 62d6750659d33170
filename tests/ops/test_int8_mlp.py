"""Linears in 8 bits with what lies between and behind them: as the definition in torch has it, whatever shape
and threads.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from effcompile.core import torch_compat_memory
from effcompile.core.errors import UsageError
from effcompile.machine import instructions
from effcompile.ops import int8_codes
from effcompile.ops import int8_mlp as module
from effcompile.ops.int8_mlp import int8_linear_residual, int8_mlp
from effcompile.ops.workspace import workspace_bytes

Linear = tuple[Tensor, Tensor, Tensor | None]


@pytest.fixture(params=["here", "in parts"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "in parts":
        monkeypatch.setattr(module, "kernels", lambda: "asked for")
    return str(request.param)


def linear(n: int, k: int, seed: int, *, biased: bool = True, coding: str = "plain") -> Linear:
    drawn = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (n, k), generator=drawn).to(torch.int8)
    bias = torch.randn(n, generator=drawn) if biased else None
    columns = None if coding == "plain" else torch.rand(k, generator=drawn) + 0.5
    return (
        int8_codes.pack(codes, columns),
        (torch.rand(n, generator=drawn) + 0.1) / (127 * k**0.5),
        bias,
    )


def rows(m: int, k: int, seed: int) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, right: Tensor) -> bool:
    """Up to some codes that are rounded the other way: what is between differs in its last bits, and in
    parts it is not rounded to bf16.
    """
    return bool((found - right).abs().max() <= 3e-2 * right.abs().max() + 1e-6)


def test_there_is_a_kernel_where_the_processor_multiplies_bytes_widely() -> None:
    reason = module.fallback_reason()
    assert (reason is None) == bool({"amx_int8", "avx512_vnni"} & set(instructions.tile_isas())), reason


@pytest.mark.parametrize("isa", ["amx_int8", "avx512_vnni"])
def test_every_set_is_right(isa: str) -> None:
    if isa not in instructions.tile_isas():
        pytest.skip(f"this processor has no {isa}")
    assert module.MlpKernels(isa).objection() is None


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 300),
    k=st.integers(1, 300),
    between=st.integers(1, 300),
    n=st.integers(1, 300),
    after=st.sampled_from(int8_codes.AFTER),
    behind=st.sampled_from(["", "residual", "norm", "bare norm"]),
    biased=st.booleans(),
    threads=st.integers(1, 3),
    codings=st.tuples(*[st.sampled_from(["plain", "lowered"])] * 2),
)
def test_it_is_the_definition_at_every_shape(
    m: int,
    k: int,
    between: int,
    n: int,
    after: str,
    behind: str,
    biased: bool,
    threads: int,
    codings: tuple[str, str],
) -> None:
    found = module.kernels()
    if isinstance(found, str):
        pytest.skip(found)
    x, residual = rows(m, k, 1), rows(m, n, 2) if behind else None
    first, last, alone = (
        linear(n_of, k_of, seed, biased=biased, coding=coding)
        for n_of, k_of, seed, coding in (
            (between, k, 3, codings[0]),
            (n, between, 4, codings[1]),
            (n, k, 4, codings[0]),
        )
    )
    weights = (rows(1, n, 5)[0], rows(1, n, 6)[0]) if behind == "norm" else (None, None)
    told: module.Behind = (residual, *weights, 1e-3 if "norm" in behind else None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        both, one = found.mlp(x, first, after, last, told), found.mlp(x, None, "none", alone, told)
    finally:
        torch.set_num_threads(before)
    right = module.mlp_by_torch(x, first, after, last, told)
    lone = n < 4 and "norm" in behind  # the norm of so few numbers is one of their rounding
    assert close(both, right) or lone
    # nearly all codes are the same ones
    assert lone or (both - right).norm() <= 1e-2 * right.norm() + 1e-6
    right = module.mlp_by_torch(x, None, "none", alone, told)
    assert torch.allclose(one, right, rtol=1e-4, atol=1e-5) or lone


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_nan_or_infinity_is_nan_and_no_other(bad: float, way: str) -> None:
    x = rows(70, 40, 0)
    x[33, 7] = bad
    made = int8_mlp(x, *linear(50, 40, 1), "none", *linear(30, 50, 2))
    assert made[33].isnan().all() and made[[*range(33), *range(34, 70)]].isfinite().all()


def test_rows_of_zeros_and_of_large_numbers(way: str) -> None:
    x = rows(64, 40, 0)
    x[3], x[5] = 0, x[5] * 1e30
    first, last = linear(50, 40, 1, biased=False), linear(30, 50, 2, biased=False)
    made = int8_mlp(x, *first, "none", *last)
    right = module.mlp_by_torch(x, first, "none", last, (None, None, None, None))
    assert not made[3].any() and close(made[5], right[5]) and close(made[:3], right[:3])


def test_leading_axes_strides_and_few_rows_give_the_same(way: str) -> None:
    first, last = linear(50, 40, 1), linear(40, 50, 2)
    x = rows(3 * 32, 40, 0).view(3, 32, 40)
    whole = int8_mlp(x, *first, "gelu", *last, x, None, None, 1e-5)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert close(int8_mlp(turned, *first, "gelu", *last, turned, None, None, 1e-5), whole)
    assert close(int8_mlp(x[:1, :2], *first, "gelu", *last, x[:1, :2], None, None, 1e-5), whole[:1, :2])
    alone = int8_linear_residual(x, *linear(40, 40, 2), x, None, None, 1e-5)
    assert torch.allclose(
        int8_linear_residual(x[:1, :2], *linear(40, 40, 2), x[:1, :2], None, None, 1e-5),
        alone[:1, :2],
        atol=1e-5,
    )


def test_what_is_behind_in_another_dtype_or_layout_gives_the_same(way: str) -> None:
    x, first, last = rows(64, 40, 0), linear(50, 40, 1), linear(24, 50, 2)
    residual, weight, bias = rows(64, 24, 3), rows(1, 24, 4)[0], rows(1, 24, 5)[0]
    whole = int8_mlp(x, *first, "gelu", *last, residual, weight, bias, 1e-5)
    strided = torch.stack((weight, bias), 1)
    assert close(int8_mlp(x, *first, "gelu", *last, residual, strided[:, 0], strided[:, 1], 1e-5), whole)
    wide = int8_mlp(x, *first, "gelu", *last, residual.double())
    assert close(wide.float(), int8_mlp(x, *first, "gelu", *last, residual))
    assert close(
        int8_mlp(x, *first, "gelu", *last, residual[:1]), int8_mlp(x, *first, "gelu", *last) + residual[:1]
    )


def test_what_does_not_fit_is_told() -> None:
    first, last = linear(50, 40, 1), linear(30, 50, 2)
    for arguments in (
        (rows(64, 41, 0), *first, "gelu", *last),
        (rows(64, 40, 0), *first, "gelu", *linear(30, 40, 2)),
    ):
        with pytest.raises(UsageError, match="8 bits"):
            int8_mlp(*arguments)
    with pytest.raises(UsageError, match="tanh"):
        int8_mlp(rows(64, 40, 0), *first, "tanh", *last)


def test_torch_can_trace_and_count_them(way: str) -> None:
    x, first, last = rows(64, 40, 0), linear(50, 40, 1), linear(40, 50, 2)
    opcheck(int8_mlp.default, (x, *first, "gelu", *last, x, None, None, 1e-5))
    opcheck(int8_linear_residual.default, (x, *linear(40, 40, 2), x, None, None, None))
    with FlopCounterMode(display=False) as counted:
        int8_mlp(x, *first, "gelu", *last)
        int8_linear_residual(x, *linear(40, 40, 2), x)
    assert counted.get_total_flops() == 2 * 64 * (40 * 50 + 50 * 40 + 40 * 40)


@pytest.mark.parametrize("count", [8, 96])
def test_workspace_covers_what_the_allocator_hands_out(way: str, count: int) -> None:
    x, first, last = rows(count, 40, 0), linear(50, 40, 1), linear(24, 50, 2)
    residual = rows(count, 24, 3)
    for operator, arguments in (
        (int8_mlp, (x, *first, "gelu", *last, residual, None, None, 1e-5)),
        (int8_linear_residual, (x, *linear(24, 40, 2), residual, None, None, 1e-5)),
    ):
        operator(*arguments)
        with torch_compat_memory.memory_profile() as profile:
            operator(*arguments)
        beside = torch_compat_memory.peak_of_memory_events(profile) - 4 * count * 24
        said = workspace_bytes(operator.default, arguments)
        assert said is not None and beside <= said
        whole = way == "here" and module.fallback_reason() is None and count > 8
        assert said == beside or not whole
