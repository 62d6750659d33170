"""Stages of equal models with equal batches are captured once."""

from collections.abc import Iterator

import pytest
from captured_once import captured_once


@pytest.fixture(scope="module", autouse=True)
def _shared_captures() -> Iterator[None]:
    with captured_once():
        yield
