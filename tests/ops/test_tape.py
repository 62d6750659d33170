"""Operators as one call give what they give one by one, and take no more memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from effcompile.ops import int8_codes, rows_native, tape
from effcompile.ops.fp32_attention import HeldAttention
from effcompile.ops.int8_held import HeldLinear, HeldMlp
from effcompile.ops.rows_held import HeldAdd, HeldGate, HeldNorm, HeldRmsNorm, HeldTurn
from effcompile.ops.tape import Columns, Second, Tape, TapeStep

WIDTH, HEADS = 32, 4


def linear(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return int8_codes.pack(codes), torch.rand(n) / 500, torch.randn(n)


def norm() -> tuple[Tensor, Tensor, float]:
    return torch.randn(WIDTH), torch.randn(WIDTH), 1e-5


def layers(count: int, *, kept: bool = False) -> tuple[list[TapeStep], list[int]]:
    """Of an encoder with merged q, k, v, over x and a mask, and its results: `kept`: of each layer."""
    steps, x, results = list[TapeStep](), 0, list[int]()

    def put(does: object, *reads: int) -> int:
        steps.append(TapeStep(does, reads))  # type: ignore[arg-type]
        return 1 + len(steps)

    for _ in range(count):
        merged = put(HeldLinear(*linear(3 * WIDTH, WIDTH)), x)
        parts = [put(Columns(at * WIDTH, WIDTH), merged) for at in range(3)]
        width = WIDTH // HEADS
        seen = put(HeldAttention(HEADS, HEADS, width, width, False, None), *parts, 1)
        added = put(HeldMlp(None, "none", linear(WIDTH, WIDTH), norm()), seen, x)
        mlp = HeldMlp(linear(4 * WIDTH, WIDTH), "gelu", linear(WIDTH, 4 * WIDTH), norm())
        x = put(mlp, added, added)
        results.append(x)
    return steps, results if kept else results[-1:]


def by_torch(steps: list[TapeStep], results: list[int], *inputs: Tensor) -> list[Tensor]:
    """Each as a plain function."""
    values, seconds = list(inputs), list[Tensor]()
    for step in steps:
        if step.does is Second:
            values.append(seconds.pop())
            continue
        read = [values[at] for at in step.reads if at is not None]
        does = step.does
        columns = isinstance(does, Columns)
        made: Any = read[0].narrow(-1, does.start, does.count) if columns else does(*read)  # type: ignore
        values.append(made if isinstance(made, Tensor) else made[0])
        seconds += [] if isinstance(made, Tensor) else made[1:]
    return [values[at] for at in results]


def drawn(batch: int, rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, rows, WIDTH), torch.rand(batch, 1, rows, rows) > 0.2


@pytest.mark.parametrize("kept", [False, True])
def test_an_encoder(kept: bool) -> None:
    steps, results = layers(2, kept=kept)
    run = Tape(steps, 2, results, [0])
    for batch, rows in ((2, 40), (1, 70), (2, 40), (1, 3), (0, 8), (2, 40)):
        x, mask = drawn(batch, rows)
        right = by_torch(steps, results, x, mask)
        for found, wanted in zip(run(x.clone(), mask), right, strict=True):
            assert torch.equal(found, wanted)


def test_what_a_process_makes_tensors_of_is_nothing_to_it() -> None:
    steps, results = layers(1)
    run, (x, mask) = Tape(steps, 2, results), drawn(2, 70)
    right, before = by_torch(steps, results, x, mask)[0], torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert torch.equal(run(x, mask)[0], right)
    finally:
        torch.set_default_dtype(before)


def test_an_input_that_is_not_given_up_stays() -> None:
    steps, results = layers(1)
    x, mask = drawn(2, 70)
    before = x.clone()
    Tape(steps, 2, results)(x, mask)
    assert torch.equal(x, before)


def test_what_no_kernel_takes_runs_one_by_one() -> None:
    steps, results = layers(1)
    run = Tape(steps, 2, results)
    x, mask = drawn(2, 70)
    apart = torch.randn(2, 70, 2 * WIDTH)[..., :WIDTH]
    for given_x, given_mask in ((apart, mask), (x, mask.mT), (x, mask)):
        right = by_torch(steps, results, given_x, given_mask)[0]
        assert torch.equal(run(given_x, given_mask)[0], right)


def test_threads_that_call_at_once_have_places_of_their_own() -> None:
    steps, results = layers(2)
    run, wrong = Tape(steps, 2, results), list[int]()

    def work(seed: int) -> None:
        x, mask = drawn(1, 64)
        right = by_torch(steps, results, x, mask)[0]
        wrong.extend(seed for _ in range(20) if not torch.equal(run(x, mask)[0], right))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "_runner", lambda: None)
    steps, results = layers(1)
    x, mask = drawn(1, 64)
    assert torch.equal(Tape(steps, 2, results)(x, mask)[0], by_torch(steps, results, x, mask)[0])


def test_norms() -> None:
    held = HeldNorm(*norm())
    alone, both = Tape([TapeStep(held, (0,))], 1, [1]), Tape([TapeStep(held, (0, 1))], 2, [2])
    for x in (torch.randn(3, 5, WIDTH), torch.randn(3, WIDTH, 5).mT, torch.randn(0, WIDTH)):
        torch.testing.assert_close(alone(x)[0], held(x))
        torch.testing.assert_close(both(x, x.flip(0))[0], held(x, x.flip(0)))


def test_a_sum_that_nothing_reads_lies_where_nothing_else_does() -> None:
    """The last norm makes one: it was written over the first input, a caller's own, or what lay there."""
    final = HeldRmsNorm(torch.randn(WIDTH), 1e-6, pair=True)
    steps = [TapeStep(HeldAdd(), (0, 1)), TapeStep(final, (2, 1)), TapeStep(HeldAdd(), (3, 2))]
    for given_up in ((), (0,)):
        x, y = torch.randn(2, 3, 70, WIDTH)
        before, right = x.clone(), by_torch(steps, [3, 4], x, y)
        found = Tape(steps, 2, [3, 4], given_up)(x, y)
        assert given_up or torch.equal(x, before)
        assert all(map(torch.equal, found, right))


def test_sums() -> None:
    """Of dense values of one shape by the kernel; of others as torch has them."""
    run, twice = (Tape([TapeStep(HeldAdd(), reads)], 2, [2]) for reads in ((0, 1), (1, 1)))
    x = torch.randn(3, 70, WIDTH)
    x[1, 2, 3] = torch.nan
    for first, other in ((x, x.flip(0)), (x.mT.contiguous().mT, x), (x, x[:1]), (x[:, :0], x[:, :0])):
        torch.testing.assert_close(run(first, other)[0], first + other, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(twice(first, other)[0], other + other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_decoder_layer(batch: int) -> None:
    """RMSNorms with their sums, rotations, a causal attention and a gate, over x, cos and sin."""
    width = WIDTH // HEADS
    steps = [
        TapeStep(HeldRmsNorm(torch.randn(WIDTH), 1e-6, pair=False), (0,)),
        TapeStep(HeldLinear(*linear(3 * WIDTH, WIDTH)), (3,)),
        *(TapeStep(Columns(at * WIDTH, WIDTH), (4,)) for at in range(3)),
        TapeStep(HeldTurn(HEADS, width), (5, 1, 2)),
        TapeStep(HeldTurn(HEADS, width), (6, 1, 2)),
        TapeStep(HeldAttention(HEADS, HEADS, width, width, True, None), (8, 9, 7)),
        TapeStep(HeldLinear(*linear(WIDTH, WIDTH)), (10,)),
        TapeStep(HeldRmsNorm(torch.randn(WIDTH), 1e-6, pair=True), (0, 11)),
        TapeStep(Second, (12,)),
        TapeStep(HeldLinear(*linear(6 * WIDTH, WIDTH)), (12,)),
        TapeStep(Columns(0, 3 * WIDTH), (14,)),
        TapeStep(Columns(3 * WIDTH, 3 * WIDTH), (14,)),
        TapeStep(HeldGate(), (15, 16)),
        TapeStep(HeldLinear(*linear(WIDTH, 3 * WIDTH)), (17,)),
    ]
    run = Tape(steps, 3, [18, 13], [0])
    for rows in (70, 5, 70):
        x, cos, sin = torch.randn(batch, rows, WIDTH), *torch.randn(2, 1, rows, width)
        right = by_torch(steps, [18, 13], x, cos, sin)
        for found, wanted in zip(run(x, cos, sin), right, strict=True):
            assert torch.equal(found, wanted)


def test_gates_whose_rows_lie_apart() -> None:
    both = torch.randn(3, 5, 70)
    for gate, up in (
        (both[..., :30], both[..., 40:]),
        (both[:, :1, :30], both[:, :1, 40:]),
        (both[..., :35].mT, both[..., 35:].mT),
        (both[:0, :, :4], both[:0, :, :4]),
        (both[..., ::2], both[..., 1::2]),
    ):
        torch.testing.assert_close(rows_native.swiglu(gate, up), torch.nn.functional.silu(gate) * up)
