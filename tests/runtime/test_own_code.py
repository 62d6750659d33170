"""Tokenizers and processors that are Python code of their folder: they are not run, and nobody is asked at
the terminal whether they may.
"""

import builtins
from collections.abc import Callable
from pathlib import Path

import pytest

from effcompile.core.errors import UsageError
from effcompile.runtime.generation import pictures
from effcompile.runtime.generation.pictures import processor_in
from effcompile.runtime.generation.spoken import tokenizer_in


@pytest.mark.parametrize(
    ("read", "what", "named"),
    [
        (tokenizer_in, "tokenizer", '{"auto_map": {"AutoTokenizer": ["own.Own", null]}}'),
        (processor_in, "processor", '{"auto_map": {"AutoProcessor": "own.Own"}}'),
    ],
)
def test_code_of_the_folder_is_not_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[[Path], object],
    what: str,
    named: str,
) -> None:
    (tmp_path / f"{what}_config.json").write_text(named)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    asked: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda said="": asked.append(said) or "y")
    monkeypatch.setattr(pictures, "find_spec", lambda name: object())  # as where pillow is installed
    with pytest.raises(UsageError, match=rf"The {what} in .* Python code of that folder's own.*--tokenizer"):
        read(tmp_path)
    assert not asked
    assert not (tmp_path / "ran").exists()
