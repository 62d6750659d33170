"""Linears in 8 bits: their integers are those of numpy's int64 arithmetic to the bit, whatever the shape,
instruction set and threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from effcompile.core import torch_compat_memory
from effcompile.core.errors import LoweringError, UsageError
from effcompile.machine import instructions, native
from effcompile.ops import int8_codes, int8_native
from effcompile.ops.int8_linear import fallback_reason, int8_linear, refusal, told
from effcompile.ops.workspace import workspace_bytes

LARGEST = 300


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    """Kernels or not is said aloud: on a machine without a compiler these tests are of torch's path."""
    reason = fallback_reason()
    assert reason is None or "no C++ compiler" in reason or "x86" in reason, reason


@pytest.fixture(params=["here", *instructions.tile_isas(), "by torch"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every instruction set that this machine has, narrow ones too."""
    if request.param == "by torch":
        monkeypatch.setattr(int8_native, "kernels", lambda: "asked for")
        with pytest.warns(RuntimeWarning, match="asked for"):
            yield request.param
        return
    if request.param != "here":
        made = int8_native.ByteKernels(request.param)
        monkeypatch.setattr(int8_native, "kernels", lambda: made)
    yield request.param


def numbers(m: int, k: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, codes (N, K), scales and bias."""
    drawn = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (n, k), generator=drawn).to(torch.int8)
    return (
        torch.randn(m, k, generator=drawn),
        codes,
        torch.rand(n, generator=drawn) + 0.1,
        torch.randn(n, generator=drawn),
    )


def by_numpy(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The definition: one row at a time, sums in int64."""
    rows = []
    for row in x.numpy():
        most = np.abs(row).max()
        inverse, scale = (
            (np.float32(127) / most, most / np.float32(127))
            if most > 1e-30
            else (np.float32(0), np.float32(0))
        )
        quantised = np.rint(row * inverse).astype(np.int64)
        with np.errstate(over="ignore"):
            rows.append(
                (codes.numpy().astype(np.int64) @ quantised).astype(np.float32) * (scales.numpy() * scale)
            )
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, len(scales))


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, LARGEST),
    k=st.integers(1, LARGEST),
    n=st.integers(1, LARGEST),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_equals_numpy_to_the_bit(m: int, k: int, n: int, threads: int, seed: int) -> None:
    x, codes, scales, _ = numbers(m, k, n, seed)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(int8_linear(x, int8_codes.pack(codes), scales), by_numpy(x, codes, scales))
    finally:
        torch.set_num_threads(before)


def test_every_instruction_set(isa: str) -> None:
    """Whole tiles and what is left over, sums that would not fit in 16 bits, several chunks of rows and parts
    of K.
    """
    shapes = (
        (1, 1, 1),
        (2, 4, 16),
        (15, 67, 33),
        (29, 256, 96),
        (5, 300, 17),
        (270, 900, 33),
        (14, 1536, 16),
    )
    for m, k, n in shapes:
        x, codes, scales, _ = numbers(m, k, n)
        codes[0], x[0] = 127, 1.0
        codes[-1] = -127
        assert torch.equal(int8_linear(x, int8_codes.pack(codes), scales), by_numpy(x, codes, scales)), (
            m,
            k,
            n,
        )


def lowered_by_numpy(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The definition where codes are lowered: one row at a time, sums in int64."""
    f = np.float32
    rows = []
    for row in x.numpy():
        above, below = f(0.5) * max(f(0), row.max()), f(0.5) * max(f(0), -row.min())
        half = above + below
        inverse, scale = (f(126.5) / half, half / f(126.5)) if half > 1e-30 else (f(0), f(0))
        lower = np.rint((above - below) * inverse).astype(np.int64)
        quantised = np.rint(row * inverse).astype(np.int64) - lower
        assert np.abs(quantised).max() <= 127
        sums = codes.numpy().astype(np.int64) @ (quantised + lower)
        rows.append(sums.astype(f) * (scales.numpy() * scale))
    return torch.from_numpy(np.stack(rows))


@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 1, 1), (3, 7, 15), (29, 256, 96), (33, 300, 17), (270, 71, 32), (14, 5, 700)]
)
@pytest.mark.parametrize("middle", [0.0, 1.5, -9.0])
def test_codes_are_lowered_by_the_middle_of_their_row(
    m: int, k: int, n: int, middle: float, isa: str
) -> None:
    """Also where the sums of W take more than the panel of the scales of columns."""
    x, codes, scales, _ = numbers(m, k, n)
    x += middle
    columns = torch.rand(k, generator=torch.Generator().manual_seed(1)) + 0.01
    packed = int8_codes.pack(codes, columns)
    assert torch.equal(int8_linear(x, packed, scales), lowered_by_numpy(x * columns, codes, scales))
    held = int8_codes.columns_of(packed, n, k)
    assert held is not None
    assert torch.equal(held, columns)
    assert torch.equal(int8_codes.unpack(packed, n, k), codes)
    assert int8_codes.columns_of(int8_codes.pack(codes), n, k) is None
    for bad in (torch.inf, -torch.inf, torch.nan):
        x[-1, -1] = bad
        found = int8_linear(x, packed, scales)
        assert bool(found[-1].isnan().all())
        assert bool(found[:-1].isfinite().all())
    x[-1] = 0
    assert bool((int8_linear(x, packed, scales)[-1] == 0).all())
    x[0] = 3e38
    assert not bool(int8_linear(x, packed, scales)[0].isnan().any())


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, LARGEST), k=st.integers(1, LARGEST), n=st.integers(1, LARGEST),
    middle=st.floats(-300, 300), threads=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_lowered_ones_equal_numpy_to_the_bit(
    m: int, k: int, n: int, middle: float, threads: int, seed: int
) -> None:
    x, codes, scales, _ = numbers(m, k, n, seed)
    x += middle
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        packed = int8_codes.pack(codes, torch.ones(k))
        assert torch.equal(int8_linear(x, packed, scales), lowered_by_numpy(x, codes, scales))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("after", int8_codes.AFTER)
def test_what_follows(after: str, isa: str) -> None:
    x, codes, scales, bias = numbers(9, 40, 37)
    x *= torch.logspace(-4, 0.5, 9)[:, None]
    z = by_numpy(x, codes, scales / 100).double() + bias
    functional = torch.nn.functional
    wanted = {
        "none": lambda: z, "gelu": lambda: functional.gelu(z),
        "gelu_tanh": lambda: functional.gelu(z, approximate="tanh"), "silu": lambda: functional.silu(z),
        "relu": lambda: functional.relu(z),
    }[after]()  # fmt: skip
    found = int8_linear(x, int8_codes.pack(codes), scales / 100, bias, after)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=1e-6)


def test_what_is_not_finite_stays_in_its_row(isa: str) -> None:
    x, codes, scales, bias = numbers(8, 50, 20)
    x[1, 3], x[2, 49], x[3, 0], x[4] = torch.nan, torch.inf, -torch.inf, 0.0
    x[5] = torch.finfo(torch.float32).max * torch.sign(x[5])
    x[6] = 1e-40
    found = int8_linear(x, int8_codes.pack(codes), scales, bias)
    assert found[1:4].isnan().all()
    assert torch.equal(found[4], bias) and torch.equal(found[6], bias)
    rest = [0, 7]
    torch.testing.assert_close(found[rest], by_numpy(x[rest], codes, scales) + bias, rtol=1e-6, atol=1e-6)
    assert torch.equal(int8_linear(x[5:6], int8_codes.pack(codes), scales), by_numpy(x[5:6], codes, scales))


@pytest.mark.parametrize("leading", [(0,), (1,), (2, 3), (2, 0, 3)])
def test_layouts_of_x(leading: tuple[int, ...]) -> None:
    _, codes, scales, bias = numbers(1, 12, 5)
    packed, wide = int8_codes.pack(codes), torch.randn(*leading, 30)
    for x in (wide[..., 1:13], wide[..., ::2][..., :12], torch.randn(12, *leading).movedim(0, -1)):
        flat = x.reshape(-1, 12)
        wanted = int8_linear(flat.contiguous(), packed, scales, bias).view(*leading, 5)
        assert torch.equal(int8_linear(x, packed, scales, bias), wanted)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 70), k=st.integers(1, 70))
def test_packing_goes_back(n: int, k: int) -> None:
    codes = numbers(1, k, n)[1]
    assert torch.equal(int8_codes.unpack(int8_codes.pack(codes), n, k), codes)


def test_a_weight_and_a_bias_of_any_strides() -> None:
    """As a Conv1D holds its weight: (K, N)."""
    x, codes, scales, bias = numbers(3, 32, 48)
    wanted = int8_linear(x, int8_codes.pack(codes), scales, bias[:1].repeat(48))
    assert torch.equal(
        int8_linear(x, int8_codes.pack(codes.T.contiguous().T), scales, bias[:1].expand(48)), wanted
    )


def test_rows_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_native, "_CHUNK", 1 << 10)
    x, codes, scales, _ = numbers(101, 70, 90)
    assert torch.equal(int8_linear(x, int8_codes.pack(codes), scales), by_numpy(x, codes, scales))


def test_as_an_operator() -> None:
    x, codes, scales, bias = numbers(6, 20, 18)
    arguments = (x, int8_codes.pack(codes), scales, bias, "gelu")
    opcheck(int8_linear.default, arguments, test_utils=("test_schema", "test_faketensor"))
    with FlopCounterMode(display=False) as counter:
        int8_linear(*arguments)
    assert counter.get_total_flops() == 2 * 6 * 20 * 18


@pytest.mark.parametrize("m", [1, 5, 40])
@pytest.mark.parametrize("n", [1, 16, 53, 64])
def test_narrow_results_are_the_others_rounded(isa: str, m: int, n: int) -> None:
    x, codes, scales, bias = numbers(m, 70, n)
    x[0, 3] = torch.nan
    arguments = (x, int8_codes.pack(codes), scales, bias, "gelu")
    narrow = int8_linear(*arguments, narrow=True)
    assert narrow.dtype is torch.bfloat16
    assert torch.equal(narrow.nan_to_num(7.0), int8_linear(*arguments).bfloat16().nan_to_num(7.0))


def test_workspace_is_what_the_allocator_says() -> None:
    x, codes, scales, bias = numbers(37, 50, 24)
    arguments = (x, int8_codes.pack(codes), scales, bias)
    int8_linear(*arguments)
    with torch_compat_memory.watched_memory("cpu") as peak:
        int8_linear(*arguments)
    if fallback_reason() is None:
        assert workspace_bytes(int8_linear.default, arguments) == peak() - 4 * 37 * 24


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x, w, s, b: (x.double(), w, s, b), "float64"),
        (lambda x, w, s, b: (x[:, :5], w, s, b), r"x \(3, 5\)"),
        (lambda x, w, s, b: (x, w[:, :1], s, b), "weight"),
        (lambda x, w, s, b: (x, w, s[:3], b), r"scales \(3,\)"),
        (lambda x, w, s, b: (x, w, s, b[:, None]), "bias"),
        (lambda x, w, s, b: (x, w, s, b, "tanh"), "tanh"),
    ],
)
def test_what_does_not_fit_is_refused(change, said: str) -> None:  # type: ignore[no-untyped-def]
    x, codes, scales, bias = numbers(3, 12, 20)
    with pytest.raises(UsageError, match=said):
        int8_linear(*change(x, int8_codes.pack(codes), scales, bias))


def test_too_deep_for_32_bits() -> None:
    assert refusal(1 << 17) is None or fallback_reason() is not None
    assert "32 bits" in str(refusal((1 << 17) + 1))


class TestChoice:
    """Which instruction set is used, and what is said where the best is not."""

    @pytest.fixture(autouse=True)
    def _anew(self) -> Iterator[None]:
        int8_native.kernels.cache_clear()
        yield
        int8_native.kernels.cache_clear()

    def test_without_a_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        monkeypatch.setattr(int8_native, "tile_isas", lambda: ("avx2",))
        assert "no-such-compiler is not on the PATH" in str(fallback_reason())
        assert "no-such-compiler" in str(refusal(16)) and "no-such-compiler" in told()

    def test_without_instructions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(int8_native, "tile_isas", tuple)
        assert "AVX2" in str(fallback_reason())

    @pytest.mark.skipif("avx2" not in instructions.integer_isas(), reason="this processor has no AVX2")
    def test_the_next_best(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A set that the compiler refuses, one whose kernels are wrong, and one that does."""
        real = int8_native.library

        def refuses(source: object, defines: object, isa: str) -> object:
            if isa == "avx512_vnni":
                raise LoweringError("the compiler does not know -mavx512vnni")
            return real(source, defines, "avx2")  # type: ignore[arg-type]

        monkeypatch.setattr(int8_native, "library", refuses)
        monkeypatch.setattr(int8_native, "tile_isas", lambda: ("avx512_vnni", "avx_vnni", "avx2"))
        wrong = int8_native.ByteKernels.objection
        monkeypatch.setattr(
            int8_native.ByteKernels,
            "objection",
            lambda self: "it is wrong" if self.isa == "avx_vnni" else wrong(self),
        )
        monkeypatch.setitem(int8_native.TILES, "avx_vnni", int8_native.TILES["avx2"])
        found = int8_native.kernels()
        assert isinstance(found, int8_native.ByteKernels)
        assert told() == "avx2 (not a better one: the compiler does not know -mavx512vnni; it is wrong)"

    @pytest.mark.skipif("amx_int8" not in instructions.tile_isas(), reason="this processor has no AMX")
    def test_a_system_that_gives_no_tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Linux refuses the registers to a process that did not ask for them: the next best set is used."""
        real = int8_native.library

        class Refused:
            permitted = staticmethod(lambda: 0)

        def library(source: Path, defines: Mapping[str, int], isa: str) -> object:
            return Refused() if isa == "amx_int8" else real(source, defines, isa)

        monkeypatch.setattr(int8_native, "library", library)
        assert told() == "avx512_vnni (not a better one: the system does not give this process AMX's tiles)"

    @pytest.mark.skipif("avx2" not in instructions.integer_isas(), reason="this processor has no AVX2")
    def test_wrong_kernels_are_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = int8_native.ByteKernels("avx2")
        linear = int8_native.ByteKernels.linear
        monkeypatch.setattr(int8_native.ByteKernels, "linear", lambda *arguments: linear(*arguments) * 1.01)
        assert "wrong product" in str(made.objection())


@pytest.mark.parametrize(
    "isa", [isa for isa in sorted(int8_native.TILES) if isa.startswith("neon") == instructions.on_arm()]
)
def test_every_instruction_set_compiles(isa: str) -> None:
    """Those that this processor has not are compiled too."""
    if fallback_reason() is not None:
        pytest.skip("there is no compiler, or this processor has no such kernels")
    assert native.compiled(int8_native._SOURCE, int8_native.macros(isa), isa).exists()
