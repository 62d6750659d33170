"""How often Python's collector looks at the whole process while a step is planned."""

import gc
from collections.abc import Iterator

import pytest

from effcompile.core.garbage import seldom_collected


class _Ring:
    """Refers to itself, so that the collector alone frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def small() -> Iterator[None]:
    """Python's own thresholds, and what there is does not count: the collector looks at everything only once
    that grew by a quarter.
    """
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.freeze()
    gc.collect()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def _looks(rings: int) -> int:
    """Looks at everything while so many objects that stay are made."""
    seen: list[int] = []

    def noted(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(noted)
    try:
        kept = [_Ring() for _ in range(rings)]
    finally:
        gc.callbacks.remove(noted)
    assert len(kept) == rings
    return seen.count(2)


@pytest.mark.usefixtures("small")
def test_everything_is_looked_at_less_often() -> None:
    often = _looks(400_000)
    gc.collect()
    with seldom_collected():
        seldom = _looks(400_000)
    assert often >= 2
    assert seldom <= often // 2


def test_the_thresholds_are_put_back_also_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), seldom_collected():
        raise ZeroDivisionError
    assert gc.get_threshold() == before


def test_a_user_who_has_it_look_even_less_often_is_left_alone() -> None:
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], 5000)
    try:
        with seldom_collected():
            assert gc.get_threshold()[2] == 5000
    finally:
        gc.set_threshold(*before)
