"""What all tests share."""

import gc


def pytest_collection_finish() -> None:
    """What is imported stays: the collector need not look at it again and again, which takes a seventh of every capture."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
