"""The proof: z3 refutes "a feasible choice cheaper than the target exists", or exhibits one.

With x_gc ∈ {0, 1} for configuration c of group g, all data exact integers (reduce.py):

    (1) one per group      Σ_c x_gc = 1                                              `_one_each`
    (2) limits             Σ_gc u_rgc x_gc ≤ slack_r             for each limit r    `_rows`
    (3) target             Σ_gc c_gc x_gc ≤ T − 1                "cheaper than T"    `_rows`
    (4) links              x_gc → ⋁_d x_hd                       for each tie        `_branch`
    (5) surrogates         Q·(3) + Σ_r p_r·(2), integers Q, p ≥ 0                    `_rows`

(5) is implied by (2) and (3), whatever Q and p: it changes no answer. With p / Q near the dual multipliers it
    is the
Farkas combination that refutes the LP relaxation, which z3's simplex alone takes minutes to find at 200
groups. By (1) each row may be shifted so that a group's least coefficient is 0; if the room left is then
negative, the row is unsatisfiable over x ≥ 0 and z3's simplex says so at once (`_relaxation`). That is a
complete proof.

Otherwise z3 branches (`_branch`), as pseudo-Boolean constraints over the configurations that (2), (3) and (5)
leave possible one by one (reduced-cost fixing, exact). There the rows are scaled to a grid of 2^20 with
coefficients rounded down: a relaxation, so that unsat is a proof still; a model is accepted only after an
exact check, else it is excluded. Interchangeable groups are ordered (`_symmetry`), which does what counting
them would.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import z3

from effcompile.planner.ask import ask
from effcompile.planner.reduce import Implication, Reduced

_GRID = 1 << 20
_SPURIOUS = 2000  # models of the rounded rows that may fail the exact check before giving up

Weights = tuple[int, ...]  # (Q, *p)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What z3 said. `reduced` and `picks` hold the choice when found."""

    answer: Literal["refuted", "found", "unknown"]
    reduced: Reduced | None = None
    picks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Row:
    """Σ coefficients ≤ room, shifted so that each group's least coefficient is 0."""

    coefficients: tuple[tuple[int, ...], ...]
    room: int


def surrogate_bound(reduced: Reduced, weights: Weights) -> int | None:
    """Exact lower bound on the objective by weak duality; None for weights without the objective."""
    if weights[0] <= 0:
        return None
    low = sum(min(_dot(weights, c.vector) for c in group) for group in reduced.groups)
    low -= _dot(weights[1:], reduced.slack)
    return -((-low) // weights[0])


def refute(reduced: Reduced, target: int | None, surrogates: Sequence[Weights], deadline: float) -> Verdict:
    """Decide whether there is a feasible choice with objective < target (None: any).

    Sound either way; "unknown" at the deadline.
    """
    rows = _rows(reduced, target, surrogates)
    hopeless = next((row for row in rows if row.room < 0), None)
    if hopeless is not None:
        return Verdict("refuted" if _relaxation(hopeless) else "unknown")
    return _branch(restrict(reduced, target, surrogates), target, surrogates, deadline)


def restrict(reduced: Reduced, target: int | None = None, surrogates: Sequence[Weights] = ()) -> Reduced:
    """Drop configurations that alone, beside the least of all other groups, break a row; repeat until none
    does.
    """
    while True:
        rows = _rows(reduced, target, surrogates)
        keep = [
            [i for i in range(len(g)) if all(r.coefficients[n][i] <= r.room for r in rows)]
            for n, g in enumerate(reduced.groups)
        ]
        if all(len(k) == len(g) for k, g in zip(keep, reduced.groups, strict=True)):
            return reduced
        reduced = select(reduced, keep)
        if any(not k for k in keep):
            return reduced


def select(reduced: Reduced, keep: Sequence[Sequence[int]]) -> Reduced:
    """With these configurations of each group, by index."""
    new = [{old: i for i, old in enumerate(kept)} for kept in keep]

    def moved(group: int, indices: frozenset[int]) -> frozenset[int]:
        return frozenset(new[group][i] for i in indices if i in new[group])

    links = tuple(
        Implication(k.left, moved(k.left, k.when), k.right, moved(k.right, k.then)) for k in reduced.links
    )
    return replace(
        reduced,
        groups=tuple(tuple(g[i] for i in kept) for g, kept in zip(reduced.groups, keep, strict=True)),
        links=links,
    )


def _rows(reduced: Reduced, target: int | None, surrogates: Sequence[Weights]) -> list[_Row]:
    count = len(reduced.slack)
    units: list[Weights] = [tuple(int(d == r + 1) for d in range(count + 1)) for r in range(count)]
    if target is not None:
        units.append((1, *(0,) * count))
    usable = [w for w in surrogates if target is not None or not w[0]]
    bounds = (0 if target is None else target - 1, *reduced.slack)
    return [_row(reduced, weights, _dot(weights, bounds)) for weights in (*usable, *units)]


def _row(reduced: Reduced, weights: Weights, bound: int) -> _Row:
    coefficients = []
    for group in reduced.groups:
        values = [_dot(weights, c.vector) for c in group]
        low = min(values, default=0)
        bound -= low
        coefficients.append(tuple(v - low for v in values))
    return _Row(tuple(coefficients), bound)


def _dot(weights: Sequence[int], vector: Sequence[int]) -> int:
    return sum(w * v for w, v in zip(weights, vector, strict=True) if w)


def _relaxation(row: _Row) -> bool:
    """True when z3's simplex refutes the row over real x ≥ 0, one per group.

    Coefficients are divided by −room and rounded down, so the row says Σ ≤ −1 with small numbers and is no
    stronger. Written as SMT-LIB text because building thousands of terms through z3's Python objects takes
    seconds.
    """
    unit, lines, terms = max(1, -row.room), [], ["0.0"]
    for g, coefficients in enumerate(row.coefficients):
        names = [f"x{g}_{c}" for c in range(len(coefficients))]
        lines += [f"(declare-const {x} Real)(assert (>= {x} 0.0))" for x in names]
        lines.append(f"(assert (= (+ 0.0 {' '.join(names)}) 1.0))")
        terms += [f"(* {v * _GRID // unit}.0 {x})" for v, x in zip(coefficients, names, strict=True) if v]
    solver = z3.SolverFor("QF_LRA")
    solver.from_string("\n".join([*lines, f"(assert (<= (+ {' '.join(terms)} 0.0) (- {_GRID}.0)))"]))
    return bool(ask(solver)[0] == z3.unsat)


def _branch(reduced: Reduced, target: int | None, surrogates: Sequence[Weights], deadline: float) -> Verdict:
    names = [[z3.Bool(f"x{g}_{c}") for c in range(len(group))] for g, group in enumerate(reduced.groups)]
    solver = z3.Solver()
    solver.add(
        *(z3.Or(group) for group in names), *(z3.AtMost(*group, 1) for group in names if len(group) > 1)
    )
    for row in _rows(reduced, target, surrogates):
        if row.room < 0:
            return Verdict("refuted" if _relaxation(row) else "unknown")
        terms = [
            (x, c)
            for g, cs in zip(names, _to_grid(row), strict=True)
            for x, c in zip(g, cs, strict=True)
            if c
        ]
        if sum(c for _, c in terms) > _GRID:
            solver.add(z3.PbLe(terms, _GRID))
    for link in reduced.links:
        then = z3.Or([names[link.right][i] for i in link.then])
        solver.add(*(z3.Implies(names[link.left][i], then) for i in link.when))
    solver.add(*_symmetry(reduced, names))
    return _search(solver, names, reduced, target, deadline)


def _to_grid(row: _Row) -> list[list[int]]:
    """Coefficients on a grid where the room is 2^20, rounded down; what exceeds the room is capped just above
    it.
    """
    room = row.room
    if room == 0:
        return [[_GRID + 1 if v else 0 for v in cs] for cs in row.coefficients]
    return [[min(v * _GRID // room, _GRID + 1) for v in cs] for cs in row.coefficients]


def _symmetry(reduced: Reduced, names: list[list[z3.BoolRef]]) -> list[z3.BoolRef]:
    """Groups with equal configurations and no links take them in index order."""
    tied = {g for k in reduced.links for g in (k.left, k.right)}
    last: dict[tuple[tuple[int, ...], ...], int] = {}
    clauses = []
    for g, group in enumerate(reduced.groups):
        key = tuple(c.vector for c in group)
        if g not in tied and key in last:
            before = names[last[key]]
            clauses += [z3.Implies(x, z3.Or(before[: i + 1])) for i, x in enumerate(names[g])]
        last[key] = g if g not in tied else last.get(key, g)
    return clauses


def _search(
    solver: z3.Solver, names: list[list[z3.BoolRef]], reduced: Reduced, target: int | None, deadline: float
) -> Verdict:
    for _ in range(_SPURIOUS):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        solver.set("timeout", max(1, int(left * 1000)))
        answer, model = ask(solver)
        if answer == z3.unsat:
            return Verdict("refuted")
        if model is None:
            break
        picks = tuple(
            next((i for i, x in enumerate(group) if z3.is_true(model.eval(x))), 0) for group in names
        )
        if reduced.feasible(picks) and (target is None or reduced.sums(picks)[0] < target):
            return Verdict("found", reduced, picks)
        solver.add(z3.Not(z3.And([group[i] for group, i in zip(names, picks, strict=True)])))
    return Verdict("unknown")
