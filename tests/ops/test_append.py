"""An append is torch.cat, wherever the rows stand; in a buffer with room nothing is copied."""

import pytest
import torch

from effcompile.ops.append import append, buffer, last, room


def rows(count: int, batch: int = 2, heads: int = 3) -> torch.Tensor:
    return torch.randn(batch, heads, count, 4)


@pytest.mark.parametrize(("batch", "heads"), [(2, 3), (1, 1), (1, 3), (2, 1)])
def test_a_buffer_is_filled_where_it_stands(batch: int, heads: int) -> None:
    past, wanted = buffer(rows(0, batch, heads), 10), rows(0, batch, heads)
    start = past.untyped_storage().data_ptr()
    for count in (3, 1, 1, 5):
        new = rows(count, batch, heads)
        past, wanted = append(past, new, 10), torch.cat([wanted, new], 2)
        assert torch.equal(past, wanted)
        assert past.untyped_storage().data_ptr() == start
    past = append(past, rows(1, batch, heads), 10)  # no room is left
    assert past.shape[2] == 11
    assert torch.equal(past[:, :, :10], wanted)


@pytest.mark.parametrize("given", ["contiguous", "reordered", "expanded", "transposed", "empty"])
def test_tensors_of_others_are_not_written_to(given: str) -> None:
    whole = rows(6)
    past = {
        "contiguous": whole,
        "reordered": whole.index_select(0, torch.tensor([1, 0])),
        "expanded": whole[:1].expand(4, -1, -1, -1),
        "transposed": whole.transpose(0, 1),
        "empty": whole[:, :, :0].clone(),
    }[given]
    before, new = past.clone(), torch.randn(*past.shape[:2], 2, 4)
    assert torch.equal(append(past, new, 16), torch.cat([before, new], 2))
    assert torch.equal(past, before)


def test_a_cache_that_was_cut_is_written_on() -> None:
    past = append(buffer(rows(0), 8), whole := rows(6), 8)
    new = rows(2)
    assert torch.equal(append(past[:, :, :4], new, 8), torch.cat([whole[:, :, :4], new], 2))


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_a_window_goes_back_to_the_beginning_of_its_buffer(held: torch.dtype) -> None:
    """One that is held in fewer bits than its rows come in, too."""
    seen, past = rows(0).to(held), buffer(rows(0).to(held), 6)
    start = past.untyped_storage().data_ptr()
    for _ in range(20):
        new = rows(1)
        seen = torch.cat([seen, new.to(held)], 2)
        past = last(append(past, new, 6), 4, 6)
        assert torch.equal(past, seen[:, :, -4:])
        assert past.untyped_storage().data_ptr() == start


def test_a_window_of_a_long_prompt_keeps_a_small_buffer() -> None:
    long = rows(50)
    kept = last(append(buffer(rows(0), 6), long, 6), 4, 6)
    assert torch.equal(kept, long[:, :, -4:])
    assert room(kept) == (6, 0)
