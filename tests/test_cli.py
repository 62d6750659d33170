"""The command line where no model is built: help, reading plans, and every request that is refused."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from effcompile import cli, console
from effcompile.core.cost import Cost
from effcompile.core.errors import EffcompileError, InfeasibleError
from effcompile.core.goal import Goal
from effcompile.ir.plan import Certificate, Decision, Declined, Plan, Totals

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
    fp32, chosen = Cost(seconds=2e-3, weight_bytes=4096), Cost(seconds=1e-3, weight_bytes=1024, error_squared=1e-6)
    decision = Decision(
        site="layers.0.dense", kind="linear", option=option, baseline="fp32", by="quantize", cost=chosen, baseline_cost=fp32
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
        declined=(Declined(site="layers.0.dense", kind="linear", option="w4", by="quantize", reason="slower than int8_dynamic"),),
        certificate=Certificate(
            status="optimal within gap", objective=2e-3, bound=2e-3, gap=0.0, sites=2, alternatives=4, seconds=0.01, solver="z3"
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
    done = subprocess.run([sys.executable, "-c", code, *commands], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_has_help_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    names = [info.name or info.callback.__name__ for info in cli.app.registered_commands if info.callback]
    assert sorted(names) == ["calibrate", "diff", "explain", "frontier", "optimize", "plan", "run", "targets"]
    for name in names:
        outcome = Outcome(capsys, name, "--help")
        assert outcome.status == 0
        assert "--json" in outcome.out


def test_targets_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(Outcome(capsys, "targets", "--json").out)
    assert {"h100-sxm", "cpu-generic"} <= {target["name"] for target in found}
    assert all(target["memory_bandwidth"] > 0 for target in found)


def test_explain_one_site_as_json(capsys: pytest.CaptureFixture[str], plan_file: Path) -> None:
    found = json.loads(Outcome(capsys, "explain", plan_file, "layers.0", "--json").out)
    assert [d["site"] for d in found["decisions"]] == ["layers.0.dense"]
    assert found["declined"][0]["reason"] == "slower than int8_dynamic"


def test_explain_unknown_site_suggests(capsys: pytest.CaptureFixture[str], plan_file: Path) -> None:
    outcome = Outcome(capsys, "explain", plan_file, "layers.0.dense2")
    assert outcome.status == 2
    assert "Did you mean 'layers.0.dense'" in outcome.words


def test_diff_as_json_lists_the_sites_that_differ(capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path) -> None:
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
    ],
)
@pytest.mark.parametrize("command", ["explain PLAN", "diff PLAN PLAN", f"optimize {TINY} --plan PLAN"])
def test_corrupted_or_foreign_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, says: str, command: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    outcome = Outcome(capsys, *command.replace("PLAN", str(path)).split())
    assert outcome.status == 2
    assert says in outcome.words
    assert str(path) in outcome.words
    assert path.read_bytes() == content


@pytest.mark.parametrize("change", [{"max_error": -1}, {"max_error": "lots"}, {"minimize": "cost"}])
def test_a_plan_with_a_goal_that_is_not_allowed(capsys: pytest.CaptureFixture[str], plan_file: Path, change: dict[str, object]) -> None:
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
def test_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str], arguments: str, says: str) -> None:
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


def test_interrupt_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, plan_file: Path) -> None:
    monkeypatch.setattr(cli.Plan, "load", _raiser(KeyboardInterrupt()))
    assert Outcome(capsys, "explain", plan_file).status == 130


def test_a_bug_shows_its_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.Plan, "load", _raiser(KeyError("lost")))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["explain", "plan.json", "--json"])
    out, err = capsys.readouterr()
    assert stopped.value.code == 1
    assert "Traceback" in err
    assert "bug in effcompile" in err
    assert json.loads(out)["error"]["type"] == "KeyError"


def test_debug_shows_where_an_error_comes_from(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFCOMPILE_DEBUG", "1")
    with pytest.raises(SystemExit):
        cli.main(["explain", "no-such-plan.json"])
    assert "Traceback" in capsys.readouterr().err


def test_infeasible_is_explained_with_the_flag_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    reason = InfeasibleError("the weights alone need 400 MiB", binding=("memory",), nearest={"memory": 2**29})
    with pytest.raises(cli.typer.Exit) as stopped, console.explaining(Goal(memory=2**28), as_json=False):
        raise reason
    assert stopped.value.exit_code == 1
    assert "--memory 0.50GiB" in " ".join(capsys.readouterr().err.split())
    assert console.error_data(reason, 1)["nearest"] == {"memory": 2**29}


def test_closed_pipe_is_quiet() -> None:
    script = f"{sys.executable} -c 'from effcompile.cli import main; main()' targets --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], check=False, capture_output=True, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert done.stderr == ""


def _raiser(error: BaseException):  # type: ignore[no-untyped-def]
    def fail(*_: object) -> None:
        raise error

    return fail


def test_errors_are_told_in_one_block(capsys: pytest.CaptureFixture[str]) -> None:
    status = console.tell(EffcompileError("no [bold]markup[/bold] here"), as_json=False)
    assert status == 1
    assert capsys.readouterr().err == "✘ no [bold]markup[/bold] here\n"
