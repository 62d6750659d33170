"""The block-sparse linear and its gradients: equal to dense in fp64 for any pattern and shape, by every
instruction set and by torch.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from effcompile.core.errors import LoweringError, UsageError
from effcompile.core.torch_compat_memory import peak_of_memory_events
from effcompile.machine import native as compiling
from effcompile.ops import block_sparse_native as native
from effcompile.ops.block_sparse import (
    block_sparse_grad_input,
    block_sparse_grad_values,
    block_sparse_linear,
    fallback_reason,
)
from effcompile.ops.workspace import workspace_bytes
from effcompile.sparse import BLOCKS, BlockPattern

# bf16: the rounding of the result alone is 2⁻⁹
LIMIT = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 8e-3}
WIDER = {"avx512_bf16": "avx512", "avx512": "avx2", "avx2": "generic"}


@pytest.fixture(autouse=True)
def _compiler() -> None:
    """Kernels or not is said aloud: on a machine without a compiler these tests are of torch's path."""
    for dtype in (torch.float32, torch.bfloat16):
        reason = fallback_reason(torch.empty(1, 16, dtype=dtype), 16)
        assert reason is None or "no C++ compiler" in reason, reason


def isas() -> list[str]:
    """All instruction sets that this machine has, narrow ones too."""
    found = [native.best_isa()]
    while found[-1] in WIDER:
        found.append(WIDER[found[-1]])
    return found


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mistakes(pattern: BlockPattern, x: Tensor, bias: Tensor | None = None) -> list[str]:
    """Which of the three products differ from dense ones in fp64."""
    dtype = x.dtype
    values = numbers(pattern.nnz, pattern.block, pattern.block, dtype=dtype, seed=1)
    grad = numbers(*x.shape[:-1], pattern.rows, dtype=dtype, seed=2)
    weight = pattern.to_dense(values.double())
    flat_x, flat_grad = x.double().reshape(-1, pattern.cols), grad.double().reshape(-1, pattern.rows)
    shift = 0 if bias is None else bias.double()
    right = {
        "y": (x.double() @ weight.T + shift, x.double().abs() @ weight.T.abs()),
        "dx": (grad.double() @ weight, grad.double().abs() @ weight.abs()),
        "dvalues": (
            pattern.values_of(flat_grad.T @ flat_x),
            pattern.values_of(flat_grad.T.abs() @ flat_x.abs()),
        ),
    }
    made = {
        "y": block_sparse_linear(x, values, *pattern.indices, bias),
        "dx": block_sparse_grad_input(grad, values, *pattern.indices),
        "dvalues": block_sparse_grad_values(grad, x, pattern.crow, pattern.col),
    }
    wrong = []
    for name, ours in made.items():
        wanted, terms = right[name]
        assert ours.shape == wanted.shape and ours.dtype == dtype and ours.is_contiguous()
        # a sum that nearly cancels is off by rounding of its terms: of few values that is more than LIMIT of
        # their own size
        if not (ours.double() - wanted).norm() <= max(
            LIMIT[dtype] * wanted.norm(), torch.finfo(dtype).eps * terms.norm()
        ):
            wrong.append(name)
    return wrong


@settings(max_examples=40, deadline=None)
@given(
    block=st.sampled_from(BLOCKS), block_rows=st.integers(1, 9), block_cols=st.integers(1, 9),
    sparsity=st.sampled_from([0.0, 0.4, 0.8, 0.95]),
    leading=st.sampled_from([(0,), (1,), (3, 5), (47,), (2, 2, 33), (200,)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), biased=st.booleans(),
    layout=st.sampled_from(["whole", "columns", "rows", "transposed"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_equals_dense(
    block: int, block_rows: int, block_cols: int, sparsity: float, leading: tuple[int, ...],
    dtype: torch.dtype, biased: bool, layout: str, seed: int,
) -> None:  # fmt: skip
    pattern = BlockPattern.random(
        block_rows * block, block_cols * block, block, sparsity, torch.Generator().manual_seed(seed)
    )
    k = pattern.cols
    x = {
        "whole": lambda: numbers(*leading, k, dtype=dtype),
        "columns": lambda: numbers(*leading, k + 3, dtype=dtype)[..., 1 : k + 1],
        "rows": lambda: numbers(2 * leading[0], *leading[1:], k, dtype=dtype)[::2],
        "transposed": lambda: numbers(k, *leading, dtype=dtype).movedim(0, -1),
    }[layout]()
    assert mistakes(pattern, x, numbers(pattern.rows, dtype=dtype, seed=3) if biased else None) == []


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set(
    isa: str, block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "best_isa", lambda: isa)
    pattern = BlockPattern.random(3 * block, 5 * block, block, 0.4, torch.Generator().manual_seed(block))
    for m in (5, 149):
        assert (
            mistakes(pattern, numbers(m, pattern.cols, dtype=dtype), numbers(pattern.rows, dtype=dtype)) == []
        )


def test_stripes_and_chunks_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many stripes of panels and chunks of rows, by several threads."""
    for name in ("_STRIPE", "_CACHE", "_CHUNK"):
        monkeypatch.setattr(native, name, 1 << 14)
    threads = torch.get_num_threads()
    pattern = BlockPattern.random(96, 64, 8, 0.5, torch.Generator().manual_seed(1))
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for dtype in (torch.float32, torch.bfloat16):
                assert mistakes(pattern, numbers(1000, 64, dtype=dtype)) == []
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_empty_rows_columns_and_patterns(block: int) -> None:
    kept = torch.zeros(5, 6, dtype=torch.bool)
    assert mistakes(BlockPattern.from_blocks(kept, block), numbers(37, 6 * block), numbers(5 * block)) == []
    kept[1, 2] = kept[1, 5] = kept[4, 2] = True
    pattern = BlockPattern.from_blocks(kept, block)
    assert mistakes(pattern, numbers(37, 6 * block), numbers(5 * block)) == []
    y = block_sparse_linear(numbers(3, 6 * block), numbers(3, block, block), *pattern.indices)
    assert torch.equal(y[:, :block], torch.zeros(3, block))  # rows of W without a block


def test_what_is_not_finite_stays_in_its_rows_and_blocks() -> None:
    pattern = BlockPattern.from_blocks(torch.tensor([[True, False], [False, True]]), 4)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(50, 8, dtype=dtype)
        x[7, 5], x[9, 0], x[11, 6] = float("nan"), float("inf"), 3.0e38
        y = block_sparse_linear(x, torch.ones(2, 4, 4, dtype=dtype), *pattern.indices)
        assert y[7, 4:].isnan().all() and y[9, :4].isinf().all() and y[:, :].isfinite().sum() == 50 * 8 - 8


def test_gradients_through_autograd() -> None:
    pattern = BlockPattern.random(12, 8, 4, 0.4, torch.Generator().manual_seed(3))
    x, values = numbers(2, 3, 8, dtype=torch.float64), numbers(pattern.nnz, 4, 4, dtype=torch.float64)
    bias = numbers(12, dtype=torch.float64)
    given = [t.requires_grad_() for t in (x, values, bias)]
    assert torch.autograd.gradcheck(lambda x, v, b: block_sparse_linear(x, v, *pattern.indices, b), given)
    assert torch.autograd.gradcheck(lambda x, v: block_sparse_linear(x, v, *pattern.indices), given[:2])
    loss = block_sparse_linear(x, values.detach(), *pattern.indices, bias).square().sum()
    loss.backward()
    assert values.grad is None and x.grad is not None and bias.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck(dtype: torch.dtype) -> None:
    pattern = BlockPattern.random(12, 8, 4, 0.4, torch.Generator().manual_seed(3))
    x, values = (
        numbers(2, 3, 8, dtype=dtype).requires_grad_(),
        numbers(pattern.nnz, 4, 4, dtype=dtype).requires_grad_(),
    )
    grad = numbers(2, 3, 12, dtype=dtype)
    ours = torch.ops.effcompile
    torch.library.opcheck(
        ours.block_sparse_linear.default,
        (x, values, *pattern.indices, numbers(12, dtype=dtype).requires_grad_()),
    )
    torch.library.opcheck(ours.block_sparse_linear.default, (x, values, *pattern.indices))
    torch.library.opcheck(ours.block_sparse_grad_input.default, (grad, values.detach(), *pattern.indices))
    torch.library.opcheck(
        ours.block_sparse_grad_values.default, (grad, x.detach(), pattern.crow, pattern.col)
    )


def test_flops_are_those_of_the_kept_blocks() -> None:
    pattern = BlockPattern.random(32, 16, 8, 0.5)
    x, values = numbers(3, 5, 16).requires_grad_(), numbers(pattern.nnz, 8, 8).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        block_sparse_linear(x, values, *pattern.indices).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 15 * pattern.nnz * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("whole", [True, False])
def test_workspace_is_within_what_is_said(dtype: torch.dtype, block: int, whole: bool) -> None:
    pattern = BlockPattern.random(320, 256, block, 0.8, torch.Generator().manual_seed(0))
    values, grad = numbers(pattern.nnz, block, block, dtype=dtype), numbers(700, 320, dtype=dtype)
    x = numbers(700, 256, dtype=dtype) if whole else numbers(256, 700, dtype=dtype).T
    ours = torch.ops.effcompile
    calls: dict[Any, tuple[Any, ...]] = {
        ours.block_sparse_linear.default: (x, values, *pattern.indices, numbers(320, dtype=dtype)),
        ours.block_sparse_grad_input.default: (grad, values, *pattern.indices),
        ours.block_sparse_grad_values.default: (grad, x, pattern.crow, pattern.col),
    }
    kernels = fallback_reason(x, block) is None
    for call, args in calls.items():
        call(*args)
        with torch.profiler.profile(profile_memory=True) as profile:
            result = call(*args)
        said, measured = workspace_bytes(call, args), peak_of_memory_events(profile) - result.nbytes
        assert said is not None and measured <= 1.01 * said + 600, (call, said, measured)
        assert not kernels or said <= 1.01 * measured + 600, (call, said, measured)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: a.update(x=numbers(3, 12)), r"\(32, 16\), so that x ends in 16; given \(3, 12\)"),
        (lambda a: a.update(x=numbers(3, 16).double()), "of one dtype; given torch.float64, torch.float32"),
        (lambda a: a.update(bias=numbers(31)), r"a bias \(32\)"),
        (lambda a: a.update(values=numbers(3, 8, 8)), r"values \(3, 8, 8\), col \(4,\)"),
        (lambda a: a.update(values=numbers(4, 8, 4)), r"values \(Z, b, b\)"),
        (lambda a: a.update(col=a["col"].long()), "int32"),
        (lambda a: a.update(col=a["col"] + 2), "col is out of range"),
        (lambda a: a.update(col=a["col"] - 1), "col is out of range"),
        (lambda a: a.update(crow=a["crow"].flip(0)), "crow must ascend from 0"),
        (lambda a: a.update(crow=a["crow"] * 2), "at most the number of values"),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, says: str) -> None:
    pattern = BlockPattern.from_blocks(
        torch.tensor([[True, False], [False, True], [True, False], [False, True]]), 8
    )
    names = ("crow", "col", "ccol", "row", "perm")
    args: dict[str, Any] = {
        "x": numbers(3, 16),
        "values": numbers(4, 8, 8),
        **dict(zip(names, pattern.indices, strict=True)),
        "bias": None,
    }
    change(args)
    with pytest.raises(UsageError, match=says):
        block_sparse_linear(*args.values())
    with pytest.raises(UsageError, match="perm is out of range"):
        block_sparse_grad_input(numbers(3, 32), numbers(4, 8, 8), *pattern.indices[:4], pattern.perm + 1)


# ------------------------------------------------------------------ compiling


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """A cache of its own, and nothing built yet."""
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_found", {})
    return tmp_path


@pytest.mark.parametrize("value", ["no-such-compiler", "false", "true"])
def test_without_a_working_compiler_torch_computes_and_it_says_so(
    value: str, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", value)
    pattern, x = BlockPattern.random(64, 32, 16, 0.5), numbers(9, 32)
    assert mistakes(pattern, x) == []
    reason = fallback_reason(x, 16)
    said = {
        "no-such-compiler": "no C++ compiler: no-such-compiler is not on the PATH",
        "false": "does not run",
        "true": "cannot be loaded",
    }
    assert reason is not None and said[value] in reason


def test_a_source_that_does_not_compile_is_reported_with_the_compilers_words(fresh: Any) -> None:
    source = fresh / "broken.cpp"
    source.write_text("int main( {}")
    with pytest.raises(LoweringError, match=r"cannot compile broken\.cpp: .*error"):
        compiling.library(source, {}, "generic")
    assert list((fresh / "native").iterdir()) == []


def test_wrong_kernels_are_not_used(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        native.Kernels,
        "linear",
        lambda self, x, values, crow, col, bias: torch.zeros(len(x), 3 * self.form.block),
    )
    assert "gave a wrong product" in str(fallback_reason(numbers(2, 16), 16))


def test_other_dtypes_blocks_and_devices_say_why() -> None:
    assert "float32 and bfloat16; these tensors are float16" in str(
        fallback_reason(torch.empty(1, 16, dtype=torch.float16), 16)
    )
    assert "these are of 2" in str(fallback_reason(torch.empty(1, 16), 2))
    assert "on 'meta'" in str(fallback_reason(torch.empty(1, 16, device="meta"), 16))


def test_a_cache_that_others_may_write_is_not_used(fresh: Any) -> None:
    (fresh / "native").mkdir()
    (fresh / "native").chmod(0o777)
    assert fallback_reason(numbers(2, 16), 16) is None
    assert list((fresh / "native").iterdir()) == []


def compiling_child() -> int:
    """A process that asks for the kernel."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            status = 0 if fallback_reason(torch.empty(1, 16), 16) is None else 1
        finally:
            os._exit(status)
    return child


def test_processes_and_threads_compile_the_same_kernel_at_once(fresh: Any) -> None:
    children = [compiling_child() for _ in range(2)]
    reasons: list[str | None] = []
    threads = [
        threading.Thread(target=lambda: reasons.append(fallback_reason(torch.empty(1, 16), 16)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0] and reasons == [None] * 3
    assert len(list((fresh / "native").iterdir())) == 1
