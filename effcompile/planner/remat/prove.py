"""z3 completes and proves a block's front: it refutes "there is an option that none of these covers", or
exhibits one.

Booleans: k_v "value v is kept"; f_vm "it is held in its form m"; d_uj "operator u has run again by reading
step j" (layout.py), for j among its possible places. h_v := k_v ∨ ⋁_m f_vm "held". What is read at which step
is data.

    (1) place       d_uj ⇔ ⋁_{v ∈ makes(u)} ¬h_v ∧ n_vj                                        `_Terms.done`
                    with n_vj := v read at a step ≤ j ∨ ⋁_{w reads v} d_wj "needed by j": u runs right before
                    its first reader; r_u := d_u,last "u is recomputed"
    (2) forced      ¬r_u for operators that may not run again; k_v for forced values           `_Terms.rules`
    (3) entering    v read in the backward, or by a recomputed operator → h_v                  `_Terms.rules`
    (4) no waste    h_v → v is read in the backward or by a recomputed operator, but for forced ones; at most
                    one of k_v, f_v1, f_v2, …                                                  `_Terms.rules`
    (5) last use    l_v(j, x) ⇔ v is read at (j, x) or later: by a step, or by some w with r_w
                    placed there                                                               `_Terms.later`
    (6) alive       a_v(j, x) ⇔ (k_v ∨ v was made again before (j, x) ∨ ⋁_m f_vm ∧ n_vj) ∧ l_v(j, x); a form
                    whose staged bytes are the value itself counts from the beginning          `_Terms.alive`
                    packed copies: staged_m while f_vm ∧ ¬n_vj, and at x = −2 (restoring) packed_m while
                    f_vm ∧ ¬n_v,j−1, where n_vj or it is staged                                `_Terms.packed`
    (7) instants    Σ_v size_v a_v(j, n) + packed + steps_j ≤ W;
                    where u runs again at j, that is d_uj ∧ ¬d_u,j−1,
                    Σ_v size_v a_v(j, u) + packed + Σ_{v ∈ makes(u)} size_v + workspace_u + gaps_j ≤ W;
                    and where v is restored at j, that is f_vm ∧ n_vj ∧ ¬n_v,j−1,
                    Σ_w size_w a_w(j, −2) + packed + workspace_m + gaps_j ≤ W                  `_Terms.limit`
    (8) uncovered   Σ_v size_v k_v + Σ held_m f_vm < S  ∨  Σ_v host_m f_vm < H
                    ∨  Σ_u ticks_u r_u + Σ ticks_m f_vm + (y_j)⁺ + (x_i)⁺ < T for all deadlines j, i
                    for each option (S, ·, T, H) found of peak ≤ W                             `_uncovered`
        link        y_j = Σ back_m f_vm n_vj − arrive_j;  x_i = Σ_{v made at i or later} out_m f_vm − depart_i
                    (simulate.stall)

W starts without limit and only falls. If z3 refutes (8) under W, every option of peak ≤ W is covered by one
found, of peak at most P; so W becomes P − 1, until nothing is found there: the front is complete. Else the
held values of z3's model are an option: a new one, or one whose peak exceeds W, or whose copies miss a
deadline that (8) does not have yet. Then the instants where it does are added to (7), or that deadline to
(8); both start empty, for few of the many ever matter. All numbers are exact integers. Without forms, (1) to
(8) are those of keeping and recomputing alone.

Every option is measured by the replay (search.py), never by z3. A model in which (1) to (8) do not hold, as
z3 5.4 gave behind many `pop`s in one of 25 orders of a block of T5, tells nothing new by its replay. Then z3
is asked afresh, with nothing behind it; and where that fails too, the front is not proven.
"""

from __future__ import annotations

import math
import time

import z3

from effcompile.planner.ask import ask
from effcompile.planner.remat.grid import Grid
from effcompile.planner.remat.layout import Layout
from effcompile.planner.remat.search import Front, Point, lateness, replayed

_MOST_STATED = 8  # violated instants that one model adds
_LARGEST = 2**31 - 1  # that a number of z3's PbLe may be

Weighted = list[tuple[z3.BoolRef, int]]
Deadline = tuple[int | None, int | None]  # reading step, operator + 1; None: not that one


def prove(layout: Layout, front: Front, *, deadline: float) -> bool:
    """Add what the front lacks, until z3 says that nothing does. False when the deadline came first."""
    terms = _Terms(layout)
    if not terms.grid.instants:  # no backward, so nothing but the forced values is kept
        point, kept, _ = replayed(layout, terms.grid, layout.forced)
        front.add(point, kept)
        return True
    solver = z3.SolverFor("QF_FD")  # z3's SAT solver with pseudo-Boolean constraints
    solver.add(*terms.rules())
    limit: int | None = None
    stated: set[int] = set()
    while True:
        solver.push()
        if limit is not None:
            solver.add(*(terms.limit(i, limit) for i in sorted(stated)))
        while (answer := _another(terms, solver, front, limit, stated, deadline)) == z3.sat:
            pass
        if answer != z3.unsat:
            return False
        solver.pop()
        under = _under(front, limit)
        if not under:
            return True
        limit = max(p[1] for p in under) - 1


def _another(
    terms: _Terms, solver: z3.Solver, front: Front, limit: int | None, stated: set[int], deadline: float
) -> z3.CheckSatResult:
    """Ask once for an uncovered option: sat when one was added to the front, or one over the limit to the
    stated instants.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        return z3.unknown
    solver.push()
    solver.add(*_uncovered(terms, _under(front, limit)))
    solver.set("timeout", max(1, int(left * 1000)))
    answer, model = ask(solver)
    solver.pop()
    if model is None or _learned(terms, solver, front, limit, stated, model):
        return answer
    answer, model = ask(_afresh(terms, front, limit, stated, max(0.001, deadline - time.monotonic())))
    if model is None or _learned(terms, solver, front, limit, stated, model):
        return answer
    return z3.unknown


def _learned(
    terms: _Terms, solver: z3.Solver, front: Front, limit: int | None, stated: set[int], model: z3.ModelRef
) -> bool:
    """Whether the replay of a model told something new: an option, instants over the limit, or a deadline."""
    point, kept, load = replayed(terms.layout, terms.grid, terms.kept(model))
    if limit is None or point[1] <= limit:
        return front.add(point, kept) or terms.state(lateness(terms.layout, terms.grid, kept))
    over = sorted((i for i in range(terms.grid.instants) if load[i] > limit), key=lambda i: -load[i])
    new = [i for i in over if i not in stated][:_MOST_STATED]
    stated.update(new)
    solver.add(*(terms.limit(i, limit) for i in new))
    return bool(new)


def _afresh(terms: _Terms, front: Front, limit: int | None, stated: set[int], seconds: float) -> z3.Solver:
    """A solver that is asked the same, and was asked nothing before."""
    solver = z3.SolverFor("QF_FD")
    solver.add(*terms.rules(), *_uncovered(terms, _under(front, limit)))
    if limit is not None:
        solver.add(*(terms.limit(i, limit) for i in sorted(stated)))
    solver.set("timeout", max(1, int(seconds * 1000)))
    return solver


def _under(front: Front, limit: int | None) -> list[Point]:
    """The options of peak ≤ limit that no other of those covers in all other measures; of equals the one of
    least peak.
    """
    left: list[Point] = []
    for point in sorted(
        (p for p in front.points if limit is None or p[1] <= limit), key=lambda p: (p[0], p[2], p[3], p[1])
    ):
        if not any(p[2] <= point[2] and p[3] <= point[3] for p in left):
            left.append(point)
    return left


def _uncovered(terms: _Terms, found: list[Point]) -> list[z3.BoolRef]:
    return [
        z3.Or(
            _at_most(terms.sizes, size - 1),
            _at_most(terms.hosts, host - 1),
            z3.And([terms.faster(ticks, d) for d in terms.deadlines]),
        )
        for size, _, ticks, host in found
    ]


def _at_most(weighted: Weighted, bound: int) -> z3.BoolRef:
    """Σ w b ≤ bound, in units of all w's common divisor: the numbers of a PbLe are C ints, and GPT-3's bytes
    are none.
    """
    if bound < 0:
        return z3.BoolVal(False)
    if sum(w for _, w in weighted) <= bound:
        return z3.BoolVal(True)
    unit = math.gcd(*(w for _, w in weighted))
    whole = [(b, w // unit) for b, w in weighted]
    if max(bound // unit, *(w for _, w in whole)) <= _LARGEST:
        return z3.PbLe(whole, bound // unit)
    return z3.Sum([z3.If(b, z3.IntVal(w), z3.IntVal(0)) for b, w in whole]) <= bound // unit


class _Terms:
    """The terms of one block, by the numbers of the module's docstring."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.grid = layout, Grid(layout)
        self.keep = [z3.Bool(f"k{v}") for v in range(len(layout.names))]
        self.away = [
            [(z3.Bool(f"f{v}_{m}"), form) for m, form in enumerate(forms)]
            for v, forms in enumerate(layout.forms)
        ]
        self.held = [
            z3.Or(k, *(f for f, _ in away)) if away else k
            for k, away in zip(self.keep, self.away, strict=True)
        ]
        self.placed = [{j: z3.Bool(f"d{u}_{j}") for j in places} for u, places in enumerate(layout.places)]
        self.again = [self.done(u, len(layout.steps)) for u in range(layout.count)]
        forms = [pair for away in self.away for pair in away]
        sizes = [*zip(self.keep, layout.size, strict=True), *((f, a.held) for f, a in forms)]
        times = [*zip(self.again, layout.ticks, strict=True), *((f, a.ticks) for f, a in forms)]
        self.sizes, self.times = [(b, n) for b, n in sizes if n], [(b, n) for b, n in times if n]
        self.hosts = [(f, a.host) for f, a in forms if a.host]
        self.deadlines: list[Deadline] = [(None, None)]

    def kept(self, model: z3.ModelRef) -> frozenset[int]:
        def true(term: z3.BoolRef) -> bool:
            return z3.is_true(model.eval(term, model_completion=True))

        forms = {
            self.layout.code(v, m)
            for v, away in enumerate(self.away)
            for m, (f, _) in enumerate(away)
            if true(f)
        }
        return frozenset(v for v, k in enumerate(self.keep) if true(k)) | forms

    def state(self, deadline: Deadline) -> bool:
        """Add a deadline to (8), and with it both of its parts alone; whether it was not there."""
        parts = (deadline, (deadline[0], None), (None, deadline[1]))
        new = [d for d in dict.fromkeys(parts) if d not in self.deadlines]
        self.deadlines += new
        return deadline in new

    def faster(self, ticks: int, deadline: Deadline) -> z3.BoolRef:
        """(8): recomputation, packing and the copies' lateness at these deadlines take fewer ticks."""
        layout, (j, i) = self.layout, deadline
        terms, hidden = list(self.times), 0
        if j is not None:
            hidden += layout.arrive[j]
            terms += [
                (z3.And(f, self._read(v, j)), a.back)
                for v, away in enumerate(self.away)
                for f, a in away
                if a.back
            ]
        if i is not None:
            hidden += layout.depart[i]
            terms += [
                (f, a.out)
                for v, away in enumerate(self.away)
                if layout.maker[v] + 1 >= i
                for f, a in away
                if a.out
            ]
        return _at_most(terms, ticks - 1 + hidden)

    def done(self, u: int, j: int) -> z3.BoolRef:
        """Operator u has run again by reading step j."""
        by = [i for i in self.layout.places[u] if i <= j]
        return self.placed[u][by[-1]] if by else z3.BoolVal(False)

    def rules(self) -> list[z3.BoolRef]:
        """(1) to (4)."""
        layout, rules = self.layout, []
        for u, places in enumerate(layout.places):
            for j in places:
                asked = [z3.And(z3.Not(self.held[v]), self._read(v, j)) for v in layout.makes[u]]
                rules.append(self.placed[u][j] == z3.Or(asked))
            if not layout.repeatable[u]:
                rules.append(z3.Not(self.again[u]))
        for v, held in enumerate(self.held):
            forms = [f for f, _ in self.away[v]]
            if forms:
                rules.append(z3.AtMost(self.keep[v], *forms, 1))
            if v in layout.forced:
                rules.append(self.keep[v])
                continue
            read = self._read(v, len(layout.steps))
            rules.append(z3.Implies(held, read))
            if layout.maker[v] < 0:
                rules.append(z3.Implies(read, held))
        return rules

    def limit(self, instant: int, limit: int) -> z3.BoolRef:
        """(7) for one instant of the grid."""
        layout, (j, x) = self.layout, self.grid.points[instant]
        if x >= layout.count:
            bytes_there = int(self.grid.base[instant])
            return _at_most(self._alive_at(j, x), limit - bytes_there)
        if x < 0:
            v = next(v for (k, v), at in self.grid.restored.items() if at == instant)
            now = z3.And(self._read(v, j), z3.Not(self._read(v, j - 1)))
            there = self._alive_at(j, x)
            room = limit - layout.gaps[j]
            return z3.And(
                [
                    z3.Implies(z3.And(now, f), _at_most(there, room - a.workspace))
                    for f, a in self.away[v]
                    if a.unpacks
                ]
            )
        bytes_there = layout.gaps[j] + layout.workspace[x] + sum(layout.size[v] for v in layout.makes[x])
        runs = z3.And(self.done(x, j), z3.Not(self.done(x, j - 1)))
        return z3.Implies(runs, _at_most(self._alive_at(j, x), limit - bytes_there))

    def _alive_at(self, j: int, x: int) -> Weighted:
        values = [(self.alive(v, j, x), size) for v, size in enumerate(self.layout.size) if size]
        return values + [pair for v in range(len(self.away)) for pair in self.packed(v, j, x)]

    def packed(self, v: int, j: int, x: int) -> Weighted:
        """(6): packed copies at (j, x), with their bytes."""
        if x >= 0:
            return [
                (z3.And(f, z3.Not(self._read(v, j))), a.packed)
                for f, a in self.away[v]
                if a.packed and a.staged
            ]
        before, now = self._read(v, j - 1), self._read(v, j)
        return [
            (z3.And(f, z3.Not(before), now if not a.staged else z3.BoolVal(True)), a.packed)
            for f, a in self.away[v]
            if a.packed
        ]

    def alive(self, v: int, j: int, x: int) -> z3.BoolRef:
        """(6): v is alive at (j, x); copies that x itself makes are left out."""
        u = self.layout.maker[v]
        there = [self.keep[v]] + ([] if u < 0 else [self.done(u, j if u < x else j - 1)])
        if u >= 0 and self.away[v]:
            there[1] = z3.And(there[1], z3.Not(self.held[v]))
        there += [f if a.staged and not a.packed else z3.And(f, self._read(v, j)) for f, a in self.away[v]]
        return z3.And(z3.Or(there) if len(there) > 1 else there[0], self.later(v, j, x))

    def later(self, v: int, j: int, x: int) -> z3.BoolRef:
        """(5): v is read at (j, x) or later. A forced value that nothing reads is there to the end."""
        layout = self.layout
        if layout.used[v] and layout.used[v][-1] >= (j if x <= layout.count else j + 1):
            return z3.BoolVal(True)
        readers = [
            z3.And(self.again[w], z3.Not(self.done(w, j - 1 if w >= x else j))) for w in layout.readers[v]
        ]
        if v in layout.forced and not layout.used[v]:
            readers.append(z3.Not(z3.Or([self.again[w] for w in layout.readers[v]])))
        return z3.Or(readers)

    def _read(self, v: int, j: int) -> z3.BoolRef:
        """Value v is read at a step ≤ j, or by an operator that has run again by then."""
        if self.layout.used[v] and self.layout.used[v][0] <= j:
            return z3.BoolVal(True)
        return z3.Or([self.done(w, j) for w in self.layout.readers[v]])
