"""Tile lists hold each visible element once, skip what nobody sees, and are FlexAttention's BlockMask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from effcompile.core.errors import UsageError
from effcompile.ops.tiles import TileList


@st.composite
def masks(draw: st.DrawFn, smallest: int = 0) -> Tensor:
    """Bool masks [B, H, Sq, Sk] of ragged sizes, from empty to full, with runs (so that full and empty tiles
    do occur).
    """
    shape = tuple(draw(st.integers(1, 2)) for _ in range(2)) + tuple(
        draw(st.integers(smallest, 13)) for _ in range(2)
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    share, run = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])), draw(st.integers(1, 4))
    rough = torch.rand((*shape[:2], -(-shape[2] // run), -(-shape[3] // run)), generator=generator) < share
    return (
        rough.repeat_interleave(run, 2).repeat_interleave(run, 3)[:, :, : shape[2], : shape[3]].contiguous()
    )


blocks = st.integers(1, 6)


def tiles_of(mask: BlockMask) -> TileList:
    """FlexAttention's lists, walked entry by entry; one without full blocks has only partial tiles."""
    (q_len, k_len), (block_q, block_k) = mask.seq_lengths, mask.BLOCK_SIZE

    def grid(count: Tensor | None, index: Tensor | None) -> Tensor:
        found = torch.zeros((*mask.kv_num_blocks.shape, -(-k_len // block_k)), dtype=torch.bool)
        if count is not None and index is not None:
            for b, h, row in torch.cartesian_prod(*map(torch.arange, count.shape)).tolist():
                found[b, h, row, index[b, h, row, : count[b, h, row]].long()] = True
        return found

    partial, full = (
        grid(mask.kv_num_blocks, mask.kv_indices),
        grid(mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    return TileList.from_grids(partial, full, q_len=q_len, k_len=k_len, block_q=block_q, block_k=block_k)


def covered(tiles: TileList, count: Tensor, index: Tensor) -> Tensor:
    """How often each element lies in a listed tile, by walking the list as a kernel does: int [B,
    H, Sq, Sk].
    """
    batch, heads, rows, _ = index.shape
    hits = torch.zeros(batch, heads, tiles.q_len, tiles.k_len, dtype=torch.int32)
    for b in range(batch):
        for h in range(heads):
            for row in range(rows):
                for column in index[b, h, row, : int(count[b, h, row])].tolist():
                    q, k = row * tiles.block_q, column * tiles.block_k
                    hits[b, h, q : q + tiles.block_q, k : k + tiles.block_k] += 1
    return hits


@settings(deadline=None)
@given(mask=masks(), block_q=blocks, block_k=blocks)
def test_each_visible_element_lies_in_exactly_one_listed_tile(
    mask: Tensor, block_q: int, block_k: int
) -> None:
    tiles = TileList.from_dense(mask, block_q, block_k)
    full = covered(tiles, tiles.full_count, tiles.full_index)
    partial = covered(tiles, tiles.partial_count, tiles.partial_index)
    hits = full + partial
    assert (
        torch.equal(hits[mask], torch.ones_like(hits[mask])) and int(hits.max() if hits.numel() else 0) <= 1
    )
    assert bool(mask[full > 0].all()), "a full tile with a hidden element"
    empty, _, _ = tiles.counts
    nq, nk = -(-tiles.q_len // block_q), -(-tiles.k_len // block_k)
    seen = sum(
        int(tile.flatten(2).any(2).sum())
        for rows in mask.split(block_q, 2)
        for tile in rows.split(block_k, 3)
    )
    assert tiles.visited == seen and empty + seen == mask.shape[0] * mask.shape[1] * nq * nk


@settings(deadline=None)
@given(mask=masks(), block_q=blocks, block_k=blocks)
def test_lists_ascend_and_end_in_zeros(mask: Tensor, block_q: int, block_k: int) -> None:
    tiles = TileList.from_dense(mask, block_q, block_k)
    for count, index in ((tiles.partial_count, tiles.partial_index), (tiles.full_count, tiles.full_index)):
        assert count.dtype == index.dtype == torch.int32
        for n, row in zip(count.flatten().tolist(), index.flatten(0, 2).tolist(), strict=True):
            assert row[:n] == sorted(set(row[:n])) and not any(row[n:])


@settings(deadline=None)
@given(mask=masks(), block_q=blocks, block_k=blocks)
def test_transposed_is_the_list_of_the_transposed_mask(mask: Tensor, block_q: int, block_k: int) -> None:
    tiles = TileList.from_dense(mask, block_q, block_k)
    other = TileList.from_dense(mask.transpose(-1, -2), block_k, block_q)
    for mine, theirs in zip(tiles.transposed().tensors(), other.tensors(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(tiles.transposed().transposed().tensors(), tiles.tensors(), strict=True):
        assert torch.equal(mine, theirs)


@settings(deadline=None, max_examples=30)
@given(mask=masks(smallest=1), block_q=blocks, block_k=blocks)
def test_same_tiles_as_flex_attention(mask: Tensor, block_q: int, block_k: int) -> None:
    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask[b, h, q, k]

    theirs = create_block_mask(mod, *mask.shape, device="cpu", BLOCK_SIZE=(block_q, block_k))
    mine = TileList.from_dense(mask, block_q, block_k)
    for a, b in zip(tiles_of(theirs).tensors(), mine.tensors(), strict=True):
        assert torch.equal(a, b)
    back = mine.to_block_mask(mod)
    assert back.seq_lengths == theirs.seq_lengths and back.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert torch.equal(back.to_dense(), theirs.to_dense())
    assert torch.equal(create_mask(back.mask_mod, *mask.shape, device="cpu"), mask)
    for a, b in zip(tiles_of(back).tensors(), mine.tensors(), strict=True):
        assert torch.equal(a, b)


def test_block_mask_without_full_blocks_is_all_partial() -> None:
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    theirs = create_block_mask(
        lambda b, h, q, k: q >= k, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=4, separate_full_blocks=False
    )
    assert tiles_of(theirs).counts == (1, 0, 3)
    assert TileList.from_dense(mask, 4, 4).counts == (1, 1, 2)


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 0), (0, 5), (5, 0)])
def test_zero_length(q_len: int, k_len: int) -> None:
    tiles = TileList.from_dense(torch.ones(1, 2, q_len, k_len, dtype=torch.bool), 4, 4)
    assert tiles.visited == 0 and tiles.density == 0.0
    assert tiles.transposed().partial_index.shape == (1, 2, -(-k_len // 4), -(-q_len // 4))


def test_expanded_axes_are_listed_once() -> None:
    mask = torch.ones(6, 6, dtype=torch.bool).tril().expand(3, 5, 6, 6)
    tiles = TileList.from_dense(mask, 2, 3)
    assert tiles.partial_index.shape == (1, 1, 3, 2) and tiles.density == tiles.visited / 6


def test_refuses_what_has_no_tiles() -> None:
    with pytest.raises(UsageError, match="float32"):
        TileList.from_dense(torch.zeros(4, 4), 2, 2)
    with pytest.raises(UsageError, match="positive"):
        TileList.from_dense(torch.ones(4, 4, dtype=torch.bool), 0, 2)
