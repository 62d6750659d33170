"""Learning rates follow the batch by the law of their optimizer."""

from __future__ import annotations

import pytest

from effcompile.core.errors import UsageError
from effcompile.planner.learning_rate import LINEAR, ROOT, LearningRate, law


def test_the_laws() -> None:
    given = LearningRate.of((3e-4, 256))
    assert given.at(1024, "AdamW") == pytest.approx(6e-4) and given.at(64, "Lion") == pytest.approx(1.5e-4)
    assert given.at(1024, "SGD") == pytest.approx(12e-4)
    assert (law("LARS"), law("Adam8bit")) == (LINEAR, ROOT)


def test_beyond_the_critical_batch_it_hardly_grows() -> None:
    given = LearningRate.of((1e-3, 64, 512.0))
    assert given.at(64, "SGD") == pytest.approx(1e-3) and given.at(1 << 30, "SGD") == pytest.approx(
        9e-3, rel=1e-4
    )
    assert given.at(512, "SGD") == pytest.approx(4.5e-3) and given.at(512, "AdamW") == pytest.approx(
        1e-3 * 4.5**0.5
    )
    far = LearningRate.of((1e-3, 64, 1e12))
    assert far.at(256, "SGD") == pytest.approx(4e-3, rel=1e-6) and far.at(256, "Adam") == pytest.approx(
        2e-3, rel=1e-6
    )


def test_no_law_is_known() -> None:
    with pytest.raises(
        UsageError, match="No law is known for how the learning rate of LBFGS follows the batch"
    ):
        law("LBFGS")


@pytest.mark.parametrize(
    "given",
    [
        (0.0, 8),
        (1e-3, 0),
        (1e-3,),
        1e-3,
        ("a", 8),
        (1e-3, 2.5),
        (float("nan"), 4),
        (1e-3, 8, 0),
        (1, 8, 9, 9),
    ],
)
def test_no_learning_rate(given: object) -> None:
    with pytest.raises(
        UsageError, match=r"give a learning rate and the batch that it is good for, as \(3e-4, 256\)"
    ):
        LearningRate.of(given)  # type: ignore[arg-type]
