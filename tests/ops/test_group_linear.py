"""Linears with weights in groups: their integers are those of numpy's int64 arithmetic to the bit, whatever
the shape, set and threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from effcompile.core import torch_compat_memory
from effcompile.core.errors import UsageError
from effcompile.machine import instructions, native
from effcompile.ops import group_codes, group_native, group_tiles, int8_codes
from effcompile.ops.group_linear import fallback_reason, group_linear, refusal, told
from effcompile.ops.workspace import workspace_bytes

LARGEST = 300
BITS = (4, 8)


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    """Kernels or not is said aloud: on a machine without a compiler these tests are of torch's path."""
    reason = fallback_reason()
    assert reason is None or "no C++ compiler" in reason or "x86" in reason, reason


@pytest.fixture(params=["here", "tiles", *instructions.integer_isas(), "by torch"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every instruction set that this machine has, narrow ones too; AMX's tiles of few rows, too."""
    if request.param == "by torch":
        monkeypatch.setattr(group_native, "kernels", lambda: "asked for")
        with pytest.warns(RuntimeWarning, match="asked for"):
            yield request.param
        return
    monkeypatch.setattr(group_tiles, "ROWS", 1 if request.param == "tiles" else 1 << 30)
    if request.param not in ("here", "tiles"):
        made = group_native.GroupKernels(request.param)
        monkeypatch.setattr(group_native, "kernels", lambda: made)
    yield request.param


def numbers(m: int, k: int, n: int, bits: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, codes (N, K), and scales (N, groups) that are powers of two: products with them round nothing."""
    drawn = torch.Generator().manual_seed(seed)
    most = 1 << bits - 1
    codes = torch.randint(-most if bits == 4 else -127, most, (n, k), generator=drawn).to(torch.int8)
    scales = torch.exp2(torch.randint(-3, 3, (n, -(-k // 32)), generator=drawn).float()).to(torch.bfloat16)
    return torch.randn(m, k, generator=drawn), codes, scales


def by_numpy(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The definition, group by group, sums in int64.

    What is added up is rounded as the kernels do: after each group, in order.
    """
    m, k, n = len(x), x.shape[1], len(codes)
    y = np.zeros((m, n), np.float32)
    for group, at in enumerate(range(0, k, 32)):
        here, held = x[:, at : at + 32].numpy(), codes[:, at : at + 32].numpy().astype(np.int64)
        most = np.abs(here).max(1, keepdims=True)
        some = most > 1e-30
        inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=some)
        x_scales = np.where(some, most / np.float32(127), np.float32(0))
        sums = np.rint(here * inverse).astype(np.int64) @ held.T
        both = scales[:, group].float().numpy() * x_scales
        y = (y.astype(np.float64) + sums.astype(np.float64) * both.astype(np.float64)).astype(np.float32)
    return torch.from_numpy(y)


def product(x: Tensor, codes: Tensor, scales: Tensor, bits: int, *more: object) -> Tensor:
    return group_linear(x, group_codes.pack(codes, scales, bits), len(codes), *more)


def whole(m: int, k: int) -> Tensor:
    """Rows of whole numbers whose scales are 1 in every group: results of the kernels are exact, whatever
    they add first.
    """
    x = torch.randint(-127, 128, (m, k), generator=torch.Generator().manual_seed(m * k)).float()
    x[:, ::32] = 127.0
    return x


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 40), k=st.integers(1, LARGEST), n=st.integers(1, LARGEST), bits=st.sampled_from(BITS),
    threads=st.integers(1, 3), seed=st.integers(0, 99), from_rows=st.sampled_from((1, 1 << 30)),
)  # fmt: skip
def test_equals_numpy_to_the_bit(
    m: int, k: int, n: int, bits: int, threads: int, seed: int, from_rows: int
) -> None:
    _, codes, scales = numbers(m, k, n, bits, seed)
    x = whole(m, k)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group_tiles, "ROWS", from_rows)
            assert torch.equal(product(x, codes, scales, bits), by_numpy(x, codes, scales))
    finally:
        torch.set_num_threads(before)


@settings(max_examples=60, deadline=None)
@given(m=st.integers(1, 60), k=st.integers(1, LARGEST), n=st.integers(1, 90), bits=st.sampled_from(BITS))
def test_tiles_are_the_few_rows_kernels_to_the_bit(m: int, k: int, n: int, bits: int) -> None:
    """Any numbers, so that a text read at once is the text read token by token."""
    found, tiles = group_native.kernels(), group_tiles.kernels()
    if isinstance(found, str) or isinstance(tiles, str):
        pytest.skip("this processor has no AMX, or no C++ compiler is there")
    x, codes, scales = numbers(m, k, n, bits)
    given = (group_codes.pack(codes, scales, bits), n, torch.randn(n), "silu")
    assert torch.equal(tiles.linear(x, *given), found.linear(x, *given))


@pytest.mark.parametrize("bits", BITS)
def test_every_instruction_set(isa: str, bits: int) -> None:
    """Whole tiles and what is left over, and the largest sums of a group: those of 4 bits fill 15
    of 16 bits.
    """
    for m, k, n in ((1, 1, 1), (2, 32, 16), (15, 67, 33), (29, 256, 96), (5, 300, 17)):
        _, codes, scales = numbers(m, k, n, bits)
        x = whole(m, k)
        codes[0], codes[-1], x[0] = codes.max(), codes.min(), 127.0
        x[-1] = torch.where(torch.arange(k) % 2 == 0, 127.0, -127.0)
        assert torch.equal(product(x, codes, scales, bits), by_numpy(x, codes, scales)), (m, k, n)


@pytest.mark.parametrize("bits", BITS)
def test_activations_of_any_size(isa: str, bits: int) -> None:
    """Groups are scaled apart: a large number in one does not drown another."""
    x, codes, scales = numbers(9, 130, 37, bits)
    x *= torch.logspace(-6, 6, 130)
    torch.testing.assert_close(
        product(x, codes, scales, bits), by_numpy(x, codes, scales), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("after", int8_codes.AFTER)
def test_what_follows(after: str, isa: str) -> None:
    x, codes, scales = numbers(9, 40, 37, 4)
    x, bias = x * torch.logspace(-4, 0.5, 9)[:, None] / 10, torch.randn(37)
    z = by_numpy(x, codes, scales).double() + bias
    functional = torch.nn.functional
    wanted = {
        "none": lambda: z, "gelu": lambda: functional.gelu(z),
        "gelu_tanh": lambda: functional.gelu(z, approximate="tanh"), "silu": lambda: functional.silu(z),
        "relu": lambda: functional.relu(z),
    }[after]()  # fmt: skip
    torch.testing.assert_close(
        product(x, codes, scales, 4, bias, after).double(), wanted, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("bits", BITS)
def test_what_is_not_finite_stays_in_its_row(isa: str, bits: int) -> None:
    x, codes, scales = numbers(8, 50, 20, bits)
    bias = torch.randn(20)
    x[1, 3], x[2, 49], x[3, 0], x[4], x[6] = torch.nan, torch.inf, -torch.inf, 0.0, 1e-40
    found = product(x, codes, scales, bits, bias)
    assert found[1:4].isnan().all()
    assert torch.equal(found[4], bias) and torch.equal(found[6], bias)
    rest = [0, 5, 7]
    torch.testing.assert_close(found[rest], by_numpy(x[rest], codes, scales) + bias, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["here", *instructions.integer_isas(), "by torch"])
def coder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Codes of weights by the kernel of every instruction set, and by torch."""
    if request.param != "here":
        made = "asked for" if request.param == "by torch" else group_codes.Coder(request.param)
        monkeypatch.setattr(group_codes, "kernels", lambda: made)
    return str(request.param)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 40), k=st.integers(1, 130), bits=st.sampled_from(BITS), seed=st.integers(0, 99))
def test_compiled_codes_leave_as_little_as_torchs(n: int, k: int, bits: int, seed: int) -> None:
    """Where two scales leave as good as the same, either is right."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    whole = torch.nn.functional.pad(weight, (0, -k % 32)).double().view(n, -1, 32)
    left = []
    for codes, scales in (group_codes.quantize(weight, bits), group_codes.quantize_by_torch(weight, bits)):
        assert codes.shape == (n, k) and scales.dtype is torch.bfloat16 and bool((scales != 0).all())
        stood = (
            torch.nn.functional.pad(codes, (0, -k % 32)).double().view(n, -1, 32) * scales.double()[..., None]
        )
        left.append((stood - whole).square().sum(2))
    torch.testing.assert_close(*left, rtol=1e-5, atol=0)


def test_what_the_coder_does_not_take_is_torchs() -> None:
    wide = torch.randn(12, 96)
    for weight in (wide.t(), wide[:, ::2], wide.bfloat16(), wide.double()):
        codes, scales = group_codes.quantize(weight, 8)
        right = group_codes.quantize_by_torch(weight, 8)
        assert torch.equal(codes, right[0]) and torch.equal(scales, right[1])
        assert group_codes.rounded(weight, 8).dtype is weight.dtype


@pytest.mark.parametrize("bits", BITS)
def test_a_weight_is_rounded_to_its_codes(bits: int, coder: str) -> None:
    """Against a loop over groups; zeros and what is not finite, too."""
    weight = torch.randn(7, 70) * torch.logspace(-5, 5, 70)
    weight[2, 32:64], weight[3, 5], weight[4, 69] = 0.0, torch.nan, torch.inf
    found = group_codes.rounded(weight, bits)
    for row, at in ((row, at) for row in range(7) for at in range(0, 70, 32)):
        group = weight[row, at : at + 32].double()
        if not group.isfinite().all():
            assert found[row, at : at + 32].isnan().all()
            continue
        extreme, low, high = group[group.abs().argmax()], *((-8, 7) if bits == 4 else (-127, 127))
        tried = {}
        for part in (-8, -7.5) if bits == 4 else (127, 126.6, 127.4):
            scale = ((extreme if bits == 4 else extreme.abs()) / part).float().bfloat16().double()
            steps = (group / scale).round().clamp(low, high) * scale if scale else torch.zeros_like(group)
            tried[float((steps - group).square().sum())] = steps
        torch.testing.assert_close(found[row, at : at + 32].double(), tried[min(tried)], rtol=1e-6, atol=0)
    finite = weight[:2]
    error = (group_codes.rounded(finite, bits) - finite).abs()
    peaks = (
        torch.nn.functional.pad(finite, (0, 26)).view(2, 3, 32).abs().amax(2).repeat_interleave(32, 1)[:, :70]
    )
    assert (error <= peaks * (1 / 8 if bits == 4 else 1 / 127)).all()


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 70), k=st.integers(1, 130), bits=st.sampled_from(BITS))
def test_packing_goes_back(n: int, k: int, bits: int) -> None:
    _, codes, scales = numbers(1, k, n, bits)
    packed = group_codes.pack(codes, scales, bits)
    assert (
        packed.nbytes == -(-n // 16) * -(-k // 32) * (32 + 64 * bits) and group_codes.bits_of(packed) == bits
    )
    assert all(
        torch.equal(a, b) for a, b in zip(group_codes.unpack(packed, n, k), (codes, scales), strict=True)
    )


@pytest.mark.parametrize("leading", [(0,), (1,), (2, 3), (2, 0, 3)])
def test_layouts_of_x(leading: tuple[int, ...]) -> None:
    _, codes, scales = numbers(1, 12, 5, 4)
    wide = torch.randn(*leading, 30)
    for x in (wide[..., 1:13], wide[..., ::2][..., :12], torch.randn(12, *leading).movedim(0, -1)):
        wanted = product(x.reshape(-1, 12).contiguous(), codes, scales, 4).view(*leading, 5)
        assert torch.equal(product(x, codes, scales, 4), wanted)


def test_rows_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_native, "_CHUNK", 1 << 10)
    monkeypatch.setattr(group_tiles, "ROWS", 1 << 30)
    _, codes, scales = numbers(101, 70, 90, 4)
    x = whole(101, 70)
    assert torch.equal(product(x, codes, scales, 4), by_numpy(x, codes, scales))


def test_as_an_operator() -> None:
    x, codes, scales = numbers(6, 40, 18, 4)
    arguments = (x, group_codes.pack(codes, scales, 4), 18, torch.randn(18), "gelu")
    opcheck(group_linear.default, arguments, test_utils=("test_schema", "test_faketensor"))
    with FlopCounterMode(display=False) as counter:
        group_linear(*arguments)
    assert counter.get_total_flops() == 2 * 6 * 40 * 18


@pytest.mark.parametrize("rows", [1, 37])
def test_workspace_is_what_the_allocator_says(rows: int) -> None:
    x, codes, scales = numbers(rows, 50, 24, 8)
    arguments = (x, group_codes.pack(codes, scales, 8), 24)
    group_linear(*arguments)
    with torch_compat_memory.watched_memory("cpu") as peak:
        group_linear(*arguments)
    if fallback_reason() is None:
        assert workspace_bytes(group_linear.default, arguments) == peak() - 4 * rows * 24


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x, w, n, b: (x.double(), w, n, b), "float64"),
        (lambda x, w, n, b: (x[:, :5], w, n, b), r"x \(3, 5\)"),
        (lambda x, w, n, b: (x, w[:, :1], n, b), "weight"),
        (lambda x, w, n, b: (x, w[..., :-1], n, b), "weight"),
        (lambda x, w, n, b: (x, w, 33, b), "33 outputs"),
        (lambda x, w, n, b: (x, w, n, b[:, None]), "bias"),
        (lambda x, w, n, b: (x, w, n, b, "tanh"), "tanh"),
    ],
)
def test_what_does_not_fit_is_refused(change, said: str) -> None:  # type: ignore[no-untyped-def]
    x, codes, scales = numbers(3, 40, 20, 4)
    with pytest.raises(UsageError, match=said):
        group_linear(*change(x, group_codes.pack(codes, scales, 4), 20, torch.randn(20)))


def test_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not of 64" in str(refusal(64))
    assert refusal(32) is None or fallback_reason() is not None
    monkeypatch.setattr(group_native, "kernels", lambda: "no compiler")
    assert str(refusal(32)) == "no compiler" and told() == "torch (no compiler)"


@pytest.mark.skipif("avx2" not in instructions.integer_isas(), reason="this processor has no AVX2")
def test_wrong_kernels_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = group_native.GroupKernels("avx2")
    linear = group_native.GroupKernels.linear
    assert made.objection() is None
    monkeypatch.setattr(group_native.GroupKernels, "linear", lambda *arguments: linear(*arguments) * 1.01)
    assert "wrong product" in str(made.objection())


def test_tiles_take_rows_in_chunks() -> None:
    """So many columns that a core's cache holds the codes of fewer rows than there are."""
    found, tiles = group_native.kernels(), group_tiles.kernels()
    if isinstance(found, str) or isinstance(tiles, str):
        pytest.skip("this processor has no AMX, or no C++ compiler is there")
    x, codes, scales = numbers(37, 50_000, 17, 4)
    packed = group_codes.pack(codes, scales, 4)
    assert torch.equal(tiles.linear(x, packed, 17, None, "none"), found.linear(x, packed, 17, None, "none"))


def test_wrong_tiles_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = group_tiles.kernels()
    if isinstance(made, str):
        pytest.skip("this processor has no AMX, or no C++ compiler is there")
    assert made.objection() is None
    assert f"amx_int8 from {group_tiles.ROWS} rows" in told()
    by_torch = group_codes.linear_by_torch
    monkeypatch.setattr(group_codes, "linear_by_torch", lambda *arguments: by_torch(*arguments) * 1.01)
    assert "wrong product" in str(made.objection())


def test_other_processors_have_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_tiles, "kernels", lambda: "no AMX")
    x, codes, scales = numbers(40, 64, 16, 4)
    torch.testing.assert_close(product(x, codes, scales, 4), by_numpy(x, codes, scales), rtol=1e-5, atol=1e-5)
    assert "amx" not in told()


def test_tiles_compile() -> None:
    """On a processor without AMX, too."""
    if fallback_reason() is not None or instructions.on_arm():
        pytest.skip("there is no compiler, or this processor has no such kernels")
    assert native.compiled(group_tiles._SOURCE, {"WIDTH": group_tiles._WIDTH}, group_tiles.ISA).exists()


@pytest.mark.parametrize(
    "isa", [isa for isa in sorted(group_native.TILES) if isa.startswith("neon") == instructions.on_arm()]
)
def test_every_instruction_set_compiles(isa: str) -> None:
    """Those that this processor has not are compiled too."""
    if fallback_reason() is not None:
        pytest.skip("there is no compiler, or this processor has no such kernels")
    width, rows, vecs = group_native.TILES[isa]
    assert native.compiled(group_native._SOURCE, {"WIDTH": width, "ROWS": rows, "VECS": vecs}, isa).exists()
