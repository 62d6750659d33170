"""Which integers of a kernel may leave their type: intervals through its Triton IR, for one launch, over all
programs and loop steps.

Sound but not exact: every value of a run lies in its interval, and an interval may hold more. Arithmetic of
32 and 64 bits is looked at; codes of 8 bits are data. Shapes and strides are the launch's; what is read from
memory lies where the launch says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ir, make_backend

from effcompile.backends.triton.aot_worker import specialised

Interval = tuple[int, int]
#: What a name stands for: an interval, the argument that a pointer comes from, or nothing that is looked at.
Value = Interval | str | None

_SAME = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "arith.extsi", "tt.unsplat"}
#: Floats, comparisons, and what has no result that is looked at.
_DATA = re.compile(
    r"arith\.(cmp[if]|\w+f|sitofp|uitofp|fpto[su]i|extf|truncf)\b|math\.|tt\.(store|dot|fp_to_fp|bitcast|atomic_rmw)"
)
_RESULT = re.compile(r"^(?:(%[\w.]+)(?::(\d+))? = )?\"?([\w.]+)\"?(.*)$")
_NAMES = re.compile(r"%[\w.]+(?:#\d+)?")


def ir_of(
    kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """(Triton IR of a launch, its arguments by their names there), as the launcher would specialise it."""
    target = GPUTarget("cuda", 90, 32)
    backend, source, context = make_backend(target), specialised(kernel, arguments), ir.context()
    made = backend.parse_options({"enable_fp_fusion": True, **options})
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, made, source.language)
    module = source.make_ir(
        target, made, backend.get_codegen_implementation(made), backend.get_module_map(), context
    )
    text = str(stages["ttir"](module, {}))
    head = next(line for line in text.splitlines() if "tt.func public" in line)
    names = re.findall(r"(%[\w.]+): (?:!tt\.ptr|[if]\d)", head)
    given = [pair for p in kernel.params if not p.is_constexpr for pair in _flat(p.name, arguments[p.name])]
    assert len(names) == len(given), (names, given)
    return text, {
        name: value if isinstance(value, int) else own
        for name, (own, value) in zip(names, given, strict=True)
    }


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """An argument's parts that are no constants of the code."""
    if isinstance(value, tuple):
        for one in value:
            yield from _flat(name, one)
    elif value is not None and not (isinstance(value, int) and value == 1):
        yield name, value


class Analysis:
    """One kernel and one launch. `found`: what may overflow, each line once."""

    def __init__(
        self, text: str, given: Mapping[str, Any], grid: Sequence[int], read: Mapping[str, Interval]
    ) -> None:
        self.lines = [
            re.sub(r" loc\(.*", "", line).strip() for line in text.splitlines() if not line.startswith("#loc")
        ]
        self.values: dict[str, Value] = {
            name: (v, v) if isinstance(v, int) else v for name, v in given.items()
        }
        self.grid, self.read, self.silent, self.checked = grid, read, 0, 0
        self.found: dict[str, str] = {}
        start = next(i for i, line in enumerate(self.lines) if line.startswith("tt.func public"))
        self._block(start + 1)

    def _block(self, at: int) -> tuple[int, list[Value]]:
        """Carry a region out; (the line that closes it, what it yields)."""
        yielded: list[Value] = []
        while not self.lines[at].startswith("}"):
            line = self.lines[at]
            if line.startswith(("scf.yield", "tt.return")):
                yielded = [self._of(name) for name in _NAMES.findall(line.split(" : ")[0])]
            elif "scf.for " in line:
                at = self._for(at)
            elif "scf.if " in line:
                at = self._if(at)
            elif line.endswith("({"):
                at = self._reduce(at)
            elif line:
                self._one(line)
            at += 1
        return at, yielded

    def _for(self, at: int) -> int:
        line = self.lines[at]
        step = re.search(r"scf\.for (%[\w.]+) = (\S+) to (\S+) step (\S+)", line)
        assert step is not None, line
        begin, end, by = (self._int(step.group(i)) for i in (2, 3, 4))
        last = max(begin[1], end[1] - 1)
        if begin[0] == begin[1] and by[0] == by[1]:
            last = begin[0] + max(0, end[1] - 1 - begin[0]) // by[0] * by[0]
        self.values[step.group(1)] = (begin[0], last)
        self._kept(line, (begin[0], last + by[1]), 32 if line.endswith("i32 {") else 64)
        carried = re.findall(
            r"(%[\w.]+) = (%[\w.]+(?:#\d+)?)", (re.search(r"iter_args\((.*?)\) ->", line) or [""])[0]
        )
        for name, first in carried:
            self.values[name] = self._of(first)
        for widen in (False, True):  # a carried integer that does not stay within where it began may be any
            self.silent += 1
            close, yielded = self._block(at + 1)
            self.silent -= 1
            for (name, _), value in zip(carried, yielded, strict=True):
                before = self.values[name]
                if (
                    isinstance(before, tuple)
                    and isinstance(value, tuple)
                    and not (before[0] <= value[0] and value[1] <= before[1])
                ):
                    self.values[name] = (
                        (-(2**63), 2**63 - 1)
                        if widen
                        else (min(before[0], value[0]), max(before[1], value[1]))
                    )
        close, yielded = self._block(at + 1)
        self._results(line, yielded)
        return close

    def _if(self, at: int) -> int:
        close, first = self._block(at + 1)
        second = first
        if "else" in self.lines[close]:
            close, second = self._block(close + 1)
        self._results(self.lines[at], [_union(a, b) for a, b in zip(first, second, strict=True)])
        return close

    def _reduce(self, at: int) -> int:
        """Of integers only extremes, which stay within."""
        match = _RESULT.match(self.lines[at])
        assert match is not None
        close = next(i for i in range(at, len(self.lines)) if self.lines[i].startswith("})"))
        within = [self._of(name) for name in _NAMES.findall(match.group(4).split("<{")[0])]
        assert not isinstance(within[0], tuple) or any(
            re.search(r"arith\.(max|min)[su]i", line) for line in self.lines[at:close]
        )
        self._results(self.lines[at], within)
        return close

    def _results(self, line: str, found: Sequence[Value]) -> None:
        match = re.match(r"(%[\w.]+)(?::(\d+))? = ", line)
        if match is not None:
            names = (
                [match.group(1)]
                if match.group(2) is None
                else [f"{match.group(1)}#{i}" for i in range(int(match.group(2)))]
            )
            self.values.update(zip(names, found, strict=True))

    def _one(self, line: str) -> None:
        match = _RESULT.match(line)
        assert match is not None, line
        name, _, what, rest = match.groups()
        if name is None:
            return
        kind = rest.rsplit(" : ", 1)[-1].split(" to ")[-1].split(" -> ")[-1]
        bits = int((re.search(r"(?:^|[\sx<])i(\d+)>*$", kind) or [0, 0])[1])
        given = [self._of(one) for one in _NAMES.findall(rest.rsplit(" : ", 1)[0])]
        self.values[name] = self._value(what, rest, kind, bits, given, line)

    def _value(self, what: str, rest: str, kind: str, bits: int, given: Sequence[Value], line: str) -> Value:
        full = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if bits > 1 else (0, 1)
        if what == "arith.constant":
            number = re.search(r"(?:dense<)?(-?\d+)>? : (?:tensor<[\dx]+x)?i\d+", rest)
            return None if number is None else (int(number.group(1)), int(number.group(1)))
        if what in _SAME:
            return given[0]
        if what == "tt.addptr":
            return given[0]
        if what == "tt.get_program_id":
            return 0, self.grid["xyz".index(rest.split(":")[0].strip())] - 1
        if what == "tt.get_num_programs":
            return (self.grid["xyz".index(rest.split(":")[0].strip())],) * 2
        if what == "tt.make_range":
            end, start = (int(re.search(rf"{word} = (\d+)", rest)[1]) for word in ("end", "start"))  # type: ignore[index]
            return start, end - 1
        if what == "tt.load":
            return None if not bits else self.read.get(str(given[0]), full)
        if not bits or bits < 32 or _DATA.match(what):
            return full if bits >= 32 else None
        if what in ("arith.extui", "arith.trunci"):
            return (
                given[0]
                if isinstance(given[0], tuple) and full[0] <= given[0][0] and given[0][1] <= full[1]
                else full
            )
        if what == "arith.select":
            return _union(given[1], given[2])
        if what == "tt.join":
            return _union(given[0], given[1])
        rule = _RULES.get(what)
        assert rule is not None and len(given) == 2, f"no rule for {line}"
        a, b = (one if isinstance(one, tuple) else full for one in given)
        return self._kept(line, rule(a, b), bits)

    def _kept(self, line: str, found: Interval, bits: int) -> Interval:
        self.checked += not self.silent
        if -(2 ** (bits - 1)) <= found[0] and found[1] < 2 ** (bits - 1):
            return found
        if not self.silent:
            self.found[line] = f"{line}: {found[0]:.3g} to {found[1]:.3g}"
        return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def _of(self, name: str) -> Value:
        return self.values[name]

    def _int(self, name: str) -> Interval:
        found = self._of(name)
        assert isinstance(found, tuple), name
        return found


def _union(a: Value, b: Value) -> Value:
    return (min(a[0], b[0]), max(a[1], b[1])) if isinstance(a, tuple) and isinstance(b, tuple) else a


def _corners(a: Interval, b: Interval) -> list[int]:
    return [x * y for x in a for y in b]


def _quotient(a: Interval, b: Interval) -> Interval:
    """Towards zero; by a divisor that may be 0 no more than the dividend, as for one of 1."""
    divisors = [d for d in (*b, 1, -1) if d and b[0] <= d <= b[1]]
    found = [abs(x) // abs(d) * (1 if (x < 0) == (d < 0) else -1) for x in a for d in divisors]
    return min([*found, 0 if a[0] <= 0 <= a[1] else found[0]]), max(
        [*found, 0 if a[0] <= 0 <= a[1] else found[0]]
    )


def _and(a: Interval, b: Interval) -> Interval:
    """Bits of both: of a number that is not negative no more than it has."""
    tops = [top for low, top in (a, b) if low >= 0]
    return (0, min(tops)) if tops else (-(2**63), 2**63 - 1)


def _remainder(a: Interval, b: Interval) -> Interval:
    most = max(abs(b[0]), abs(b[1])) - 1
    return max(a[0], -most) if a[0] < 0 else 0, min(a[1], most) if a[1] > 0 else 0


_RULES = {
    "arith.addi": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "arith.subi": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "arith.muli": lambda a, b: (min(_corners(a, b)), max(_corners(a, b))),
    "arith.divsi": _quotient,
    "arith.remsi": _remainder,
    "arith.andi": _and,
    "arith.shrsi": lambda a, b: (min(a[0] >> s for s in b), max(a[1] >> s for s in b)),
    "arith.minsi": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "arith.maxsi": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
}
