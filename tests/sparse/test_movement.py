"""Which blocks go and come, against what the rules say of every single one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effcompile.sparse.movement import cosine_ratio, move

SHAPES = {"a": (4, 6), "b": (3, 2)}


def scene(
    seed: int, density: float
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Scores, masks with at least one active block per layer, keys."""
    g = torch.Generator().manual_seed(seed)
    scores = {name: torch.rand(shape, generator=g) for name, shape in SHAPES.items()}
    masks = {name: torch.rand(shape, generator=g) < density for name, shape in SHAPES.items()}
    for mask in masks.values():
        mask[0, 0] = True
    return scores, masks, {name: torch.rand(shape, generator=g) for name, shape in SHAPES.items()}


ANY = {
    "seed": st.integers(0, 2**31),
    "density": st.floats(0, 1),
    "ratio": st.floats(0, 1),
    "regrow": st.booleans(),
}


@given(**ANY)
@settings(max_examples=80)
def test_uniform_prunes_the_least_and_grows_the_most_wanted(
    seed: int, density: float, ratio: float, regrow: bool
) -> None:
    scores, masks, keys = scene(seed, density)
    found = move(scores, masks, keys, ratio, generator=torch.Generator(), regrow=regrow)
    for name, one in found.items():
        old, free = masks[name], ~one.kept if regrow else ~masks[name]
        assert one.mask.sum() == old.sum()  # fixed capacity
        assert not (one.kept & ~old).any()
        assert not (one.grown & ~free).any()
        gone = old & ~one.kept
        limit = int(old.sum()) if regrow else int((~old).sum())
        assert int(gone.sum()) == min(math.floor(int(old.sum()) * ratio + 0.5), limit)
        if gone.any() and one.kept.any():
            assert scores[name][gone].max() <= scores[name][one.kept].min()
        if one.grown.any() and (free & ~one.grown).any():
            assert keys[name][one.grown].min() >= keys[name][free & ~one.grown].max()


@given(**ANY)
@settings(max_examples=80)
def test_balanced_rows_keep_their_number(seed: int, density: float, ratio: float, regrow: bool) -> None:
    scores, masks, keys = scene(seed, density)
    found = move(
        scores,
        masks,
        keys,
        ratio,
        generator=torch.Generator().manual_seed(seed),
        regrow=regrow,
        balanced=True,
    )
    for name, one in found.items():
        assert torch.equal(one.mask.sum(dim=1), masks[name].sum(dim=1))


def test_a_balanced_row_of_one_block_moves_as_often_as_the_ratio_says() -> None:
    generator, mask = torch.Generator().manual_seed(0), torch.zeros(4000, 8, dtype=torch.bool)
    mask[:, 3] = True
    found = move(
        {"a": mask.float()},
        {"a": mask},
        {"a": torch.rand(4000, 8)},
        0.25,
        generator=generator,
        regrow=False,
        balanced=True,
    )["a"]
    assert 0.2 < float((~found.kept[:, 3]).float().mean()) < 0.3


@given(**ANY, slack=st.integers(0, 3))
@settings(max_examples=80)
def test_pooled_layers_exchange_blocks_within_their_room(
    seed: int, density: float, ratio: float, regrow: bool, slack: int
) -> None:
    scores, masks, keys = scene(seed, density)
    room = {name: min(mask.numel(), int(mask.sum()) + slack) for name, mask in masks.items()}
    found = move(
        scores, masks, keys, ratio, generator=torch.Generator(), regrow=regrow, pooled=True, room=room
    )
    assert sum(int(one.mask.sum()) for one in found.values()) == sum(
        int(mask.sum()) for mask in masks.values()
    )
    for name, one in found.items():
        assert 1 <= int(one.mask.sum()) <= room[name]
        assert not (one.kept & ~masks[name]).any()
        assert not (one.kept & one.grown).any()


def test_pooled_layers_give_blocks_to_those_with_better_ones() -> None:
    masks = {"a": torch.ones(1, 10).bool(), "b": torch.zeros(1, 10).bool()}
    masks["b"][0, 0] = True
    scores = {"a": torch.full((1, 10), 0.1), "b": torch.full((1, 10), 9.0)}
    keys = {"a": torch.zeros(1, 10), "b": torch.ones(1, 10)}
    found = move(scores, masks, keys, 0.5, generator=torch.Generator(), regrow=False, pooled=True)
    assert {name: int(one.mask.sum()) for name, one in found.items()} == {"a": 4, "b": 7}


def test_ratio_falls_as_a_cosine() -> None:
    ratios = [cosine_ratio(0.5, update, 10) for update in range(11)]
    assert ratios[0] == 0.5
    assert ratios[5] == pytest.approx(0.25)
    assert ratios[10] == pytest.approx(0)
    assert ratios == sorted(ratios, reverse=True)
