"""Attentions in bf16, and linears before them that give bf16, as steps of a tape: to the bit what the
operators give alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from effcompile.machine import instructions
from effcompile.ops import bf16_attention as module
from effcompile.ops import int8_codes, int8_native
from effcompile.ops.bf16_attention import HeldTiles, bf16_attention
from effcompile.ops.int8_held import HeldLinear, HeldMlp
from effcompile.ops.int8_linear import int8_linear
from effcompile.ops.rows_held import HeldAdd
from effcompile.ops.tape import Columns, Tape, TapeStep

WIDTH, HEADS = 64, 4

needs_kernels = pytest.mark.skipif(
    module.fallback_reason() is not None or isinstance(int8_native.kernels(), str),
    reason="there is no kernel here",
)


@pytest.fixture(autouse=True)
def threads_as_they_are() -> Iterator[None]:
    here = torch.get_num_threads()
    yield
    torch.set_num_threads(here)


def linear(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return int8_codes.pack(codes), torch.rand(n) / 500, torch.randn(n)


def heads(part: Tensor, count: int) -> Tensor:
    return part.unflatten(2, (count, -1)).transpose(1, 2)


def in_one_call(run: Tape) -> bool:
    """Whether all that it was called with was taken by the kernels."""
    return bool(run._kept) and all(kept is not None for kept in run._kept.values())


def masks(kind: str, batch: int, count: int, queries: int, keys: int) -> Tensor | None:
    return {
        "bool": lambda: torch.rand(batch, 1, queries, keys) < 0.6,
        "of heads": lambda: torch.rand(batch, count, queries, keys) < 0.6,
        "row": lambda: torch.rand(batch, 1, 1, keys) < 0.6,
        "plane": lambda: torch.rand(queries, keys) < 0.6,
        "same": lambda: (torch.rand(batch, 1, queries, 1) < 0.7).expand(-1, -1, -1, keys),
        "numbers": lambda: torch.randn(1, 1, queries, keys),
        "numbers of heads": lambda: torch.randn(1, count, queries, keys),
    }.get(kind, lambda: None)()


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2),
    groups=st.integers(1, 2),
    shared=st.integers(1, 3),
    rows=st.tuples(st.integers(1, 70), st.integers(1, 100)),
    width=st.sampled_from([1, 8, 16, 31, 32, 40, 64, 100]),
    masked=st.sampled_from(
        ["no", "causal", "bool", "of heads", "row", "plane", "same", "numbers", "numbers of heads"]
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_it_is_the_operator_of_columns(
    batch: int,
    groups: int,
    shared: int,
    rows: tuple[int, int],
    width: int,
    masked: str,
    dtype: torch.dtype,
    threads: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    (queries, keys), count = rows, groups * shared
    q = torch.randn(batch, queries, count * width + 8).to(dtype)[..., 3 : 3 + count * width]
    both = torch.randn(batch, keys, 2 * groups * width).to(dtype)
    k, v = both.chunk(2, -1)
    mask, causal = masks(masked, batch, count, queries, keys), masked == "causal"
    held = HeldTiles(count, groups, width, width, causal, 0.3)
    reads = (0, 1, 2) if mask is None else (0, 1, 2, 3)
    run = Tape([TapeStep(held, reads)], len(reads), [len(reads)])
    found = run(q, k, v, *([] if mask is None else [mask]))[0]
    wanted = bf16_attention(heads(q, count), heads(k, groups), heads(v, groups), mask, causal, 0.3)
    assert torch.equal(found, wanted.transpose(1, 2).flatten(2)) and found.dtype is torch.float32
    assert found.is_contiguous() and in_one_call(run)


@needs_kernels
def test_what_the_kernel_does_not_take_runs_as_the_operator() -> None:
    held, wide = HeldTiles(4, 2, 16, 16, False, 0.3), HeldTiles(4, 2, 16, 8, False, 0.3)
    x, y = torch.randn(2, 9, 64), torch.randn(2, 9, 32)
    bad = torch.randn(9, 9).t()
    cases = (
        (held, (x.double(), y.double(), y.double())),
        (held, (x.bfloat16(), y, y)),
        (held, (x, y, y, bad)),
        (held, (x, y, y, bad.double())),
        (wide, (x, y, y[..., :16])),
    )
    for does, read in cases:
        run = Tape([TapeStep(does, tuple(range(len(read))))], len(read), [len(read)])
        q, k, v, *mask = read
        wanted = bf16_attention(heads(q, 4), heads(k, 2), heads(v, 2), *mask, scale=0.3)
        assert torch.equal(run(*read)[0], wanted.transpose(1, 2).flatten(2))
        assert not in_one_call(run)


@pytest.mark.parametrize("isa", ["amx_bf16", "avx512_bf16", "none"])
def test_every_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa not in (*instructions.bf16_isas(), "none"):
        pytest.skip(f"this processor has no {isa}")
    kernels = "asked for" if isa == "none" else module.AttentionTiles(isa)
    monkeypatch.setattr(module, "kernels", lambda: kernels)
    monkeypatch.setattr(HeldTiles, "_kernels", staticmethod(lambda: kernels))
    run = Tape([TapeStep(HeldTiles(4, 4, 16, 16, True, None), (0, 0, 0))], 1, [1])
    x = torch.randn(2, 40, 64)
    wanted = bf16_attention(*[heads(x, 4)] * 3, is_causal=True).transpose(1, 2).flatten(2)
    assert torch.equal(run(x)[0], wanted)
    assert in_one_call(run) == (isa != "none")


def test_a_narrow_linear_gives_bf16() -> None:
    """As a result, in memory of its own: the input that is given up has as many bytes, and another dtype."""
    weights = linear(2 * WIDTH, WIDTH)
    for given_up in ((), (0,)):
        run = Tape([TapeStep(HeldLinear(*weights, narrow=True), (0,))], 1, [1], given_up)
        for x in (torch.randn(2, 70, WIDTH), torch.randn(2, 70, 2 * WIDTH)[..., ::2], torch.randn(1, WIDTH)):
            wanted = int8_linear(x, *weights, "none", True)
            found = run(x.clone())[0]
            assert found.dtype is torch.bfloat16 and torch.equal(found, wanted)


def layer(narrow: bool) -> list[TapeStep]:
    """Of an encoder over x and a mask, with its heads in one linear."""
    width = WIDTH // HEADS
    return [
        TapeStep(HeldLinear(*linear(3 * WIDTH, WIDTH), narrow=narrow), (0,)),
        *(TapeStep(Columns(at * WIDTH, WIDTH), (2,)) for at in range(3)),
        TapeStep(HeldTiles(HEADS, HEADS, width, width, False, None), (3, 4, 5, 1)),
        TapeStep(HeldMlp(None, "none", linear(WIDTH, WIDTH)), (6, 0)),
        TapeStep(HeldMlp(linear(4 * WIDTH, WIDTH), "gelu", linear(WIDTH, 4 * WIDTH)), (7, 7)),
    ]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_layer_with_narrow_projections(threads: int) -> None:
    """What it gives of projections in fp32, to the bit."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    narrow = layer(True)
    torch.manual_seed(0)
    whole = Tape(layer(False), 2, [8])
    run = Tape(narrow, 2, [8])
    for batch, rows in ((2, 40), (1, 70), (2, 40), (1, 3)):
        x, mask = torch.randn(batch, rows, WIDTH), torch.rand(batch, 1, rows, rows) > 0.2
        steps = [step.does for step in narrow]
        q, k, v = (heads(part, HEADS) for part in steps[0](x).chunk(3, -1))  # type: ignore[operator]
        assert q.dtype is torch.bfloat16
        seen = bf16_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        added = steps[5](seen, x)  # type: ignore[operator]
        found = run(x, mask)[0]
        assert torch.equal(found, steps[6](added, added))  # type: ignore[operator]
        assert torch.equal(found, whole(x, mask)[0])
    if module.fallback_reason() is None and not isinstance(int8_native.kernels(), str):
        taken = [key for key, kept in run._kept.items() if kept is not None]
        assert len(taken) == 2, "of few rows an MLP is no one kernel's"


@needs_kernels
def test_narrow_projections_take_half_of_the_memory() -> None:
    x, mask = torch.randn(2, 80, WIDTH), torch.rand(2, 1, 80, 80) > 0.2
    kept = []
    for narrow in (True, False):
        run = Tape(layer(narrow)[:5], 2, [6])
        run(x, mask)
        kept += run._kept.values()
    assert kept[1].nbytes - kept[0].nbytes == 2 * x.numel() * 3


@needs_kernels
def test_what_is_bf16_where_fp32_is_read_runs_one_by_one() -> None:
    weights = linear(WIDTH, WIDTH)
    run = Tape([TapeStep(HeldLinear(*weights, narrow=True), (0,)), TapeStep(HeldAdd(), (1, 0))], 1, [2])
    x = torch.randn(2, 20, WIDTH)
    assert torch.equal(run(x)[0], int8_linear(x, *weights, "none", True) + x)
    assert not in_one_call(run)
