"""Asking z3, which may give up: for its time, its limit of work, or memory.

Where memory ends within a call, z3 5.4 seldom raises: with a limit of the address space it aborts, as it
cannot start the thread that its timeout needs, or ends by a segmentation fault; and a control group ends the
process. So where little is left, it is asked in a forked child, whose end is an answer that is not known.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
from pathlib import Path

import z3

from effcompile.machine.memory import free_bytes

#: Bytes that must be free for z3 to be asked in this process: blocks and chains of a hundred layers took up
#: to 300 MiB.
_ROOM = 1 << 30
_Answer = tuple[z3.CheckSatResult, z3.ModelRef | None]
_ANSWERS = {"sat": z3.sat, "unsat": z3.unsat}


def ask(solver: z3.Solver) -> _Answer:
    """z3's answer, and its model where that is sat; unknown where it stopped by an exception: who asks has to
    live with unknown anyway.
    """
    try:
        return answered(solver)
    except z3.Z3Exception:
        return z3.unknown, None


def answered(solver: z3.Solver | z3.Optimize) -> _Answer:
    """The same.

    Raises:
        z3.Z3Exception: it stopped.
    """
    free = free_bytes()
    if free is not None and free < _ROOM and hasattr(os, "fork"):
        return _in_a_child(solver)
    answer = solver.check()
    return answer, solver.model() if answer == z3.sat else None


def _in_a_child(solver: z3.Solver | z3.Optimize) -> _Answer:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with contextlib.suppress(OSError):  # where the system chooses whom to end
                Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
            os.close(reading)
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the runtime's last words, where it ends
            with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                pipe.write(_said(solver))
        finally:
            os._exit(0)
    os.close(writing)
    try:
        with os.fdopen(reading, encoding="utf-8") as pipe:
            said = pipe.read()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.waitpid(child, 0)
    if not said:
        raise z3.Z3Exception(b"out of memory")
    found = json.loads(said)
    answer = _ANSWERS.get(found["answer"], z3.unknown)
    return answer, _model(found["values"]) if answer == z3.sat else None


def _said(solver: z3.Solver | z3.Optimize) -> str:
    """The answer, and the model's constants as text."""
    answer = solver.check()
    model = solver.model() if answer == z3.sat else []
    values = [(d.name(), d.range().name(), _text(model[d])) for d in model if d.arity() == 0]
    return json.dumps({"answer": str(answer), "values": values})


def _text(value: z3.ExprRef) -> str:
    return value.as_string() if isinstance(value, z3.RatNumRef | z3.IntNumRef) else str(z3.is_true(value))


def _model(values: list[tuple[str, str, str]]) -> z3.ModelRef:
    """A model with these values, of a solver that is told all of them."""
    told = z3.Solver()
    for name, sort, text in values:
        if sort == "Bool":
            told.add(z3.Bool(name) if text == "True" else z3.Not(z3.Bool(name)))
        else:
            told.add(z3.Int(name) == z3.IntVal(text) if sort == "Int" else z3.Real(name) == z3.RealVal(text))
    told.check()
    return told.model()
