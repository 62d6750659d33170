"""Closed forms of masks: recovered exactly or not at all, with the tiles that the dense mask has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from effcompile.core.mask import Edge, MaskForm
from effcompile.ops.tiles import TileList
from effcompile.ops.visibility import Visibility, recover
from effcompile.report.masks import mask_words

TERMS = ("lo", "hi", "chunk", "q_ids", "valid", "mask")


def terms(form: Visibility) -> set[str]:
    return {name for name in TERMS if getattr(form, name) is not None and (name != "chunk" or form.chunk)}


def documents(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def brute(form: Visibility, batch: int, q_len: int, k_len: int) -> Tensor:
    """The definition, element by element."""
    mask = torch.zeros(batch, 1, q_len, k_len, dtype=torch.bool)
    for b in range(batch):
        for i in range(q_len):
            for j in range(k_len):
                seen = (form.lo is None or j - i >= form.lo) and (form.hi is None or j - i <= form.hi)
                seen = seen and (not form.chunk or i // form.chunk == j // form.chunk)
                if form.q_ids is not None and form.k_ids is not None:
                    seen = seen and bool(
                        form.q_ids[b % len(form.q_ids), i] == form.k_ids[b % len(form.k_ids), j]
                    )
                mask[b, 0, i, j] = seen and (form.valid is None or bool(form.valid[b % len(form.valid), j]))
    return mask


@st.composite
def forms(draw: st.DrawFn) -> tuple[Visibility, int, int, int]:
    """A conjunction of closed forms, and sizes (batch, Sq, Sk)."""
    batch, q_len, k_len = draw(st.integers(1, 2)), draw(st.integers(1, 12)), draw(st.integers(1, 12))

    def labels(length: int, top: int) -> Tensor:
        rows = st.lists(st.integers(0, top), min_size=length, max_size=length)
        return torch.tensor([draw(rows) for _ in range(draw(st.sampled_from([1, batch])))])

    ids = draw(st.booleans()) and draw(st.booleans())
    form = Visibility(
        lo=draw(st.none() | st.integers(-12, 4)),
        hi=draw(st.none() | st.integers(-4, 12)),
        chunk=draw(st.sampled_from([0, 0, 2, 3, 5])),
        q_ids=labels(q_len, 2) if ids else None,
        k_ids=labels(k_len, 2) if ids else None,
        valid=labels(k_len, 1).bool() if draw(st.booleans()) else None,
    )
    return form, batch, q_len, k_len


@settings(deadline=None, max_examples=150)
@given(drawn=forms(), block_q=st.integers(1, 5), block_k=st.integers(1, 5))
def test_dense_is_the_definition_and_tiles_are_those_of_the_dense_mask(
    drawn: tuple[Visibility, int, int, int], block_q: int, block_k: int
) -> None:
    form, batch, q_len, k_len = drawn
    dense = form.dense(batch, q_len, k_len)
    assert torch.equal(dense, brute(form, batch, q_len, k_len))
    mine = form.tiles(block_q, block_k, q_len=q_len, k_len=k_len)
    theirs = TileList.from_dense(dense, block_q, block_k)
    assert torch.equal(mine.partial.expand_as(theirs.partial), theirs.partial)
    assert torch.equal(mine.full.expand_as(theirs.full), theirs.full)


@settings(deadline=None, max_examples=150)
@given(drawn=forms())
def test_recovered_equals_the_mask_and_needs_no_more_terms(drawn: tuple[Visibility, int, int, int]) -> None:
    form, batch, q_len, k_len = drawn
    dense = form.dense(batch, q_len, k_len)
    found = recover(dense)
    assert torch.equal(found.dense(batch, q_len, k_len), dense)
    if form.q_ids is None and form.chunk == 0:
        # bands and padding are always found; ids and chunks may be hidden behind them
        assert found.mask is None or len(terms(form)) > 1


@settings(deadline=None)
@given(seed=st.integers(0, 2**16), share=st.sampled_from([0.1, 0.5, 0.95]), heads=st.integers(1, 2))
def test_any_mask_comes_back_as_it_was(seed: int, share: float, heads: int) -> None:
    dense = torch.rand(2, heads, 5, 6, generator=torch.Generator().manual_seed(seed)) < share
    assert torch.equal(recover(dense).dense(2, 5, 6).expand_as(dense), dense)


CAUSAL = Visibility(hi=0)
LEFT = torch.arange(48)[None] >= torch.tensor([[0], [9]])
RIGHT = LEFT.flip(1)
DOCS = documents(11, 20, 17)
NAMED = {
    "every key": (Visibility(), 48),
    "causal": (CAUSAL, 48),
    "causal (bottom-right)": (Visibility(hi=16), 64),
    "causal ∧ window 7": (Visibility(lo=-6, hi=0), 48),
    "two-sided window ±5": (Visibility(lo=-5, hi=5), 48),
    "padding": (Visibility(valid=RIGHT), 48),
    "causal ∧ padding": (Visibility(hi=0, valid=LEFT), 48),
    "causal ∧ window 7 ∧ padding": (Visibility(lo=-6, hi=0, valid=LEFT), 48),
    "chunks of 16": (Visibility(chunk=16), 48),
    "causal ∧ chunks of 16": (Visibility(hi=0, chunk=16), 48),
    "causal ∧ chunks of 16 ∧ padding": (Visibility(hi=0, chunk=16, valid=LEFT), 48),
    "documents": (Visibility(q_ids=DOCS, k_ids=DOCS), 48),
    "causal ∧ documents": (Visibility(hi=0, q_ids=DOCS, k_ids=DOCS), 48),
    "causal ∧ window 7 ∧ documents": (Visibility(lo=-6, hi=0, q_ids=DOCS, k_ids=DOCS), 48),
}


@pytest.mark.parametrize("name", NAMED)
def test_recovers_the_form_that_was_meant(name: str) -> None:
    form, k_len = NAMED[name]
    found = recover(form.dense(2, 48, k_len))
    assert terms(found) == terms(form) and (found.lo, found.hi, found.chunk) == (form.lo, form.hi, form.chunk)
    said = found.told(
        MaskForm, ids=lambda _: (), condition=lambda _: (), limit=lambda at: Edge(offset=at), ahead=k_len - 48
    )
    assert mask_words(said) == name


def test_interleaved_documents_and_hidden_queries_are_ids() -> None:
    ids = torch.tensor([[0, 1, 0, 2, 1, 0, 2, 2, -1]])
    # the last position neither sees nor is seen: DeBERTa's padding
    outer = (ids[0, :, None] == ids[0]) & (ids[0] >= 0)
    for dense in (outer, outer.tril()):
        found = recover(dense)
        assert (
            found.q_ids is not None and found.mask is None and torch.equal(found.dense(1, 9, 9)[0, 0], dense)
        )


def test_padding_of_one_query_is_padding_and_not_a_band() -> None:
    found = recover(LEFT[1:, None, None, :])
    assert terms(found) == {"valid"}


def test_heads_that_differ_stay_dense_and_equal_ones_are_shared() -> None:
    causal, full = torch.ones(6, 6, dtype=torch.bool).tril(), torch.ones(6, 6, dtype=torch.bool)
    assert terms(recover(torch.stack([causal, full])[None])) == {"mask"}
    assert terms(recover(torch.stack([causal, causal])[None])) == {"hi"}
    assert recover(torch.stack([causal, full])[None]).tiles(2, 2, q_len=6, k_len=6).counts == (3, 3 + 9, 3)


def test_nothing_visible_and_zero_length() -> None:
    assert terms(recover(torch.zeros(2, 1, 4, 4, dtype=torch.bool))) == {"valid"}
    assert terms(recover(torch.zeros(1, 1, 0, 4, dtype=torch.bool))) == set()
    assert Visibility(hi=0).tiles(4, 4, q_len=0, k_len=4).visited == 0


def test_golden_counts_of_the_facts() -> None:
    """Empty, full, partial tiles of 64 at 256 tokens, as measured on Hugging Face's masks
    (shared/facts/kernels.md, 3b).
    """
    padded = torch.arange(256)[None] >= 64
    table = {
        (6, 6, 4): Visibility(hi=0),
        (10, 3, 3): Visibility(hi=0, valid=padded),
        (9, 0, 7): Visibility(lo=-63, hi=0),
        (0, 16, 0): Visibility(),
        (4, 12, 0): Visibility(valid=padded),
        (6, 0, 10): Visibility(lo=-32, hi=32),
        (12, 0, 4): Visibility(hi=0, chunk=64),
    }
    for counts, form in table.items():
        assert form.tiles(64, 64, q_len=256, k_len=256).counts == counts
        assert TileList.from_dense(form.dense(1, 256, 256), 64, 64).counts == counts


def test_a_window_of_each_head_with_padding_of_each_batch() -> None:
    """A dense mask by head and closed forms by batch together: the tiles are those of the dense mask."""
    heads = torch.ones(1, 3, 12, 12, dtype=torch.bool).tril()
    heads[:, 1] &= torch.ones(12, 12, dtype=torch.bool).triu(-3)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[1, :5] = False
    form = Visibility(mask=heads, valid=valid)
    found, wanted = (
        form.tiles(4, 4, q_len=12, k_len=12),
        TileList.from_dense(heads & valid[:, None, None], 4, 4),
    )
    assert torch.equal(form.dense(2, 12, 12), heads & valid[:, None, None])
    for name in ("partial_count", "partial_index", "full_count", "full_index"):
        if hasattr(wanted, name):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name
