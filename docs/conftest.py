"""Every example of these pages is run: Python blocks in one namespace a page, `effcompile` commands through
the CLI.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from captured_once import captured_once
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser
from typer.testing import CliRunner

ROOT = Path(__file__).parent.parent


class Commands(CodeBlockParser):
    """Blocks of `sh`: each line is an effcompile command; OUT and OTHER are folders of the page's own."""

    language = "sh"

    def evaluate(self, example: Example) -> None:
        from effcompile.cli import app

        for line in example.parsed.strip().splitlines():
            words = shlex.split(line, comments=True)
            assert words[0] == "effcompile", (
                f"{example.path}:{example.line}: only effcompile is run here: {line}"
            )
            folder = str(example.namespace["tmp"])
            words = [
                word.replace("OUT", f"{folder}/OUT").replace("OTHER", f"{folder}/OTHER") for word in words[1:]
            ]
            result = CliRunner().invoke(app, words, catch_exceptions=False)
            assert result.exit_code == 0, f"{line}\n{result.output}"


@pytest.fixture(scope="session")
def briefly() -> Iterator[None]:
    """What is measured here is not looked at, and equal models with equal batches are captured once."""
    from effcompile.core import timing
    from effcompile.estimate import operators

    measured = operators._seconds
    with captured_once(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "PATIENCE", 0.02)
        patch.setattr(operators, "_seconds", lambda call, budget, first: measured(call, 0.0, first))
        yield


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs")


pytest_collect_file = Sybil(
    parsers=[SkipParser(), PythonCodeBlockParser(), Commands()],
    patterns=["*.md"],
    fixtures=["briefly", "tmp"],
).pytest()
