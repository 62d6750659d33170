"""Patterns: every way in and out agrees, the transposed indices are the transposed pattern's, and bad ones
are refused in words.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effcompile.core.errors import UsageError
from effcompile.sparse import BLOCKS, BlockPattern

sizes = st.integers(1, 6)


def pattern(rows: int, cols: int, block: int, sparsity: float, seed: int) -> BlockPattern:
    generator = torch.Generator().manual_seed(seed)
    return BlockPattern.random(rows * block, cols * block, block, sparsity, generator)


@settings(max_examples=60, deadline=None)
@given(
    rows=sizes,
    cols=sizes,
    block=st.sampled_from(BLOCKS[:4]),
    sparsity=st.sampled_from([0.0, 0.3, 0.7, 0.99]),
    seed=st.integers(0, 9),
)
def test_a_dense_weight_comes_back_with_zeros_outside_the_pattern(
    rows: int, cols: int, block: int, sparsity: float, seed: int
) -> None:
    kept = pattern(rows, cols, block, sparsity, seed)
    weight = torch.randn(kept.rows, kept.cols)
    assert torch.equal(kept.to_dense(kept.values_of(weight)), weight * kept.mask())
    again, values = BlockPattern.from_dense(weight * kept.mask(), block)
    assert again == kept and torch.equal(values, kept.values_of(weight))
    assert (
        BlockPattern.from_mask(kept.mask(), block) == kept == BlockPattern.from_blocks(kept.blocks(), block)
    )
    assert kept.nnz == round(rows * cols * (1 - sparsity)) and kept.density == pytest.approx(
        kept.nnz / (rows * cols)
    )


@settings(max_examples=40, deadline=None)
@given(rows=sizes, cols=sizes, sparsity=st.sampled_from([0.0, 0.5, 0.9]), seed=st.integers(0, 9))
def test_transposed_indices_are_those_of_the_transposed_weight(
    rows: int, cols: int, sparsity: float, seed: int
) -> None:
    kept = pattern(rows, cols, 4, sparsity, seed)
    weight = torch.randn(kept.rows, kept.cols)
    turned, values = kept.transposed(), kept.values_of(weight)
    assert turned == BlockPattern.from_mask(kept.mask().T, 4)
    assert torch.equal(turned.to_dense(values[kept.perm].transpose(1, 2)), kept.to_dense(values).T)


def test_equal_to_torchs_bsr() -> None:
    kept = pattern(5, 3, 4, 0.5, 1)
    weight = torch.randn(20, 12) * kept.mask()
    theirs = weight.to_sparse_bsr((4, 4))
    ours = BlockPattern.from_indices(20, 12, 4, theirs.crow_indices(), theirs.col_indices())
    assert ours == kept and torch.equal(theirs.values(), kept.values_of(weight))


def test_places_follow_the_blocks() -> None:
    old, new = pattern(6, 5, 4, 0.5, 1), pattern(6, 5, 4, 0.4, 2)
    weight = torch.randn(24, 20)
    places, values = new.places_in(old), old.values_of(weight)
    both = new.values_of(weight * old.mask())
    assert torch.equal(values[places.clamp(min=0)] * (places >= 0).view(-1, 1, 1), both)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: BlockPattern.random(24, 40, 16, 0.5),
            r"nearest first: 8, 4, 1\. Or pad the weight to \(32, 48\)",
        ),
        (lambda: BlockPattern.random(24, 40, 3, 0.5), "A block is one of 1, 4, 8, 16, 32, 64; given 3"),
        (lambda: BlockPattern.random(24, 40, 8, 1.0), r"in \[0, 1\); given 1.0"),
        (lambda: BlockPattern.random(24, 40, 8, -0.1), r"in \[0, 1\); given -0.1"),
        (lambda: BlockPattern.from_mask(torch.ones(8), 1), "2 axes"),
        (lambda: BlockPattern.from_blocks(torch.ones(3, 3), 4), "Boolean"),
        (lambda: pattern(2, 2, 4, 0.0, 0).values_of(torch.ones(8, 12)), "another model"),
        (lambda: pattern(2, 2, 4, 0.0, 0).to_dense(torch.ones(3, 4, 4)), r"\(4, 4, 4\); given \(3, 4, 4\)"),
        (lambda: pattern(2, 2, 4, 0.0, 0).places_in(pattern(2, 3, 4, 0.0, 0)), "one weight and block size"),
    ],
)
def test_bad_patterns_are_refused(make, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=says):
        make()


@pytest.mark.parametrize(
    ("crow", "col", "says"),
    [
        ([0, 1], [0], "3 row pointers"),
        ([0, 2, 1], [0], "ascend from 0"),
        ([0, 1, 3], [0, 1], "to 3"),
        ([1, 1, 2], [0, 1], "from 1"),
        ([0, 1, 2], [0, 2], "from 0 to 1; given 0 to 2"),
        ([0, 1, 2], [-1, 0], "given -1 to 0"),
        ([0, 2, 2], [1, 0], "ascend, each block once"),
        ([0, 2, 2], [1, 1], "ascend, each block once"),
    ],
)
def test_bad_indices_are_refused(crow: list[int], col: list[int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        BlockPattern.from_indices(8, 8, 4, torch.tensor(crow), torch.tensor(col))


def test_nothing_kept_is_a_pattern() -> None:
    empty = BlockPattern.from_mask(torch.zeros(8, 12), 4)
    assert empty.nnz == 0 and torch.equal(empty.to_dense(torch.empty(0, 4, 4)), torch.zeros(8, 12))
    assert empty.transposed() == BlockPattern.from_mask(torch.zeros(12, 8), 4)
