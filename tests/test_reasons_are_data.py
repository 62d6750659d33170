"""A reason is a text with holes and the figures in them: nothing is written into the text where
it is made.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from effcompile.backends import told
from effcompile.core.errors import UsageError
from effcompile.core.reasons import Because, Reason, Unsupported

PACKAGE = Path(__file__).parents[1] / "effcompile"
#: Where a text is handed on, be it of an older plan or of a third party.
MAKERS = {"core/reasons.py", "ir/plan.py"}


def texts(tree: ast.AST) -> Iterator[ast.expr]:
    """The text of every reason that is made: `Because(text)`, `Unsupported.of(text)`, `Refusal(text)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            made = (
                node.func.value
                if isinstance(node.func, ast.Attribute) and node.func.attr == "of"
                else node.func
            )
            if isinstance(made, ast.Name) and made.id in {
                "Because",
                "Unsupported",
                "Refusal",
                "AnotherGraph",
                "NotThisFormError",
            }:
                yield node.args[0]


def written_into(text: ast.expr, tree: ast.AST) -> bool:
    """Whether a text has a value formatted into it, where it stands or where its name is given one."""
    names = {node.id for node in ast.walk(text) if isinstance(node, ast.Name)}
    given = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id in names for t in node.targets)
    ]
    parts = [part for each in (text, *given) for part in ast.walk(each)]
    calls = {
        ast.unparse(part.func).rpartition(".")[2] for part in ast.walk(text) if isinstance(part, ast.Call)
    }
    # as many holes as there are figures
    return any(isinstance(part, ast.JoinedStr) for part in parts) or not calls <= {"join", "len"}


def written(path: Path) -> Iterator[str]:
    """The reasons of a file that have a value written into their text."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    scopes: list[ast.AST] = [*functions, tree]
    seen: dict[int, ast.expr] = {}
    for scope in scopes:
        for text in texts(scope):
            if id(text) not in seen and written_into(text, scope):
                yield f"{path}:{text.lineno}: {ast.unparse(text)}"
            seen[id(text)] = text


def test_no_figure_is_written_into_the_text_of_a_reason() -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if str(path.relative_to(PACKAGE)) not in MAKERS]
    assert len(paths) > 500 and not [line for path in paths for line in written(path)]


def test_values_go_into_holes_by_their_kind() -> None:
    assert Unsupported.of("{} takes {} of {}", "conv", 3, (1, 2)) == Unsupported(
        "{name} takes {} of {name}", ("conv", 3, "(1, 2)")
    )
    assert str(Because.of("it holds {}", True)) == "it holds True" and str(Because.of("a {set}")) == "a {set}"


def test_what_a_backend_says_is_a_reason() -> None:
    assert told("mine", None) is None and told("mine", Unsupported("x")) == Unsupported("x")
    assert str(told("mine", "it takes no {braces}")) == "it takes no {braces}"
    with pytest.raises(UsageError, match="The backend mine gives 7, a int, as a reason"):
        told("mine", 7)
    assert isinstance(told("mine", "a sentence"), Reason)
