"""Errors of options of which few random draws are known, the draws of like sites taken together.

For one draw v of random signs (vᵀ J δ)² has the mean ‖J δ‖² that is asked for, and a spread of √2 times that.
A solver that chooses among hundreds of options takes those whose draws happened to be small: of a text of
one row, read once backwards, it chose plans with 2.5 to 8.7 times the squared error that they were said to
have (Qwen2.5-0.5B's shape, six draws). Two parts are known of a draw, with s_t = (vᵀ J)_t δ_t of row t, a
token's:

    rows = Σ_t s_t²        spreads little, being a sum of many: which site is how large
    squares = (Σ_t s_t)²   right in the mean: how rows' errors go together, as where attention averages them

Of rows that are independent both are the same. squares/rows is a figure of a site's role (`v_proj` 13, others
1 to 2, whatever the layer) rather than of the site, so it is taken from all sites of a role and option, and
of more draws from the site itself (an empirical Bayes estimate: Efron and Morris 1975, "Data analysis using
Stein's estimator"):

    error = rows · (PRIOR · ratio of the role + squares/rows · draws) / (PRIOR + draws)

and the ratio of a role in the same way from 1. Plans are then within 10 % of what they were said to have
(five of the six draws; 0.6 of it in one), and at equal error hold twice as many weights in 4 bits.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Draws that what is known of the others counts for.
PRIOR = 8.0
_NUMBERS = re.compile(r"\d+")


#: (site, option).
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was found of an option at one site: means over so many draws, for one group of outputs.

    `draws`: infinite where `squares` is the error itself.
    """

    squares: float
    rows: float
    draws: float

    def __add__(self, other: Drawn) -> Drawn:
        """Of a site that has several places."""
        return Drawn(self.squares + other.squares, self.rows + other.rows, min(self.draws, other.draws))

    @property
    def ratio(self) -> float:
        """How rows' errors go together; 1: they are independent."""
        return self.squares / self.rows if self.rows > 0 else 1.0


#: What was drawn at one place of a site, for each group of outputs; one of all of them where it is the error.
Found = tuple[Key, Sequence[Drawn]]


def errors_of(found: Sequence[Found]) -> dict[Key, float]:
    """(site, option) → squared error, the largest over the groups of outputs."""
    errors: dict[Key, float] = defaultdict(float)
    for group in range(max((len(of_groups) for _, of_groups in found), default=0)):
        drawn: dict[Key, Drawn] = {}
        for key, of_groups in found:  # a site may have several places
            each = of_groups[min(group, len(of_groups) - 1)]
            drawn[key] = drawn[key] + each if key in drawn else each
        for key, error in _shared(drawn).items():
            errors[key] = max(errors[key], error)
    return dict(errors)


def _shared(found: Mapping[Key, Drawn]) -> dict[Key, float]:
    """(site, option) → squared error, with what is known of like sites."""
    alike: dict[tuple[str, str], list[Drawn]] = defaultdict(list)
    for (site, option), drawn in found.items():
        if math.isfinite(drawn.draws) and drawn.rows > 0:
            alike[_role(site), option].append(drawn)
    ratios = {key: _mean(1.0, drawn) for key, drawn in alike.items()}
    return {
        (site, option): drawn.rows * _mean(ratios[_role(site), option], [drawn])
        if math.isfinite(drawn.draws) and drawn.rows > 0
        else drawn.squares
        for (site, option), drawn in found.items()
    }


def _role(site: str) -> str:
    """What a site is in its layer: its name without numbers."""
    return _NUMBERS.sub("", site)


def _mean(prior: float, drawn: list[Drawn]) -> float:
    """The ratio over all their draws, with the prior's."""
    draws = sum(each.draws for each in drawn)
    return (PRIOR * prior + sum(each.ratio * each.draws for each in drawn)) / (PRIOR + draws)
