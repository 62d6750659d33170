"""A sensitivity is read back where nothing that it follows from changed, and is measured again where one
thing did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from form_names import form
from torch import nn

from effcompile.capture.inference import capture
from effcompile.estimate import kept
from effcompile.estimate.sensitivity import Sensitivity, measure
from effcompile.ir import content
from effcompile.ir.program import Program

OPTIONS = {"linear": (form("int8_channel"), form("w4"))}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.fixture
def program() -> Program:
    torch.manual_seed(0)
    return capture(Small().eval(), (torch.randn(4, 32),))


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Grows by one whenever something is measured, with an empty cache."""
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    times: list[int] = []

    def counted(*args: object, **kwargs: object) -> Sensitivity:
        times.append(1)
        return measure(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(kept, "measure", counted)
    return times


def asked(program: Program, x: torch.Tensor | None = None, budget: float = 5.0) -> Sensitivity:
    given = program.args[0] if x is None else x
    return kept.measured(program, [((given,), {})], OPTIONS, budget_seconds=budget)


def test_what_was_measured_is_read_back_whole(program: Program, measuring: list[int]) -> None:
    first, second = asked(program), asked(program)
    assert len(measuring) == 1
    assert first.errors == second.errors != {}
    assert (first.draws, first.seconds) == (second.draws, second.seconds)
    assert second.method == first.method


def one_bit_of_a_weight(program: Program) -> None:
    weight = program.module.get_parameter("up.weight")
    with torch.no_grad():
        weight.view(-1).view(torch.int32)[-1] ^= 1


def an_operator(program: Program) -> None:
    node = next(node for node in program.graph.nodes if "relu" in str(node.target))
    node.target = torch.ops.aten.gelu.default
    program.module.recompile()


@pytest.mark.parametrize("change", [one_bit_of_a_weight, an_operator])
def test_another_model_is_measured(
    program: Program, measuring: list[int], change: Callable[[Program], None]
) -> None:
    asked(program)
    change(program)
    asked(program)
    assert len(measuring) == 2


def test_within_a_plan_weights_are_read_once_and_again_once_they_are_written_to(
    program: Program, measuring: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    add = content.add

    def noted(digest: hashlib._Hash, part: object) -> None:
        read.extend([1] * isinstance(part, torch.nn.Parameter))
        add(digest, part)

    asked(program)
    monkeypatch.setattr(content, "add", noted)
    weights = list(program.module.parameters())
    with kept.reading_once():
        asked(program)
        asked(program)
        assert len(measuring) == 1, "the hash is the one of before"
        assert len(read) == len(weights)
        with torch.no_grad():
            weights[0].mul_(2)
        asked(program)
        assert len(measuring) == 2
        assert len(read) == len(weights) + 1
    asked(program)
    assert len(read) == 2 * len(weights) + 1


def test_other_inputs_options_and_budgets_are_measured(program: Program, measuring: list[int]) -> None:
    asked(program)
    asked(program, program.args[0] + 1e-7)
    asked(program, budget=6.0)
    kept.measured(
        program, [((program.args[0],), {})], {"linear": (form("int8_channel"),)}, budget_seconds=5.0
    )
    assert len(measuring) == 4
    weights = {("up", "half"): lambda: program.module.get_parameter("up.weight") / 2}
    for _ in range(2):  # what a pass makes is not known by its bytes
        found = kept.measured(
            program, [((program.args[0],), {})], OPTIONS, weights=weights, budget_seconds=5.0
        )
    assert len(measuring) == 6
    assert ("up", "half") in found.errors


NEGATIVE = b'{"errors": [["up", "w4", -1.0]], "method": "", "draws": 1, "seconds": 0.0}'


@pytest.mark.parametrize("spoiled", [b"", b"{", b"[]", NEGATIVE])
def test_a_spoiled_file_is_measured_again(
    program: Program, measuring: list[int], tmp_path: Path, spoiled: bytes
) -> None:
    asked(program)
    (file,) = (tmp_path / "sensitivity").iterdir()
    file.write_bytes(spoiled)
    asked(program)
    assert len(measuring) == 2
    asked(program)
    assert len(measuring) == 2  # it was written anew


def test_a_cache_that_cannot_be_written_is_done_without(
    program: Program, measuring: list[int], tmp_path: Path
) -> None:
    (tmp_path / "sensitivity").write_text("a file where the folder should be")
    assert asked(program).errors == asked(program).errors
    assert len(measuring) == 2


def test_the_oldest_files_go(
    program: Program, measuring: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_MOST_FILES", 2)
    for budget in (5.0, 6.0, 7.0):
        asked(program, budget=budget)
    assert len(list((tmp_path / "sensitivity").iterdir())) == 2
    asked(program, budget=7.0)
    assert len(measuring) == 3
