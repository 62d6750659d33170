"""Each text of a batch of short ones is within the limit, for it may be sent alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from effcompile.capture import capture
from effcompile.core.goal import Goal
from effcompile.ir.figures import Check
from effcompile.proof.verify import distance, references, verify

#: Of one text of eight: 0.053 of all eight.
ERROR = 0.15


class Embeds(nn.Module):
    """Tokens, the first of each text, numbers of the whole batch, and one number of each text."""

    def __init__(self, *, small: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 8)
        if small:  # the last text's, which is the last row's middle
            self.table.weight.data[14:] *= 1e-3

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.table(input_ids)
        return x, x[:, 0].abs(), x.abs().amax((0, 1)), x.abs().sum((1, 2))


def checks(model: nn.Module, goal: Goal, *, length: int, output: int, error: float = ERROR) -> list[Check]:
    """Of a result whose last text is off by so much in one of its outputs, where texts are so long."""
    program = capture(model, (), {"input_ids": torch.arange(16).reshape(2, 8)})
    cases = references(program, model, goal)

    def lowered(input_ids: Tensor) -> tuple[Tensor, ...]:
        outputs = [output.clone() for output in program.module(input_ids=input_ids)]
        if input_ids.shape[1] == length:
            outputs[output][-1] *= 1 + error
        return tuple(outputs)

    found = verify(lowered, program, cases, goal)
    # a plan is foreseen by the same measure
    foreseen = [distance(list(lowered(*case.inputs)), program, case, goal) for case in cases]
    assert foreseen == [check.error for check in found]
    return found


def failed(found: list[Check]) -> list[str]:
    return [check.name for check in found if not check.passed]


@pytest.mark.parametrize(("length", "output"), [(1, 0), (2, 0), (1, 1), (1, 3)])
def test_one_text_that_is_off_fails_beside_others_that_are_right(length: int, output: int) -> None:
    found = checks(Embeds().eval(), Goal(max_error=0.1), length=length, output=output)
    assert failed(found) == [f"short texts 8×{length}"]
    error = max(check.error for check in found)
    with torch.no_grad():
        texts = torch.tensor([[0], [8], [2], [10], [4], [12], [6], [14]])
        rows = Embeds()(texts)[output].reshape(8, -1).norm(dim=1)
    own = ERROR * float(rows[-1]) / max(float(rows[-1]), float(rows.square().mean().sqrt()))
    assert length == 2 or error == pytest.approx(own, rel=1e-5)


def test_a_text_that_is_nearly_zero_is_measured_by_the_usual_size() -> None:
    """Of its own size it is off by more than the limit, of the usual one by a thousandth of that."""
    found = checks(Embeds(small=True).eval(), Goal(max_error=0.1), length=1, output=0)
    assert failed(found) == []
    assert 0 < max(check.error for check in found) < 1e-3


def test_an_output_without_texts_is_compared_as_a_whole() -> None:
    """One of its eight numbers is off."""
    found = checks(Embeds().eval(), Goal(max_error=0.1), length=1, output=2)
    assert failed(found) == []


def test_longer_texts_are_compared_as_a_whole() -> None:
    """One of two is off."""
    found = checks(Embeds().eval(), Goal(max_error=0.14), length=8, output=0)
    assert failed(found) == []
    assert max(check.error for check in found) == pytest.approx(ERROR / math.sqrt(2), rel=0.2)
