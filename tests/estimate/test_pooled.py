"""Errors of few draws, those of like sites taken together, against what a solver makes of them."""

from __future__ import annotations

import math
import random

import pytest

from effcompile.estimate.pooled import Drawn, errors_of

_ROLES = {"v_proj": 12.0, "o_proj": 1.5, "down_proj": 1.0}
_TOKENS = 128


def _layers(drawn: random.Random, draws: int) -> tuple[dict[str, float], list[tuple[str, Drawn]]]:
    """True squared errors of 72 sites, and draws of them: their rows' part is known well, the whole is χ²."""
    true, found = {}, []
    for layer in range(24):
        for role, ratio in _ROLES.items():
            site = f"layers.{layer}.{role}"
            rows = 1.0 / (1 + layer) ** 1.3
            squares = [drawn.gauss(0, 1) ** 2 for _ in range(draws)]
            told = rows * (1 + drawn.gauss(0, (2 / _TOKENS / draws) ** 0.5))
            true[site] = rows * ratio
            found.append((site, Drawn(rows * ratio * sum(squares) / draws, told, draws)))
    return true, found


def _taken(errors: dict[str, float], budget: float) -> list[str]:
    """As many sites as fit, the least errors first."""
    taken, total = [], 0.0
    for site in sorted(errors, key=errors.__getitem__):
        if (total := total + errors[site]) > budget:
            break
        taken.append(site)
    return taken


@pytest.mark.parametrize("draws", [1, 4])
def test_what_is_chosen_of_few_draws_has_the_error_that_it_is_said_to_have(draws: int) -> None:
    alone: list[float] = []
    together: list[float] = []
    for seed in range(20):
        true, found = _layers(random.Random(seed), draws)
        ours = {site: e for (site, _), e in errors_of([((s, "w4"), [d]) for s, d in found]).items()}
        for errors, ratios in ((ours, together), ({site: d.squares for site, d in found}, alone)):
            taken = _taken(errors, 0.15 * sum(true.values()))
            ratios.append(sum(true[site] for site in taken) / sum(errors[site] for site in taken))
    assert 0.8 < sum(together) / 20 < 1.25
    assert sum(alone) / 20 > (
        2.0 if draws == 1 else 1.25
    )  # the plain mean of draws: too low where it chooses


def test_many_draws_are_believed() -> None:
    found = [((f"layers.{at}.o", "w4"), [Drawn(at + 1.0, 1.0, 1e6)]) for at in range(8)]
    assert errors_of(found) == {key: pytest.approx(drawn[0].squares, rel=1e-4) for key, drawn in found}


def test_places_of_a_site_add_and_the_largest_group_of_outputs_counts() -> None:
    first = [Drawn(1.0, 1.0, math.inf), Drawn(5.0, 5.0, math.inf)]
    found = [(("heads", "sdpa"), first), (("heads", "sdpa"), [Drawn(2.0, 2.0, math.inf)])]
    assert errors_of(found) == {("heads", "sdpa"): 7.0}


def test_nothing_drawn_is_no_error() -> None:
    assert errors_of([]) == {}
    assert errors_of([(("head", "w4"), [Drawn(0.0, 0.0, 4)])]) == {("head", "w4"): 0.0}
