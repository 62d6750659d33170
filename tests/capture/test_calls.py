"""Arguments are matched by parameter and by key; what is no tensor is the same by type and value,
or refused.
"""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
import torch

from effcompile.capture.calls import CallChecks
from effcompile.core.errors import GuardError, InputsError

X, Y = torch.zeros(2), torch.ones(3)


def forward(
    x: Any, batch: Any = None, alpha: float = 1.0, *, flag: bool = True, text: Any = "a", none: Any = None
) -> None: ...


def takes_all(x: Any, *rest: Any, **others: Any) -> None: ...


def guards(*args: Any, **kwargs: Any) -> CallChecks:
    return CallChecks(forward, "Model", args, kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X, {"q": X, "k": Y}), {}),
        ((X, {"k": Y, "q": X}), {}),
        ((), {"batch": {"k": Y, "q": X}, "x": X}),
        ((X,), {"flag": True, "batch": {"q": X, "k": Y}, "alpha": 1.0, "text": "a"}),
        ((X, {"q": X, "k": Y}, float("1")), {"none": None}),
    ],
)
def test_the_same_call_in_other_words(args: Any, kwargs: Any) -> None:
    known = guards(X, {"q": X, "k": Y})
    for _ in range(2):
        assert [id(t) for t in known.take(args, kwargs)] == [id(X), id(X), id(Y)]


@pytest.mark.parametrize(
    ("captured", "given"),
    [
        (1, True),
        (True, 1),
        (1, 1.0),
        (0.0, -0.0),
        (-0.0, 0.0),
        (1.5, 2.5),
        (1.5, math.nan),
        ("a", "b"),
        (None, False),
        (None, X),
        (1j, complex(-0.0, 1)),
        (torch.float32, torch.float16),
        ([1, 2], [2, 1]),
        ([1, 2], (1, 2)),
        ([1, 2], [1, 2, 3]),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"a": 1, "b": 1}),
        ({"a": 1}, collections.OrderedDict(a=1)),
        ({"a": X}, {"b": X}),
        ({"a": X}, {}),
        (X, 3),
        (X, [X]),
        ([X], X),
        (object(), object()),
    ],
)
def test_another_value_is_refused(captured: Any, given: Any) -> None:
    known = guards(X, text=captured)
    known.take((X,), {"text": captured})
    with pytest.raises(GuardError, match=r"^text.*Plan again") as caught:
        known.take((X,), {"text": given})
    assert caught.value.place.startswith("inputs['text']") and not caught.value.of_model


def test_not_a_number_is_itself() -> None:
    guards(X, alpha=math.nan).take((X,), {"alpha": float("nan")})


def test_none_for_a_default_that_is_not_none() -> None:
    known = guards(X)
    known.take((X,), {"none": None})
    with pytest.raises(GuardError, match=r"not planned for: alpha = None; it was left out, and is 1\.0 then"):
        known.take((X,), {"alpha": None})
    with pytest.raises(GuardError, match="missing: alpha"):
        guards(X, alpha=None).take((X,), {})


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "missing: x"),
        ((X,), {"x": X}, "given twice"),
        ((X,), {"nonsense": 1}, "takes no 'nonsense'"),
        ((X, X), {}, "not planned for: batch"),
        ((X, None, 1.0, True), {}, "takes no 'arg_0'"),
    ],
)
def test_calls_that_are_not_this_one(args: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(GuardError, match=said):
        guards(X).take(args, kwargs)


def test_any_number_and_any_names() -> None:
    known = CallChecks(takes_all, "Model", (X, Y, 3), {"scale": 2, "mask": X})
    assert [id(t) for t in known.take((X, Y, 3), {"mask": Y, "scale": 2})] == [id(X), id(Y), id(Y)]
    for args, kwargs in (
        ((X, Y, 4), {"scale": 2, "mask": X}),
        ((X, Y), {"scale": 2, "mask": X}),
        ((X, Y, 3), {"scale": 2, "mask": X, "more": None}),
    ):
        with pytest.raises(GuardError):
            known.take(args, kwargs)


def test_sorted_by_name_for_a_step() -> None:
    known = CallChecks(forward, "Model", (X,), {"batch": [Y], "alpha": 2.0}, by_name=True)
    assert [str(place) for place, _ in known.tensors] == ["batch[0]", "x"]
    assert {guard.place: guard.expected for guard in known.listed()}["inputs['alpha']"] == "2.0"


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused_in_words(layout: torch.layout) -> None:
    """Asked for its shape, one raises an internal error of torch's."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x

    rows = torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)], layout=layout)
    with pytest.raises(InputsError, match="x is a nested tensor"):
        CallChecks(forward, "Model", (rows,), {})
    with pytest.raises(GuardError, match="x = a tensor when the plan was made, but got a nested tensor"):
        CallChecks(forward, "Model", (torch.zeros(2, 8),), {}).take((rows,), {})
