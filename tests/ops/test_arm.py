"""The kernels as an ARM runs them: compiled for aarch64 with warnings as errors, and run under qemu, on a
processor that has the instruction set that is meant and none above it, against their definitions.

Never timed, and on no ARM: see docs/machines.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import emulated
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from effcompile.machine import hardware, instructions, native
from effcompile.ops import (
    block_sparse_native,
    cached_attention,
    few_rows,
    fp32_attention,
    fp32_linear,
    group_codes,
    group_native,
    int8_codes,
    int8_native,
    int8_sparse,
    loss_rows,
    recurrence_native,
    rows,
    rows_native,
    states8,
    states8_native,
)
from effcompile.ops.block_sparse_dense import dense_weight
from effcompile.ops.block_sparse_native import KernelForm
from effcompile.ops.instruction_sets import WORDS
from effcompile.ops.sparse_codes import SparseCodes

needs_compiler = pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing()))
needs_emulator = pytest.mark.skipif(
    emulated.missing_emulator() is not None, reason=str(emulated.missing_emulator())
)
INTEGERS = ("neon", "neon_dotprod", "neon_i8mm")
#: Which are of AMX or AVX512-VNNI alone.
OF_X86 = {
    "int13_linear",
    "attention_backward_tiles",
    "attention_tiles",
    "bf16_linear",
    "group_tiles",
    "int8_attention",
    "int8_mlp",
}
#: Compiled for each set of integers.
CHOSEN = {"int8_linear", "group_linear", "group_codes", "int8_sparse", "rows", "few_rows", "cached_attention"}
MODULES = (
    int8_native,
    group_native,
    group_codes,
    int8_sparse,
    rows_native,
    cached_attention,
    few_rows,
    fp32_attention,
    fp32_linear,
    block_sparse_native,
    states8_native,
    loss_rows,
    recurrence_native,
)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiles for ARM, and lets no warning pass."""
    monkeypatch.setenv("CXX", f"{emulated.COMPILER} -Wall -Wextra -Werror -Wno-unknown-pragmas")


@pytest.fixture(scope="module")
def emulator() -> Iterator[emulated.Emulator]:
    made = emulated.Emulator()
    yield made
    made.close()


@pytest.fixture
def arm(compiler: None, emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of kernels made from here on call those of an emulated ARM."""
    for module in MODULES:
        monkeypatch.setattr(module, "library", emulator.library)


def of_integers(name: str, isa: str) -> dict[str, int]:
    """The macros of a source that is compiled for each set of integers."""
    tiles = {"group_linear": group_native.TILES, "int8_sparse": int8_sparse._TILES}.get(name, {})
    sizes = dict(zip(("WIDTH", "ROWS", "VECS"), tiles.get(isa, (4,)), strict=False))
    return int8_native.macros(isa) if name == "int8_linear" else sizes


@needs_compiler
@pytest.mark.parametrize("isa", INTEGERS)
@pytest.mark.parametrize("name", sorted(CHOSEN))
def test_what_is_chosen_by_its_integers_compiles(compiler: None, name: str, isa: str) -> None:
    assert native.compiled(native.SOURCES / f"{name}.cpp", of_integers(name, isa), isa).exists()


@needs_compiler
def test_the_rest_compiles(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floating-point kernels, of which ARM has one form, and what is the same for all machines."""
    monkeypatch.setattr(block_sparse_native, "best_isa", lambda: "neon")
    assert block_sparse_native.onnxruntime_library().exists()
    assert native.compiled(native.SOURCES / "states8.cpp", {}, "neon").exists()
    for name in ("loss_rows", "recurrence", "fp32_attention"):
        assert native.compiled(native.SOURCES / f"{name}.cpp", {"WIDTH": 4}, "neon").exists()
    assert native.compiled(native.SOURCES / "fp32_linear.cpp", fp32_linear.macros("neon"), "neon").exists()
    for name in ("row_program", "tape"):
        assert native.compiled(native.SOURCES / f"{name}.cpp", {}, "generic").exists()
    others = {"block_sparse", "block_sparse_ort", "states8", "row_program", "tape"}
    others |= {"loss_rows", "recurrence", "fp32_attention", "fp32_linear"}
    assert {path.stem for path in native.SOURCES.glob("*.cpp")} == CHOSEN | others | OF_X86


class TestWhichSet:
    """What an ARM is found to have."""

    @pytest.mark.parametrize(
        ("told", "found"),
        [
            ({}, ("neon",)),
            ({"dot": True}, ("neon_dotprod", "neon")),
            ({"dot": True, "i8mm": True, "sve": True}, INTEGERS[::-1]),
            ({"i8mm": True}, ("neon",)),
        ],
    )
    def test_by_what_torch_tells(
        self, told: dict[str, bool], found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("aarch64", "arm64"):
            monkeypatch.setattr(instructions.platform, "machine", lambda name=name: name)
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told)
            assert instructions.integer_isas() == instructions.tile_isas() == found
            assert instructions.best_isa() == "neon" and not instructions.bf16_isas()

    def test_each_has_flags_and_tiles(self) -> None:
        for isa in INTEGERS:
            tables = (int8_native.TILES, group_native.TILES, int8_sparse._TILES, WORDS)
            assert all(isa in table for table in (*tables, native.ISA_FLAGS))

    def test_the_machine_is_named_by_what_linux_tells(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told = {"Features": "fp asimd asimddp i8mm sve", "CPU implementer": "0x41", "CPU part": "0xd40"}
        monkeypatch.setattr(hardware, "_cpu_entry", lambda name: told.get(name, ""))
        machine = hardware.this_hardware()
        assert machine.cpu == "ARM implementer 0x41, part 0xd40"
        assert machine.instructions.split(";")[0] == "asimd asimddp i8mm sve"

    def test_what_its_compiler_refuses_is_the_next_best(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The compiler of this machine, where it knows no ARM, refuses all three and says so."""
        monkeypatch.setattr(int8_native, "tile_isas", lambda: INTEGERS[::-1])
        int8_native.kernels.cache_clear()
        found = int8_native.kernels()
        int8_native.kernels.cache_clear()
        if not instructions.on_arm():
            assert isinstance(found, str) and found.count("cannot compile") + found.count("no C++") == 3


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ragged(at: int) -> tuple[int, int, int]:
    """Rows 1 to 40, columns and outputs that are multiples of nothing."""
    return at, 1 + at * 53 % 211, 1 + at * 29 % 71


def unusual(x: Tensor) -> Tensor:
    """With rows that are not finite, zeros, as good as zeros, and as large as can be."""
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[row, x.shape[1] * row // 3] = value
    x[3], x[4] = 0.0, 1e-40
    x[5] = torch.finfo(torch.float32).max * torch.sign(x[5])
    return x


def same(found: Tensor, right: Tensor) -> None:
    """To the bit, but that one NaN is as good as another."""
    assert torch.equal(found.isnan(), right.isnan()) and torch.equal(found.nan_to_num(7), right.nan_to_num(7))


@needs_emulator
@pytest.mark.parametrize("isa", INTEGERS)
class TestIntegers:
    """Sums of products are exact, and what is made of them is one multiplication: equal to the bit."""

    def test_dense(self, isa: str, arm: None) -> None:
        kernels = int8_native.ByteKernels(isa)
        assert kernels.objection() is None
        for m, k, n in (*map(ragged, range(1, 41)), (19, 1536, 16), (300, 20, 17)):
            x, scales = torch.randn(m, k, generator=drawn(m)), torch.rand(n, generator=drawn(m)) + 0.1
            codes = torch.randint(-127, 128, (n, k), generator=drawn(m)).to(torch.int8)
            codes[0], codes[-1], x[0] = 127, -127, 1.0
            x = unusual(x) if m > 5 else x
            packed = int8_codes.pack(codes)
            right = int8_codes.linear_by_torch(x, packed, scales, None, "none")
            same(kernels.linear(x, packed, scales, None, "none"), right)
            same(kernels.linear(x, packed, scales, None, "none", narrow=True), right.bfloat16())

    def test_in_groups(self, isa: str, arm: None) -> None:
        """Whole numbers throughout: of scales that are 1 the sum over groups is exact, too."""
        kernels = group_native.GroupKernels(isa)
        assert kernels.objection() is None
        for at, bits in itertools.product(range(1, 41), group_codes.BITS):
            m, k, n = ragged(at)
            most = 127 if bits == 8 else 7
            x = torch.randint(-127, 128, (m, k), generator=drawn(at)).float()
            codes = torch.randint(-most, most + 1, (n, k), generator=drawn(at)).to(torch.int8)
            x[:, ::32], codes[0], codes[-1] = 127.0, most, -8 if bits == 4 else -127
            packed = group_codes.pack(codes, torch.ones(n, -(-k // 32), dtype=torch.bfloat16), bits)
            if m > 2:
                x[0, 0], x[1, -1] = torch.nan, -torch.inf
            right = group_codes.linear_by_torch(x, packed, n, None, "none")
            same(kernels.linear(x, packed, n, None, "none"), right)

    def test_codes_of_weights(self, isa: str, arm: None) -> None:
        """Against torch's, rests of groups, zeros and what is no number, too."""
        assert group_codes.Coder(isa).objection() is None

    def test_sparse(self, isa: str, arm: None) -> None:
        kernels = int8_sparse.SparseByteKernels(isa)
        assert kernels.objection() is None
        for m, k, n in map(ragged, range(1, 41)):
            x, scales = torch.randn(m, k, generator=drawn(m)), torch.rand(n, generator=drawn(m)) + 0.1
            codes = torch.randint(-127, 128, (n, k), generator=drawn(m)).to(torch.int8)
            codes[:, torch.rand(k, generator=drawn(m)) < 0.7] = 0
            x = unusual(x) if m > 5 else x
            found = kernels.linear(x, SparseCodes.of(codes), scales, None, "none")
            same(found, int8_codes.linear_by_torch(x, int8_codes.pack(codes), scales, None, "none"))

    def test_what_follows_and_threads(self, isa: str, arm: None) -> None:
        kernels, before = int8_native.ByteKernels(isa), torch.get_num_threads()
        x, bias = torch.randn(37, 70, generator=drawn(0)), torch.randn(53, generator=drawn(1))
        codes = torch.randint(-127, 128, (53, 70), generator=drawn(2)).to(torch.int8)
        packed, scales = int8_codes.pack(codes), torch.full((53,), 0.003)
        try:
            torch.set_num_threads(2)
            alone = int8_codes.linear_by_torch(x, packed, scales, None, "none").double() + bias
            for after in int8_codes.AFTER:
                found = kernels.linear(x, packed, scales, bias, after).double()
                right = int8_codes.followed(alone, after)
                torch.testing.assert_close(found, right, rtol=2e-6, atol=1e-6)
        finally:
            torch.set_num_threads(before)


@needs_emulator
class TestFloats:
    """What is computed in fp32 and 16 bits, close to the definition."""

    def test_rows(self, arm: None) -> None:
        kernels = rows_native.RowKernels("neon")
        assert kernels.objection() is None
        for m, d, half in map(ragged, range(1, 41)):
            x, y = torch.randn(m, d, generator=drawn(m)), torch.randn(m, d, generator=drawn(m + 50))
            weight = torch.randn(d, generator=drawn(m + 99))
            x[m // 2, d // 2] = torch.inf if m % 5 == 0 else 0.5
            close = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
            right = rows.rms_norm_by_torch(x, y, weight, 1e-5)
            for found, wanted in zip(kernels.rms_norm(x, y, weight, 1e-5), right[:2], strict=True):
                torch.testing.assert_close(found, wanted, **close)
            normed = F.layer_norm(x + y, (d,), weight, None, 1e-3)
            torch.testing.assert_close(kernels.add_layer_norm(x, y, weight, None, 1e-3), normed, **close)
            torch.testing.assert_close(kernels.swiglu(x * 9, y), rows.swiglu_by_torch(x * 9, y), **close)
            turned = torch.randn(2, m, 3, 2 * half, generator=drawn(m)).transpose(1, 2)
            cos, sin = (torch.randn(1, m, 2 * half, generator=drawn(m + at)) for at in (1, 2))
            wanted = rows.rotary_by_torch(turned, cos, sin, False)
            torch.testing.assert_close(kernels.rotary(turned, cos, sin), wanted, **close)

    def test_recurrences_of_states(self, arm: None) -> None:
        assert recurrence_native.RecurrenceKernels("neon").objection() is None

    def test_linears_of_few_rows(self, arm: None) -> None:
        kernels = few_rows.FewRows("neon")
        assert kernels.objection() is None
        for m, n, k in map(ragged, range(1, 25)):
            x, weight = torch.randn(m, k, generator=drawn(m)), torch.randn(n, k, generator=drawn(n))
            found = kernels.linear(x, weight, weight[:, 0].contiguous())
            right = F.linear(x.double(), weight.double(), weight[:, 0].double())
            torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)

    def test_linears(self, arm: None) -> None:
        assert fp32_linear.FloatKernels("neon").objection() is None

    def test_rows_of_a_loss(self, arm: None) -> None:
        kernels = loss_rows.LossRows("neon")
        assert kernels.objection() is None
        for m, n, _ in map(ragged, range(1, 20)):
            z = torch.randn(m, n, generator=drawn(m))
            index, factors = torch.arange(m).remainder(n)[:, None], torch.randn(m, 1, generator=drawn(n))
            wanted = (z.softmax(1) - torch.zeros_like(z).scatter_(1, index, 1.0)) * factors
            kernels.run(z, index, 1.0, factors=factors)
            torch.testing.assert_close(z, wanted, rtol=1e-5, atol=1e-6)

    def test_attention_over_a_cache(self, arm: None) -> None:
        kernels = cached_attention.AttentionKernels("neon")
        assert kernels.objection() is None
        for keys, width in ((1, 1), (3, 64), (65, 33), (130, 128)):
            q = torch.randn(1, 4, 2, width, generator=drawn(keys))
            k, v = (torch.randn(1, 2, keys, width, generator=drawn(keys + at)) for at in (1, 2))
            seen = torch.rand(1, 1, 2, keys, generator=drawn(keys)) < 0.6
            for mask in (None, seen):
                found = kernels.attention(q, k, v, mask, 0.2)
                right = cached_attention.by_torch(q, k, v, mask, 0.2)
                torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)

    def test_attention(self, arm: None) -> None:
        kernels = fp32_attention.AttentionRows("neon")
        assert kernels.objection() is None
        for keys, width in ((1, 1), (3, 64), (65, 33), (130, 128)):
            q = torch.randn(1, 4, 19, width, generator=drawn(keys))
            k, v = (torch.randn(1, 2, keys, width, generator=drawn(keys + at)) for at in (1, 2))
            seen = torch.rand(1, 1, 19, keys, generator=drawn(keys)) < 0.6
            for mask in (None, seen, torch.randn(1, 1, 19, keys, generator=drawn(keys))):
                found = kernels.attention(q, k, v, mask, False, 0.2)
                right = fp32_attention.by_torch(q, k, v, mask, False, 0.2)
                torch.testing.assert_close(found, right, rtol=1e-5, atol=2e-6)

    @pytest.mark.parametrize(
        ("block", "dtype"),
        [(1, torch.float32), (4, torch.float32), (16, torch.float32), (16, torch.bfloat16)],
    )
    def test_block_sparse(self, arm: None, block: int, dtype: torch.dtype) -> None:
        kernels = block_sparse_native.Kernels(KernelForm.of(dtype, block, "neon"), "neon")
        assert kernels.objection() is None
        crow, col = torch.tensor([0, 2, 2, 3], dtype=torch.int32), torch.tensor([0, 2, 1], dtype=torch.int32)
        values = torch.randn(3, block, block, generator=drawn(3)).to(dtype)
        weight = dense_weight(values.double(), crow, col, 3 * block)
        for m in (1, 2, 5, 13, 40):
            x = torch.randn(m, 3 * block, generator=drawn(m)).to(dtype)
            right = x.double() @ weight.T
            limit = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(
                kernels.linear(x, values, crow, col, None).double(), right, rtol=limit, atol=limit
            )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_adam_on_8_bits(self, arm: None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(states8_native, "best_isa", lambda: "neon")
        made = states8_native.CompiledAdam8()
        given = adam_arguments(dtype)
        ours, theirs = [t.clone() for t in given], [t.clone() for t in given]
        figures = (0.01, 0.8, 0.95, 0.1, 1e-8, 3, True)
        made(*ours, *figures)
        states8.adam8_by_torch(*theirs, *figures)
        for found, right in zip(ours, theirs, strict=True):
            if found.dtype is torch.uint8:
                assert int((found.int() - right.int()).abs().max()) <= 1  # at a tie
            else:
                torch.testing.assert_close(
                    found, right, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-6
                )


def adam_arguments(dtype: torch.dtype, blocks: int = 5) -> list[Tensor]:
    """Parameter, gradient, codes and scales of both states, and the two tables of codes."""
    count = 256 * blocks
    p, grad = (torch.randn(count, generator=drawn(at)).to(dtype) for at in (1, 2))
    codes = [torch.randint(0, 256, (count,), generator=drawn(at)).to(torch.uint8) for at in (3, 4)]
    scales = [torch.rand(blocks, generator=drawn(at)) + 0.1 for at in (5, 6)]
    signed, unsigned = torch.linspace(-1, 1, 256), torch.linspace(0, 1, 256)
    return [p, grad, codes[0], scales[0], codes[1], scales[1], signed, unsigned]
