"""Hostile files: every reader takes what is right and refuses the rest in words, within the memory that it is
given.

The cases run in a forked child with a limit on its address space, so that a reader that takes what a file
asks for dies here and not on the user's machine. The oracle is plain: a case ends with a result or with an
EffcompileError, whatever the file holds.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_settings import ASKED, cases
from rich.console import Console
from torch import nn

import effcompile
from effcompile import report
from effcompile.compiler import run_artifact
from effcompile.core.errors import EffcompileError
from effcompile.core.trust import distrust
from effcompile.ir.plan import Plan
from effcompile.machine import calibration
from effcompile.machine.machines import TARGETS, load_target
from effcompile.search.training import figures

GIB = 1 << 30
Case = Callable[[random.Random, Counter[str]], None]


# ------------------------------------------------------------------ a child of little memory


def in_a_child(case: Case, seeds: range, tally: Counter[str]) -> None:
    """All the cases, in one child; the first failures are told with their seeds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "wb") as told:
            _run_cases(case, seeds, told)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        content = told.read()
    status = os.waitpid(child, 0)[1]
    reached, counts, failure = None, Counter[str](), ""
    stream = io.BytesIO(content)
    while stream.tell() < len(content):
        reached, counts, failure = pickle.load(stream)  # of our own child
    tally.update(counts)
    if failure:
        pytest.fail(failure, pytrace=False)
    assert status == 0, f"the child ended with wait status {status} in the case of seed {reached}"


def _run_cases(case: Case, seeds: range, told: Any) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2 * GIB, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.enable(file=sys.__stderr__)
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for seed in seeds:
        pickle.dump((seed, counts, ""), told)
        told.flush()
        signal.alarm(120)  # a case that hangs is a failure
        try:
            case(random.Random(seed), counts)
        except BaseException:
            failures.append(f"seed {seed}:\n{traceback.format_exc(limit=-6)[-2000:]}")
            if len(failures) == 5:
                break
    pickle.dump((None, counts, "\n\n".join(failures)), told)


def seeds(default: int, *, share: float = 1.0) -> range:
    """Fixed ones in the suite, others each time in `make fuzz`."""
    start = 0 if ASKED is None else random.SystemRandom().randrange(1 << 30)
    return range(start, start + cases(default, most=2000, share=share))


# ------------------------------------------------------------------ files made worse

NUMBERS = [
    0,
    -1,
    1,
    2**31,
    2**30,
    2**63,
    2**64,
    -(2**63),
    10**30,
    10**400,
    1e300,
    -1e300,
    1e-320,
    0.5,
    -0.0,
    5000,
]
WORDS = [
    "",
    "x" * 10_000,
    "\x1b[31mred\x1b[0m",
    "../../etc/passwd",
    "/etc/passwd",
    "\u202e",
    "1",
    "nan",
    "[bold]",
    "a\x00b",
    "linear",
    "time",
]
LINES = [
    "[1073741824 × 16] float32",
    "[-1 × 16] float32",
    "[9999999999999999999999] int64",
    "[batch=1073741824 × 16] int64",
]
LINES += [
    "[] float32",
    "[0 × 16] float32",
    "[2 × 16] randn",
    "[2 × 16] complex128",
    "[2 × 16] float8_e4m3fn",
    "[²] float32",
]


def odd(dice: random.Random) -> Any:
    deep: Any = 1
    for _ in range(dice.choice([3, 40, 400])):
        deep = [deep] if dice.random() < 0.5 else {"a": deep}
    kinds: list[Any] = [
        None,
        True,
        False,
        [],
        {},
        [[]],
        {"": {}},
        deep,
        dice.choice(NUMBERS),
        dice.choice(WORDS),
        f"x {dice.choice(LINES)}",
    ]
    return dice.choice(kinds)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a tree of JSON."""
    found: list[tuple[Any, Any]] = []
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        found.append((value, key))
        found += places(value[key])
    return found


def worse(tree: Any, dice: random.Random) -> Any:
    """One to three changes of the tree: a value, a key, an element more or less."""
    tree = json.loads(json.dumps(tree))
    for _ in range(dice.randint(1, 3)):
        container, key = dice.choice(places(tree))
        change = dice.randrange(6)
        if change == 0:
            del container[key]
        elif change == 1 and isinstance(container, dict):
            container[dice.choice([*WORDS[1:], "format", "version", "threads"])] = odd(dice)
        elif change == 2 and isinstance(container, list):
            container.extend([container[key]] * dice.choice([1, 300]))
        elif isinstance(container[key], int | float) and dice.random() < 0.7:
            container[key] = dice.choice(NUMBERS)
        else:
            container[key] = odd(dice)
        if not places(tree):
            break
    return tree


def torn(text: bytes, dice: random.Random) -> bytes:
    """Bytes changed, lost or put in: the parser's own matter."""
    at = dice.randrange(len(text) + 1)
    more = [
        b"[" * 100_000,
        b'{"a":' * 5_000,
        b"9" * 5_000,
        b"1" + b"0" * 400,
        b"1e999999",
        b"NaN",
        b"-",
        b"\xff\xfe",
        b"\x00",
        b'"',
        b",",
        b"\\ud800",
    ]
    change = dice.randrange(4)
    if change == 0:
        return text[:at]
    if change == 1:
        return text[:at] + bytes([dice.randrange(256)]) + text[at + 1 :]
    if change == 2:
        return text[:at] + dice.choice(more) + text[at:]
    digits = [i for i in range(len(text)) if text[i : i + 1].isdigit()]
    at = dice.choice(digits)
    return text[:at] + dice.choice(more) + text[at + 1 :]


def hostile(tree: Any, dice: random.Random) -> bytes:
    text = json.dumps(worse(tree, dice) if dice.random() < 0.8 else tree, allow_nan=True).encode(
        "utf-8", "surrogatepass"
    )
    return torn(text, dice) if dice.random() < 0.3 else text


def refused_or(action: Callable[[], Any], counts: Counter[str]) -> Any:
    """What the action returns; None where it refused in words, which are short."""
    try:
        return action()
    except EffcompileError as error:
        said = str(error)
    assert 10 < len(said) < 3_000, said[:4_000]
    counts["files: refused in words"] += 1
    return None


# ------------------------------------------------------------------ plan.json


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def loss(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
    return outputs.square().mean()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "out"
    model = Net().eval()
    made = effcompile.optimize(
        model, inputs=(torch.randn(2, 16),), target="cpu-generic", backend="onnxruntime", max_error=0.05
    )
    made.save(folder)
    return folder


@pytest.fixture(scope="module")
def plans(artifact: Path) -> list[Any]:
    """What real plans say: of inference, and of training within a budget."""
    step = effcompile.plan(
        Net(), (torch.randn(8, 16),), mode="training", target="cpu-generic", loss=loss, memory="1MiB"
    )
    return [json.loads((artifact / "plan.json").read_bytes()), json.loads(json.dumps(step.to_dict()))]


def test_no_plan_json_makes_a_reader_fail(
    artifact: Path, plans: list[Any], tmp_path: Path, tally: Counter[str]
) -> None:
    good = [Plan.from_dict(tree) for tree in plans]
    folder = shutil.copytree(artifact, tmp_path / "out")
    path = folder / "plan.json"

    def case(dice: random.Random, counts: Counter[str]) -> None:
        counts["files: plan.json made hostile"] += 1
        kind = dice.randrange(2)
        path.write_bytes(hostile(plans[kind], dice))
        plan = refused_or(lambda: Plan.load(path), counts)
        if plan is None:
            return
        counts["files: hostile plans that are read"] += 1
        check_figures(plan)
        assert Plan.from_dict(plan.to_dict()) == plan
        console = Console(file=io.StringIO(), width=100)
        report.print_plan(plan, verbose=dice.random() < 0.5, console=console)
        report.html_report(plan)
        refused_or(lambda: report.explain(plan, None, console=console), counts)
        report.diff(plan, good[kind], console=console)
        if kind == 0 and refused_or(lambda: run_artifact(folder), counts) is not None:
            counts["files: artifacts run under a hostile plan"] += 1

    in_a_child(case, seeds(150, share=0.7), tally)


def check_figures(plan: Plan) -> None:
    """Bytes and seconds of whole models are never negative, nor more than anything has."""
    for totals in filter(None, (plan.baseline, plan.predicted, plan.measured, plan.measured_baseline)):
        for figure in (totals.seconds, totals.weight_bytes, totals.peak_bytes, totals.error):
            assert figure is None or 0 <= figure < 1e19


@pytest.mark.parametrize(
    "content",
    [b"[" * 1_000_000, b'{"format": "effcompile-plan", "version": ' + b"9" * 5000 + b"}", b"\x00" * 100],
)
def test_the_hostile_plans_of_the_issue(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(effcompile.FormatError):
        Plan.load(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t["predicted"].update(seconds=-1.0), r"predicted\.seconds = -1\.0 is negative"),
        (lambda t: t["predicted"].update(weight_bytes=10**400), "number|larger|range"),
        (lambda t: t["predicted"].update(weight_bytes=2**64), "larger than any machine's"),
        (lambda t: t["settings"].update(threads=2.5), "threads"),
        (lambda t: t["settings"].update(threads=None), "threads"),
        (lambda t: t["settings"].update(threads=True), "threads"),
        (lambda t: t["settings"].update(threads=-3), "-3"),
        (lambda t: t["settings"].update(deep=json.loads("[" * 300 + "]" * 300)), "nests deeper"),
        (lambda t: t.update(inputs=["x [1073741824 × 1073741824] float32"]), "of this machine's memory"),
        (lambda t: t.update(inputs=["x [²] float32"]), "does not read"),
        (lambda t: t.update(artifact={}), "without an artifact"),
    ],
)
def test_what_is_refused_and_in_which_words(
    artifact: Path, plans: list[Any], tmp_path: Path, change: Any, said: str
) -> None:
    folder = shutil.copytree(artifact, tmp_path / "out")
    tree = json.loads(json.dumps(plans[0]))
    change(tree)
    (folder / "plan.json").write_text(json.dumps(tree))
    with pytest.raises(effcompile.UsageError, match=said):
        run_artifact(folder)


def test_more_threads_than_cores_are_not_started(artifact: Path, plans: list[Any], tmp_path: Path) -> None:
    folder = shutil.copytree(artifact, tmp_path / "out")
    tree = json.loads(json.dumps(plans[0]))
    tree["settings"]["threads"] = 5000
    (folder / "plan.json").write_text(json.dumps(tree))
    before = len(os.listdir("/proc/self/task"))
    assert run_artifact(folder).outputs
    assert len(os.listdir("/proc/self/task")) < before + 200


# ------------------------------------------------------------------ targets, calibrations, operator times


def test_no_target_file_makes_a_reader_fail(tmp_path: Path, tally: Counter[str]) -> None:
    texts = [path.read_bytes() for path in sorted(TARGETS.glob("*.toml"))]
    path = tmp_path / "mine.toml"
    values = [
        b"nan",
        b"inf",
        b"-inf",
        b"-1",
        b"0",
        b"1e400",
        b"9" * 5000,
        b"9" * 400,
        b"[" * 5000,
        b'"x"',
        b"true",
        b"{a=1}",
        b"1979-05-27",
    ]

    def case(dice: random.Random, counts: Counter[str]) -> None:
        counts["files: target files made hostile"] += 1
        text = dice.choice(texts)
        if dice.random() < 0.6:
            lines = text.split(b"\n")
            at = dice.choice([i for i, line in enumerate(lines) if b"=" in line])
            lines[at] = lines[at].partition(b"=")[0] + b"= " + dice.choice(values)
            text = b"\n".join(lines)
        path.write_bytes(torn(text, dice) if dice.random() < 0.5 else text)
        target = refused_or(lambda: load_target(str(path)), counts)
        if target is not None:
            for figure in (target.memory_bandwidth, target.link_bandwidth, *target.peak_flops.values()):
                assert 0 < figure < 1e30

    in_a_child(case, seeds(120, share=0.1), tally)


def test_no_calibration_makes_a_reader_fail(tmp_path: Path, tally: Counter[str]) -> None:
    machine = calibration.this_hardware()
    points = calibration.BackendPoints(
        overhead=1e-6, points={"linear/fp32": [((8, 64, 64), 1e-4)]}, missing={"linear/w4"}
    )
    real = calibration.Calibration(
        machine=machine,
        date="2026-01-01",
        memory_bandwidth=1e10,
        peak_flops={"fp32": 1e11},
        backends={"torch-eager": points},
    )
    path = calibration.save(real, tmp_path / "calibration.json")
    tree = json.loads(path.read_bytes())

    def case(dice: random.Random, counts: Counter[str]) -> None:
        counts["files: calibrations made hostile"] += 1
        path.write_bytes(hostile(tree, dice))
        found, _ = calibration.load_or_none(path)
        if found is None:
            counts["files: refused in words"] += 1
            return
        assert 0 < found.memory_bandwidth <= 1e18
        for backend in found.backends.values():
            assert all(0 < seconds <= 60 for timed in backend.points.values() for _, seconds in timed)
            assert all(backend.law(kernel) is not None for kernel in backend.points if backend.points[kernel])

    in_a_child(case, seeds(120, share=0.1), tally)


def test_no_operator_times_make_a_reader_fail(
    tmp_path: Path, tally: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "operators.json"
    monkeypatch.setattr(figures, "figures_path", lambda of=None: path)
    one, other = (
        figures.Measured(seconds=1e-4, workspace=64),
        figures.Measured(seconds=2e-4, workspace=0, results=(8, 16)),
    )
    assert figures.keep_figures({"aten.mm": one, "aten.add": other}) is None
    tree = json.loads(path.read_bytes())
    assert len(figures.known_figures()) == 2
    for seconds in (0.0, -1e-9, 1e300):
        path.write_text(json.dumps({**tree, "operators": {"a": {"seconds": seconds, "workspace": 0}}}))
        assert figures.known_figures() == {}

    def case(dice: random.Random, counts: Counter[str]) -> None:
        counts["files: operator times made hostile"] += 1
        path.write_bytes(hostile(tree, dice))
        for measured in figures.known_figures().values():
            assert 0 < measured.seconds <= 600
            assert all(0 <= size <= 1 << 50 for size in (measured.workspace, *measured.results))

    in_a_child(case, seeds(120, share=0.1), tally)


# ------------------------------------------------------------------ who may have written what is loaded

NOBODY = 65534


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user can get to."""
    with tempfile.TemporaryDirectory(prefix="effcompile-test-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def attacked(chains: list[list[Path]]) -> list[bool]:
    """Of each chain, whether another user, which one child becomes, can change what its last path means."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with os.fdopen(writer, "w") as told:
                told.writelines("1" if changeable(chain) else "0" for chain in chains)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        found = [answer == "1" for answer in told.read()]
    os.waitpid(child, 0)
    return found


def changeable(chain: list[Path]) -> bool:
    """By this process: it opens the file, or renames or opens up anything on the way to it."""
    for attempt in (
        lambda p: os.close(os.open(p, os.O_WRONLY)),
        lambda p: os.rename(p, f"{p}.taken"),
        lambda p: os.chmod(p, 0o777),
    ):
        for path in chain:
            try:
                attempt(path)
            except OSError:
                continue
            return True
    return False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_whatever_another_user_could_change_is_not_trusted(reachable: Path, tally: Counter[str]) -> None:
    dice, chains = random.Random(0 if ASKED is None else None), []
    for number in range(cases(150, most=2000)):
        folders = [
            reachable / str(number),
            reachable / str(number) / "cache",
            reachable / str(number) / "cache" / "native",
        ]
        file = folders[-1] / "kernel.so"
        folders[-1].mkdir(parents=True)
        file.write_bytes(b"code")
        for path in (file, *reversed(folders)):
            if dice.random() < 0.15:
                os.chown(path, NOBODY, NOBODY)
            usual, odd_ones = (
                (0o644, [0o600, 0o664, 0o666, 0o602])
                if path == file
                else (0o755, [0o700, 0o775, 0o777, 0o1777, 0o707])
            )
            path.chmod(usual if dice.random() < 0.6 else dice.choice(odd_ones))
        chains.append([*folders, file])
    trusted = [distrust(chain[-1]) is None for chain in chains]
    modes = [[oct(path.stat().st_mode) for path in chain] for chain in chains]
    found = [*zip(modes, trusted, attacked(chains), strict=True)]
    wrong = [modes for modes, trust, changed in found if trust and changed]
    assert not wrong, f"trusted, though another user changed it: {wrong}"
    assert len(chains) - 10 > sum(trusted) > 10
    assert sum(changed for _, _, changed in found) > 10
    tally["files: modes and owners on the way to a library"] += len(chains)
