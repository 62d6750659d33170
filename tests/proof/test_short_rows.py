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


class Compares(nn.Module):
    """Each text with each, as CLIP's logits, and its own vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Embedding(64, 8), nn.Embedding(64, 8)
        self.right.weight.data = self.left.weight.data.roll(8, 0) + 0.1

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.left(input_ids).sum(1), self.right(input_ids).sum(1)
        return left @ right.T, left


def test_a_text_that_is_compared_with_each_is_compared_with_itself_alone() -> None:
    """What each text alone returns is off by more than the limit, and by less of its row and of the whole."""
    model = Compares().eval()
    program = capture(model, (), {"input_ids": torch.arange(16).reshape(2, 8)})
    assert [spec.shape.count("batch") for spec in program.outputs] == [2, 1]

    def lowered(input_ids: Tensor) -> tuple[Tensor, ...]:
        logits, left = program.module(input_ids=input_ids)
        short = input_ids.shape[1] == 1
        return (logits + logits.diag().diag() * ERROR if short else logits), left

    goal = Goal(max_error=0.1)
    texts = torch.tensor([[0], [8], [2], [10], [4], [12], [6], [14]])
    with torch.no_grad():
        wanted, found = model(texts)[0], lowered(texts)[0]
        rows = ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max()
    assert float(rows) < goal.tolerance
    checked = verify(lowered, program, references(program, model, goal), goal)
    assert failed(checked) == ["short texts 8×1"]
    alone = [float(model(text[None])[0]) for text in texts]
    usual = math.sqrt(sum(each**2 for each in alone) / len(alone))
    own = max(ERROR * abs(each) / max(abs(each), usual) for each in alone)
    assert max(check.error for check in checked) == pytest.approx(own, rel=1e-4)
