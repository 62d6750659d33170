"""Methods chosen by the type of their argument."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any, Generic, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class method_by_type(Generic[T]):  # noqa: N801 - a decorator
    """`functools.singledispatchmethod` that keeps nothing.

    That of Python 3.13.0 and 3.13.1 keeps every object whose method was ever called, and with it all that
    the object holds (python/cpython#127750): a model's weights.
    """

    def __init__(self, method: Callable[..., T]) -> None:
        self._methods = singledispatch(method)

    def register(self, method: F) -> F:
        """For values of the type that the first annotation of a method names."""
        self._methods.register(method)
        return method

    def __get__(self, obj: object, cls: type | None = None) -> Callable[..., T]:
        def method(value: object, *args: Any, **kwargs: Any) -> T:
            chosen = self._methods.dispatch(type(value))
            return chosen(obj, value, *args, **kwargs)

        return method
