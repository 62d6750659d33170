"""Predicted tiles: what they hold, what they may never hold, and the estimates behind them, by
brute force.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.ops.attention import attention
from effcompile.ops.tile_predictors import METHODS, exact, fit_low_rank, pooled_rows, select, tile_mass
from effcompile.ops.tiles import TileList
from effcompile.ops.visibility import Visibility
from effcompile.sites.attention.predictor import exact_mass, predicted_tiles

BLOCK = 16


def clustered(s: int = 128, heads: int = 2, width: int = 16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of tokens of four kinds in turn, each of which attends to its own kind."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.linalg.qr(torch.randn(width, width, generator=generator))[0][:4] * 6.0
    x = kinds[torch.arange(s) // BLOCK % 4] + 0.3 * torch.randn(1, heads, s, width, generator=generator)
    return (
        x,
        x + 0.1 * torch.randn(1, heads, s, width, generator=generator),
        torch.randn(1, heads, s, width, generator=generator),
    )


def factors_for(method: str, q: Tensor, k: Tensor) -> list[Tensor] | None:
    return list(fit_low_rank(q[0], k[0], 8)) if METHODS[method].fitted else None


def grids(lists: tuple[Tensor, ...], sq: int, sk: int, block: int = BLOCK) -> TileList:
    return TileList(
        q_len=sq, k_len=sk, block_q=block, block_k=block,
        partial_count=lists[0], partial_index=lists[1], full_count=lists[2], full_index=lists[3],
    )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_predictor_finds_concentrated_attention(method: str) -> None:
    q, k, v = clustered()
    lists = predicted_tiles(
        q, k, None, factors_for(method, q, k), method=method, scale=0.25, mass=0.95, pool=4, block=BLOCK, hi=0
    )
    out, lse = attention(q, k, v, scale=0.25, hi=0)
    near, found = attention(q, k, v, scale=0.25, hi=0, tiles=list(lists), block_q=BLOCK, block_k=BLOCK)
    tiles = grids(lists, 128, 128)
    # blocks 0 to 7 have 1, 1, 1, 1, 2, 2, 2, 2 tiles of their kind (itself among them), and the first tile is
    # always kept
    assert tiles.visited <= 2 * (1 + 2 * 3 + 2 + 3 * 3)
    assert float(torch.exp(found - lse).mean()) > 0.99
    assert float((near - out).norm() / out.norm()) < 0.02


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", [{}, {"hi": 0}, {"lo": -40, "hi": 0}, {"chunk": 48}, {"lo": -20, "hi": 20}])
def test_nothing_hidden_is_listed_and_nothing_full_is_cut(method: str, form: dict[str, int]) -> None:
    q, k, _ = clustered(100)
    valid = torch.ones(1, 100, dtype=torch.bool)
    valid[0, 70:] = False
    for padding in (None, valid):
        lists = predicted_tiles(
            q,
            k,
            padding,
            factors_for(method, q, k),
            method=method,
            scale=0.25,
            mass=0.6,
            pool=4,
            block=BLOCK,
            **form,
        )
        tiles, true = (
            grids(lists, 100, 100),
            Visibility(valid=padding, **form).tiles(BLOCK, BLOCK, q_len=100, k_len=100),
        )
        assert not bool((tiles.full & ~true.full).any()) and not bool((tiles.partial & ~true.partial).any())
        seen = (true.full | true.partial).expand_as(tiles.full)
        first = seen & (seen.cumsum(-1) == 1)
        kept = tiles.full | tiles.partial
        assert bool(kept[first].all())
        diagonal = torch.eye(7, dtype=torch.bool).expand_as(kept) & seen
        assert bool(kept[diagonal].all())


@pytest.mark.parametrize("method", METHODS)
def test_all_of_the_mass_is_exact_attention(method: str) -> None:
    q, k, v = clustered(72)
    lists = predicted_tiles(
        q, k, None, factors_for(method, q, k), method=method, scale=0.25, mass=1.0, pool=4, block=BLOCK, hi=0
    )
    near, _ = attention(q, k, v, scale=0.25, hi=0, tiles=list(lists), block_q=BLOCK, block_k=BLOCK)
    torch.testing.assert_close(near, attention(q, k, v, scale=0.25, hi=0)[0])


def brute_mass(q: Tensor, k: Tensor, seen: Tensor, block: int) -> Tensor:
    """The mean softmax of each block of rows, summed by tile, from the dense scores."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    weights = torch.softmax((q @ k.mT).masked_fill(~seen, -torch.inf), -1).nan_to_num(0.0)
    rows = torch.stack([part.mean(2) for part in weights.split(block, 2)], 2)
    return torch.stack([part.sum(-1) for part in rows.split(block, 3)], -1)


@settings(max_examples=60, deadline=None)
@given(
    sq=st.integers(1, 40), sk=st.integers(1, 40), lo=st.none() | st.integers(-30, 5),
    hi=st.none() | st.integers(-5, 30), chunk=st.sampled_from([0, 7, 16]), padded=st.booleans(),
    heads=st.sampled_from([(2, 2), (4, 2), (2, 1)]), seed=st.integers(0, 99),
)  # fmt: skip
def test_mass_of_exact_scores_equals_brute_force(
    sq: int,
    sk: int,
    lo: int | None,
    hi: int | None,
    chunk: int,
    padded: bool,
    heads: tuple[int, int],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, h, s, 4, generator=generator) for h, s in zip(heads, (sq, sk), strict=True))
    valid = torch.rand(2, sk, generator=generator) > 0.4 if padded else None
    see = Visibility(lo=lo, hi=hi, chunk=chunk, valid=valid)
    found = tile_mass(exact(q, k, 0, ()), see, q_len=sq, k_len=sk, pool=1, block_q=8, block_k=8)
    want = brute_mass(q, k, see.dense(2, sq, sk), 8)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), share=st.floats(0.05, 1.0))
def test_selected_tiles_hold_the_share_and_no_more_than_needed(seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mass = torch.rand(1, 2, 3, 9, generator=generator) ** 4
    candidates = torch.rand(1, 1, 3, 9, generator=generator) > 0.2
    always = torch.rand(1, 1, 3, 9, generator=generator) > 0.8
    kept = select(mass, candidates, always, share)
    assert not bool((kept & ~candidates).any()) and bool(kept[(always & candidates).expand_as(kept)].all())
    there = mass * candidates
    held, whole = (there * kept).sum(-1), there.sum(-1)
    assert bool((held >= share * whole - 1e-5).all())
    free = kept & ~always
    # without the least of those that were chosen it would not be enough
    least = torch.where(free, mass, torch.inf).amin(-1)
    assert share == 1.0 or bool(((held - least < share * whole + 1e-5) | ~free.any(-1)).all())


def test_pooled_queries_see_what_any_of_theirs_sees() -> None:
    q, k, _ = clustered(40)
    found = tile_mass(
        exact(pooled_rows(q, 4), k, 0, ()), Visibility(hi=0), q_len=40, k_len=40, pool=4, block_q=8, block_k=8
    )
    assert bool((found.diagonal(dim1=-2, dim2=-1) > 0).all())
    assert float(found.triu(1).abs().max()) == 0.0


def test_estimates_of_the_scores_are_what_the_papers_say() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 24, 64), torch.randn(1, 2, 24, 64)
    true, whole = q @ k.mT, slice(0, 24)

    def error(method: str, detail: int) -> float:
        found = METHODS[method].estimate(
            q, k, detail, fit_low_rank(q[0], k[0], detail) if method == "dota" else ()
        )
        return float((found.scores(whole, whole) - true).norm() / true.norm())

    assert error("sanger", 8) < 0.02 < error("sanger", 4) < 0.3 < error("sanger", 2)
    assert error("a3", 64) < 1e-6 < error("a3", 32) < error("a3", 8) < 1.0
    assert error("elsa", 1024) < error("elsa", 128) < error("elsa", 32)
    means = METHODS["pooled"].estimate(q, k, 8, ())
    assert means.width == 8
    torch.testing.assert_close(means.scores(whole, slice(0, 3)), q @ k.unflatten(2, (3, 8)).mean(3).mT)


def test_a_hash_tells_the_angle() -> None:
    width, bits = 16, 8192
    q = torch.nn.functional.normalize(torch.randn(1, 1, 1, width), dim=-1)
    other = torch.nn.functional.normalize(torch.randn(1, 1, 1, width) - 0.5 * q, dim=-1)
    for cosine in (-0.9, -0.3, 0.0, 0.5, 1.0):
        across = torch.nn.functional.normalize(other - (other * q).sum() * q, dim=-1)
        k = 3.0 * (cosine * q + math.sqrt(1 - cosine**2) * across)
        found = METHODS["elsa"].estimate(q, k, bits, ()).scores(slice(0, 1), slice(0, 1))
        assert float(found) == pytest.approx(3.0 * cosine, abs=0.15)


def test_fitted_projections_are_exact_at_the_rank_of_the_scores_and_better_than_leading_axes_below_it() -> (
    None
):
    torch.manual_seed(0)
    mix = torch.randn(2, 5, 16)
    q, k = torch.randn(2, 400, 5) @ mix, torch.randn(2, 300, 16) + 3.0
    left, right = fit_low_rank(q, k, 5)
    centred = k - k.mean(1, keepdim=True)
    torch.testing.assert_close((q @ left) @ (centred @ right).mT, q @ centred.mT, rtol=1e-3, atol=1e-3)
    left, right = fit_low_rank(q, k, 2)
    fitted = ((q @ left) @ (centred @ right).mT - q @ centred.mT).norm()
    for axes in ((0, 1), (3, 7), (14, 15)):
        part = list(axes)
        assert float(fitted) < float((q[..., part] @ centred[..., part].mT - q @ centred.mT).norm())


@pytest.mark.parametrize("method", METHODS)
def test_no_nan_with_rows_that_see_nothing_and_keys_that_are_zero(method: str) -> None:
    q, k, v = clustered(64)
    q[:, :, :16] = 0.0
    k[:, :, 5] = 0.0
    valid = torch.zeros(1, 64, dtype=torch.bool)
    valid[0, 32:] = True
    lists = predicted_tiles(
        q, k, valid, factors_for(method, q, k), method=method, scale=0.25, mass=0.9, pool=4, block=BLOCK, hi=0
    )
    out, lse = attention(
        q,
        k,
        v,
        None,
        None,
        None,
        None,
        None,
        valid,
        list(lists),
        scale=0.25,
        hi=0,
        block_q=BLOCK,
        block_k=BLOCK,
    )
    assert bool((lse[:, :, :32] == -torch.inf).all()) and bool((out[:, :, :32] == 0).all())
    assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse[:, :, 32:]).all())


@pytest.mark.parametrize("shape", [(1, 2, 0, 8), (0, 2, 8, 8)])
def test_empty_inputs_have_empty_lists(shape: tuple[int, ...]) -> None:
    lists = predicted_tiles(
        torch.randn(shape), torch.randn(shape), method="sanger", scale=1.0, mass=0.9, pool=4, block=BLOCK
    )
    assert [t.shape for t in lists] == [
        (*shape[:2], -(-shape[2] // BLOCK)),
        (*shape[:2], *(-(-shape[2] // BLOCK),) * 2),
    ] * 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_is_sound(method: str, dtype: torch.dtype) -> None:
    q, k, _ = (x.to(dtype) for x in clustered(40))
    form = {"method": method, "scale": 0.25, "mass": 0.9, "pool": 4, "block": BLOCK, "hi": 0}
    given = (
        q,
        k[:, :1].expand(-1, 2, -1, -1),
        torch.ones(1, 40, dtype=torch.bool),
        factors_for(method, q.float(), k.float()),
    )
    torch.library.opcheck(torch.ops.effcompile.predicted_tiles.default, given, form)


def test_it_exports_with_a_dynamic_length() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            lists = torch.ops.effcompile.predicted_tiles(
                q, k, method="sanger", scale=0.25, mass=0.95, pool=4, block=BLOCK, hi=0
            )
            run = torch.ops.effcompile.attention
            result: Tensor = run(q, k, v, tiles=list(lists), scale=0.25, hi=0, block_q=BLOCK, block_k=BLOCK)[
                0
            ]
            return result

    # a size of 1, here of tiles, is its own case in torch.export
    length = torch.export.Dim("s", min=BLOCK + 1, max=4096)
    exported = torch.export.export(Model(), clustered(64), dynamic_shapes=({2: length},) * 3)
    for s in (64, 90):
        given = clustered(s)
        torch.testing.assert_close(exported.module()(*given), Model()(*given))


def test_what_makes_no_sense_is_refused_by_name() -> None:
    q, k, _ = clustered(32)
    form = {"scale": 1.0, "mass": 0.9}
    for changes, message in (
        ({"method": "oracle"}, "no attention predictor 'oracle'"),
        ({"method": "vitcod"}, "calibrated when the model is compiled"),
        ({"method": "dota"}, "takes two factors"),
        ({"method": "a3", "mass": 0.0}, "mass = 0.0"),
        ({"method": "a3", "pool": 5}, "pool = 5"),
    ):
        with pytest.raises(UsageError, match=message):
            predicted_tiles(q, k, **{**form, **changes})


def test_exact_mass_is_that_of_the_attention() -> None:
    q, k, v = clustered(48)
    given = {"q": q, "k": k, "v": v, "scale": 0.25, "lo": None, "hi": 0, "chunk": 0, "valid": None}
    found = exact_mass(given, BLOCK)
    torch.testing.assert_close(found, brute_mass(q * 0.25, k, torch.ones(48, 48).tril().bool(), BLOCK))
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 2, 3))
