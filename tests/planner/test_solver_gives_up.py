"""z3 may stop for its time, its limit of work, or memory: what was found is returned with a true bound, or
the words say what happened.
"""

import os
import random
import re
import resource
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import z3

from effcompile.planner.ask import ask
from effcompile.planner.problem import UNPROVEN, Alternative, Problem
from effcompile.planner.solver import UndecidedError, solve


def hard(sites: int = 30) -> Problem:
    dice = random.Random(0)

    def options() -> tuple[Alternative, ...]:
        return tuple(
            Alternative(
                name=f"o{i}",
                objective=dice.random(),
                resources={r: dice.random() for r in ("memory", "error", "link")},
            )
            for i in range(8)
        )

    return Problem(
        sites={f"s{i}": options() for i in range(sites)},
        limits={"memory": 0.3 * sites, "error": 0.32 * sites, "link": 0.31 * sites},
    )


def choice_or_words(timeout: float) -> str:
    """What came of it; a choice is checked."""
    problem = hard()
    try:
        found = solve(problem, gap=0.0, timeout=timeout)
    except UndecidedError as error:
        return str(error)
    assert problem.violations(found.choice) == []
    assert found.bound <= found.objective
    return "found"


ENDS = re.compile(
    "found|The solver stopped before .*|No choice within the limits was found .* Raise the timeout .*"
)


@pytest.mark.parametrize("work", [1, 10, 100, 1000, 10_000])
def test_a_limit_of_work_ends_in_a_choice_or_in_words(work: int) -> None:
    """In a child, for z3 does not give the limit back."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            z3.set_param("rlimit", work)
            status = 0 if ENDS.fullmatch(choice_or_words(20.0)) else 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("seconds", [1e-9, 1e-3, 0.05])
def test_no_time_ends_in_a_choice_or_in_words(seconds: float) -> None:
    assert ENDS.fullmatch(choice_or_words(seconds))


def test_no_memory_is_an_answer_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: z3.Solver) -> z3.CheckSatResult:
        raise z3.Z3Exception(b"out of memory")

    monkeypatch.setattr(z3.Solver, "check", check)
    found = solve(hard(), gap=0.0, timeout=5.0)
    assert found.status == UNPROVEN
    assert found.bound <= found.objective


def test_no_memory_before_anything_is_found_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: z3.Optimize) -> z3.CheckSatResult:
        raise z3.Z3Exception(b"out of memory")

    monkeypatch.setattr(z3.Optimize, "check", check)
    with pytest.raises(UndecidedError, match="out of memory"):
        solve(hard(), gap=0.0, timeout=5.0)


def pigeons(holes: int) -> z3.Solver:
    """One pigeon more than holes: hard for z3, which starts a thread for its timeout and needs memory."""
    solver = z3.Solver()
    at = [[z3.Bool(f"p{i}_{j}") for j in range(holes)] for i in range(holes + 1)]
    solver.add(*(z3.Or(row) for row in at), *(z3.AtMost(*(row[j] for row in at), 1) for j in range(holes)))
    solver.set("timeout", 2000)
    return solver


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of the address space")
@pytest.mark.parametrize("room", [0, 4 << 20])
def test_the_end_of_the_address_space_within_z3_is_an_answer_that_is_not_known(room: int) -> None:
    """z3 itself aborts the process there. In a child, which may not grow by more than `room`."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            solver = pigeons(9)
            space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (space + room,) * 2)
            status = 0 if ask(solver) == (z3.unknown, None) else 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_where_little_memory_is_left_z3_answers_from_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effcompile.planner.ask.free_bytes", lambda: 1 << 20)
    flag, whole, real = z3.Bool("flag"), z3.Int("whole"), z3.Real("real")
    solver = z3.Solver()
    solver.add(z3.Not(flag), whole == -3, real * 3 == -2)
    answer, model = ask(solver)
    assert answer == z3.sat and model is not None
    assert (
        z3.is_false(model.eval(flag))
        and model.eval(whole).as_long() == -3
        and model.eval(real).as_fraction() == Fraction(-2, 3)
    )
    solver.add(whole > 0)
    assert ask(solver) == (z3.unsat, None)
    assert choice_or_words(5.0) == "found"
