"""Bytes of a cache, counted by hand."""

from effcompile.ir.cache import CacheLayout, CacheLeaf, Growth

FULL = CacheLeaf(name="layers.0.keys", layer=0, growth=Growth.FULL, shape=(2, 8))
WINDOW = CacheLeaf(name="layers.1.keys", layer=1, growth=Growth.WINDOW, shape=(2, 8), window=16)
SOURCE = CacheLeaf(name="cross.0.keys", layer=0, growth=Growth.SOURCE, shape=(2, 8))


def test_bytes_follow_the_context_the_batch_and_the_source() -> None:
    layout = CacheLayout(leaves=(FULL, WINDOW, SOURCE))
    row = 2 * 8 * 4
    assert layout.nbytes(100, 1, source=7) == 100 * row + (16 + 1 + 2) * row + 7 * row
    assert layout.nbytes(100, 3) == 3 * (100 * row + 19 * row)
    assert layout.nbytes(8, 1) == 16 * row


def test_a_source_is_not_written() -> None:
    assert CacheLayout(leaves=(FULL, SOURCE, WINDOW)).written == (0, 2)
