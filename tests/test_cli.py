"""The command line where no model is built: help, reading plans, and every request that is refused."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from effcompile import cli, console
from effcompile.cli import commands, deciding, job
from effcompile.core.causes import Said
from effcompile.core.cost import Cost
from effcompile.core.errors import EffcompileError, InfeasibleError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Unsupported
from effcompile.ir.figures import Certificate, Totals
from effcompile.ir.plan import Decision, Declined, Plan

TINY = Path(__file__).parent.parent / "examples" / "tiny.py"


class Outcome:
    """Exit status, stdout and stderr of one command, run in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        with pytest.raises(SystemExit) as stopped:
            cli.main([str(a) for a in arguments])
        code = stopped.value.code
        self.status = code if isinstance(code, int) else 0 if code is None else 1
        self.out, self.err = capsys.readouterr()
        assert "Traceback" not in self.err

    @property
    def words(self) -> str:
        """stderr with the line breaks of narrow terminals undone."""
        return " ".join(self.err.split())


def small_plan(option: str = "int8_dynamic") -> Plan:
    fp32, chosen = (
        Cost(seconds=2e-3, weight_bytes=4096),
        Cost(seconds=1e-3, weight_bytes=1024, error_squared=1e-6),
    )
    decision = Decision(
        site="layers.0.dense",
        kind="linear",
        option=option,
        baseline="fp32",
        by="quantize",
        cost=chosen,
        baseline_cost=fp32,
    )
    return Plan(
        model="Mlp",
        fingerprint="0123456789abcdef",
        parameters=1024,
        goal=Goal(max_error=0.01),
        target="auto",
        target_line="2 cores",
        backend="onnxruntime",
        decisions=(decision, replace(decision, site="layers.1.dense")),
        declined=(
            Declined(
                site="layers.0.dense",
                kind="linear",
                option="w4",
                by="quantize",
                reason=Unsupported("slower than int8_dynamic"),
            ),
        ),
        certificate=Certificate(
            status="optimal within gap",
            objective=2e-3,
            bound=2e-3,
            gap=0.0,
            sites=2,
            alternatives=4,
            seconds=0.01,
            solver="z3",
        ),
        baseline=Totals(seconds=4e-3, weight_bytes=8192),
        predicted=Totals(seconds=2e-3, weight_bytes=2048, error=1.4e-3),
    )


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    return small_plan().save(tmp_path / "plan.json")


def test_help_and_readers_need_no_torch(plan_file: Path) -> None:
    code = (
        "import sys; from effcompile.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    try: main(line.split())\n"
        "    except SystemExit as e: assert not e.code, (line, e.code)\n"
        "sys.exit('torch' in sys.modules)"
    )
    commands = [
        "--help",
        "optimize --help",
        "targets",
        f"explain {plan_file}",
        f"explain {plan_file} layers.0",
        f"diff {plan_file} {plan_file}",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *commands], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_command_has_help_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    names = [info.name or info.callback.__name__ for info in cli.app.registered_commands if info.callback]
    assert sorted(names) == [
        "cache",
        "calibrate",
        "diff",
        "doctor",
        "explain",
        "export",
        "frontier",
        "optimize",
        "passes",
        "plan",
        "run",
        "serve",
        "targets",
        "verify",
    ]
    for name in names:
        outcome = Outcome(capsys, name, "--help")
        assert outcome.status == 0
        assert "--json" in outcome.out


def test_a_list_of_the_commands_loads_none_and_tells_the_first_line_of_each() -> None:
    for name, (_, _, first) in commands.COMMANDS.items():
        assert " ".join(commands.loaded(name).help.split("\n\n")[0].split()) == first
    code = (
        "import sys; from effcompile.cli import main\ntry: main(['--help'])\nexcept SystemExit: "
        "pass\nprint(sorted(m for m in sys.modules if m.startswith(('effcompile.cli.', 'effcompile.ir', "
        "'effcompile.report.'))), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr.strip() == "['effcompile.cli.commands']"


def test_targets_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(Outcome(capsys, "targets", "--json").out)
    assert {"h100-sxm", "cpu-generic"} <= {target["name"] for target in found}
    assert all(target["memory_bandwidth"] > 0 for target in found)


def test_explain_one_site_as_json(capsys: pytest.CaptureFixture[str], plan_file: Path) -> None:
    found = json.loads(Outcome(capsys, "explain", plan_file, "layers.0", "--json").out)
    assert [d["site"] for d in found["decisions"]] == ["layers.0.dense"]
    assert found["declined"][0]["reason"] == {
        "kind": "unsupported",
        "text": "slower than int8_dynamic",
        "figures": [],
    }


def test_explain_unknown_site_suggests(capsys: pytest.CaptureFixture[str], plan_file: Path) -> None:
    outcome = Outcome(capsys, "explain", plan_file, "layers.0.dense2")
    assert outcome.status == 2
    assert "Did you mean 'layers.0.dense'" in outcome.words


def test_diff_as_json_lists_the_sites_that_differ(
    capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path
) -> None:
    other = small_plan("bf16").save(tmp_path / "other.json")
    found = json.loads(Outcome(capsys, "diff", plan_file, other, "--json").out)
    assert found["decisions"][0] == {"site": "layers.0.dense", "a": "int8_dynamic", "b": "bf16"}
    assert found["a"]["predicted"]["seconds"] == 2e-3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not valid JSON"),
        (b'{"format": "effcompile-plan", "vers', "cut off"),
        (b"\x80\x04\x95pickle", "not valid JSON"),
        (b'{"name": "somebody else"}', "not an effcompile plan"),
        (b"[1, 2]", "not an effcompile plan"),
        (b'{"format": "effcompile-plan", "version": 99}', "version 99"),
        (b'{"format": "effcompile-plan", "version": 2, "model": 7}', "not a valid plan"),
        (b'{"format": "effcompile-plan", "goal": {"memory": 7, "memory": 8}}', "'memory' twice"),
    ],
)
@pytest.mark.parametrize("command", ["explain PLAN", "diff PLAN PLAN", f"optimize {TINY} --plan PLAN"])
def test_corrupted_or_foreign_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, says: str, command: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    outcome = Outcome(capsys, *command.replace("PLAN", str(path)).split())
    assert outcome.status == 2
    assert says in outcome.words
    assert str(path) in outcome.words
    assert path.read_bytes() == content


@pytest.mark.parametrize("place", ["site", "version"])
def test_what_a_file_says_is_no_command_to_the_terminal(
    capsys: pytest.CaptureFixture[str], plan_file: Path, place: str
) -> None:
    """Errors name sites and values of a file of somebody's: escape sequences would rewrite the screen."""
    data = json.loads(plan_file.read_text())
    command = "\x1b[2J\x1b]8;;http://evil\x07\x9b2J"
    if place == "site":
        data["decisions"][0]["site"] = command
    else:
        data["version"] = command
    plan_file.write_text(json.dumps(data))
    outcome = Outcome(capsys, "explain", plan_file, "nosuch")
    assert outcome.status == 2 and "http://evil" in outcome.err
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", outcome.err)


@pytest.mark.parametrize("change", [{"max_error": -1}, {"max_error": "lots"}, {"minimize": "cost"}])
def test_a_plan_with_a_goal_that_is_not_allowed(
    capsys: pytest.CaptureFixture[str], plan_file: Path, change: dict[str, object]
) -> None:
    data = json.loads(plan_file.read_text())
    plan_file.write_text(json.dumps({**data, "goal": {**data["goal"], **change}}))
    outcome = Outcome(capsys, "explain", plan_file)
    assert outcome.status == 2
    assert next(iter(change)) in outcome.words


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--max-error -1", "max_error = -1.0"),
        ("--max-error nan", "max_error = nan"),
        ("--memory lots", "Write it like 6GiB"),
        ("--memory 0", "at least one byte"),
        ("--memory -1GiB", "'-1GiB' is not a size"),
        ("--memory=-1GiB", "'-1GiB' is not a size"),
        ("--mode training --memory 12parsecs", "Write it like 6GiB, 900MB"),
        ("--mode training --reads last", "a training step reads every position"),
        ("--minimize money", "Choose one of: time, memory"),
        ("--mode serving", "Choose one of: inference, training"),
        ("--reads first", "Choose one of: all, last"),
        ("--target h100", "Did you mean 'h100-sxm'"),
        ("--target nowhere.toml", "Cannot read the target"),
        ("--plan nowhere.json", "Cannot read the plan"),
        ("--no-such-option", "No such option"),
        ("--max-error lots", "--max-error"),
    ],
)
def test_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], arguments: str, says: str
) -> None:
    outcome = Outcome(capsys, "optimize", "no-such-file.py", *arguments.split())
    assert outcome.status == 2
    assert says in outcome.words


def test_refusal_as_json_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Outcome(capsys, "optimize", TINY, "--max-error", "-1", "--json")
    error = json.loads(outcome.out)["error"]
    assert (outcome.status, error["type"], error["exit_code"]) == (2, "UsageError", 2)
    assert outcome.err == ""


def test_output_that_is_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        outcome = Outcome(capsys, "optimize", TINY, "-o", output)
        assert outcome.status == 2
        assert "is a file" in outcome.words
    assert (tmp_path / "file").read_text() == "mine"


def test_output_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Outcome(capsys, "optimize", TINY, "-o", "/proc/effcompile")
    assert outcome.status == 2
    assert "Cannot write in '/proc'" in outcome.words


def test_interrupt_is_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, plan_file: Path
) -> None:
    monkeypatch.setattr(Plan, "load", _raiser(KeyboardInterrupt()))
    assert Outcome(capsys, "explain", plan_file).status == 130


def test_a_bug_shows_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plan, "load", _raiser(KeyError("lost")))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["explain", "plan.json", "--json"])
    out, err = capsys.readouterr()
    assert stopped.value.code == 1
    assert "Traceback" in err
    assert "bug in effcompile" in err
    assert json.loads(out)["error"]["type"] == "KeyError"


def test_debug_shows_where_an_error_comes_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFFCOMPILE_DEBUG", "1")
    with pytest.raises(SystemExit):
        cli.main(["explain", "no-such-plan.json"])
    assert "Traceback" in capsys.readouterr().err


def test_infeasible_is_explained_with_the_flag_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    reason = InfeasibleError(
        Said("the weights alone need 400 MiB"), binding=("memory",), nearest={"memory": 2**29}
    )
    with pytest.raises(cli.typer.Exit) as stopped, console.explaining(Goal(memory=2**28), as_json=False):
        raise reason
    assert stopped.value.exit_code == 1
    assert "--memory 0.50GiB" in " ".join(capsys.readouterr().err.split())
    assert console.error_data(reason, 1)["nearest"] == {"memory": 2**29}


def test_closed_pipe_is_quiet() -> None:
    script = (
        f"{sys.executable} -c 'from effcompile.cli import main; main()' targets --json | head -c 1; "
        f"exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(
        ["bash", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert done.stderr == ""


MAIN = [sys.executable, "-c", "from effcompile.cli import main; main()"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device here")
@pytest.mark.parametrize(
    "command", ["targets", "targets --json", "--help", "explain no-such-plan.json --json"]
)
def test_output_that_cannot_be_written_is_said(command: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*MAIN, *command.split()], check=False, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "✘ Cannot write the output: No space left on device.\n")


@pytest.mark.parametrize("own", [True, False])
def test_what_is_loaded_is_left_to_the_collector_of_a_process_that_others_share(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(console.gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(console.atexit, "register", lambda _: None)
    monkeypatch.setattr(console, "_process", {"own": not own})
    console.prepare(own_process=own)
    console.keep_what_is_there()
    assert frozen == [True] * own


@pytest.mark.parametrize("training", [True, False])
def test_what_planning_a_step_left_is_not_looked_through_once_more(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An artifact is still exported of another plan: what that frees counts."""
    plan, order = SimpleNamespace(met=True), list[str]()
    request = SimpleNamespace(training=training, goal=Goal())
    wanted = SimpleNamespace(
        request=request, carried_out=lambda: order.append("planned") or SimpleNamespace(plan=plan)
    )
    monkeypatch.setattr(job.Job, "check", lambda self: None)
    monkeypatch.setattr(job.Job, "load", lambda self, steps, given: wanted)
    monkeypatch.setattr(console, "keep_what_is_there", lambda: order.append("kept"))
    monkeypatch.setattr(deciding, "_print_plan", lambda *_, **__: order.append("told"))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["optimize", "model.py"])
    assert order == ["planned", *["kept"] * training, "told"]


def test_what_is_loaded_is_given_back_without_a_word() -> None:
    """triton, which Inductor loads, said at the end of every optimize what it had left over, in 30 lines."""
    pytest.importorskip("triton")
    said = (
        "import triton, torch; from triton.runtime.cache import triton_key\n"
        "triton_key(); from effcompile import console\n"
        "console.prepare(own_process=True); console.keep_what_is_there()"
    )
    done = subprocess.run([sys.executable, "-c", said], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


#: Says as which descriptor the next file is opened, once the streams are prepared.
LOOKED = (
    "console.prepare = lambda **how: "
    "(real(**how), os.write(2, b'opened as %d\\n' % os.open('.', os.O_RDONLY)))"
)


def close_all(*numbers: int) -> None:
    for number in numbers:
        os.close(number)


@pytest.mark.parametrize(
    ("command", "status"), [("targets --json", 0), ("explain no-such-plan.json --json", 2), ("--nonsense", 2)]
)
def test_streams_that_are_closed(command: str, status: int, tmp_path: Path) -> None:
    """No file that is opened later takes the place of a stream: what a library says to stdout would go into
    it.
    """
    code = f"import os; from effcompile import cli, console; real = console.prepare; {LOOKED}; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()],
        check=False,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(close_all, 0, 1),
        cwd=tmp_path,
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert int(done.stderr.split("opened as ")[1].split()[0]) > 2
    assert (
        subprocess.run(
            [*MAIN, *command.split()], check=False, preexec_fn=partial(close_all, 0, 1, 2)
        ).returncode
        == status
    )


def test_a_terminal_without_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, plan_file: Path
) -> None:
    for columns in ("0", "", "1", "20", "-5", "abc"):
        monkeypatch.setenv("COLUMNS", columns)
        assert "layers" in "".join(Outcome(capsys, "explain", plan_file).out.split())


def test_a_current_folder_that_was_removed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    outcome = Outcome(capsys, "plan", "model.py", "-o", "out")
    assert outcome.status == 2
    assert "The current folder cannot be used" in outcome.words


def test_a_plan_is_found_in_its_folder(capsys: pytest.CaptureFixture[str], plan_file: Path) -> None:
    assert Outcome(capsys, "explain", plan_file.parent).out == Outcome(capsys, "explain", plan_file).out
    plan_file.unlink()
    outcome = Outcome(capsys, "explain", plan_file.parent)
    assert outcome.status == 2
    assert str(plan_file) in outcome.words


def told_to_end(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)
    time.sleep(10)


class Dying:
    def __del__(self) -> None:
        told_to_end()


def swallowed() -> None:
    with suppress(BaseException):
        told_to_end()
    time.sleep(10)


def swallowed_and_broken() -> None:
    """As numpy does while it is imported."""
    with suppress(BaseException):
        told_to_end()
    raise AttributeError("half imported")


def swallowed_in_a_destructor() -> None:
    Dying()
    time.sleep(10)


@pytest.mark.parametrize(
    ("action", "status"),
    [
        (told_to_end, 130),
        (partial(told_to_end, signal.SIGTERM), 143),
        pytest.param(
            partial(told_to_end, signal.SIGHUP),
            129,
            marks=pytest.mark.skipif(
                signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="started by nohup"
            ),
        ),
        (swallowed, 130),
        (swallowed_and_broken, 130),
        (swallowed_in_a_destructor, 130),
    ],
)
def test_a_signal_ends_a_command_also_where_a_library_swallows_it(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    plan_file: Path,
    action: Callable[[], None],
    status: int,
) -> None:
    monkeypatch.setattr(console, "_AGAIN", 0.02)
    monkeypatch.setattr(Plan, "load", lambda path: action())
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    outcome = Outcome(capsys, "explain", plan_file)
    assert (outcome.status, outcome.out, outcome.err) == (status, "", "Interrupted.\n")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_cleaning_up_after_a_signal_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_AGAIN", 0.01)
    cleaned = []

    def work() -> None:
        try:
            told_to_end()
        finally:
            with suppress(KeyError):
                raise KeyError
            time.sleep(0.1)
            cleaned.append(1)

    with pytest.raises(console.Stopped), console.stoppable():
        work()
    assert cleaned


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_so(
    capsys: pytest.CaptureFixture[str], plan_file: Path, number: signal.Signals
) -> None:
    before = signal.signal(number, signal.SIG_IGN)  # nohup, or a job of a shell script
    try:
        with console.stoppable():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_ctrl_c_while_the_command_is_imported(tmp_path: Path) -> None:
    code = (
        "import os, runpy, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "runpy.run_module('effcompile', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "effcompile", "--version"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("effcompile ")


def _raiser(error: BaseException):  # type: ignore[no-untyped-def]
    def fail(*_: object) -> None:
        raise error

    return fail


def test_errors_are_told_in_one_block(capsys: pytest.CaptureFixture[str]) -> None:
    status = console.tell(EffcompileError("no [bold]markup[/bold] here"), as_json=False)
    assert status == 1
    assert capsys.readouterr().err == "✘ no [bold]markup[/bold] here\n"
