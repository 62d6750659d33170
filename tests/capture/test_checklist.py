"""What is compared at each call: the same answers whether or not tables tell that they were written to."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from effcompile.capture import holders
from effcompile.capture.checklist import Checklist
from effcompile.core import torch_compat


@pytest.fixture(params=["by versions", "looked into"], autouse=True)
def _versions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "looked into":
        monkeypatch.setattr(torch_compat, "dict_versions", lambda tables: None)


class Counting(dict[str, Any]):
    """A table that answers as it likes."""

    shown: Any = None

    def values(self) -> Any:
        return (self.shown,)


@pytest.fixture
def made() -> SimpleNamespace:
    """Tables of each kind, watched, and looked at twice."""
    outer, inner = nn.Linear(2, 2).eval(), nn.Linear(2, 2).eval()
    table: dict[str, Any] = {"a": object(), "b": (1, 2)}
    ordered, empty, behind, items = OrderedDict(x=object()), {}, {"y": object()}, [object()]
    own = Counting(k=1)
    lists = Checklist(outer)
    lists.watch(holders.getter(("a", "b")), table)
    lists.watch(holders.getter(("y",)), MappingProxyType(behind))  # as a class's own attributes
    lists.table(ordered)
    lists.table(empty)
    lists.table(own)
    lists.sized.append(items)
    lists.watch(list, items)
    lists.modules.extend([outer, inner])
    lists.evaluating.append(vars(inner))
    lists.tensors[0] = weight = torch.zeros(3)
    lists.close()
    assert lists.unchanged() and lists.unchanged()
    return SimpleNamespace(
        lists=lists, table=table, ordered=ordered, empty=empty, behind=behind, outer=outer, inner=inner,
        weight=weight, items=items, own=own,
    )  # fmt: skip


CHANGES: dict[str, Any] = {
    "a value": lambda m: m.table.update(a=object()),
    "a value that is gone": lambda m: m.table.pop("b"),
    "an ordered table": lambda m: m.ordered.update(x=object()),
    "a new entry": lambda m: m.ordered.update(z=1),
    "what was empty": lambda m: m.empty.update(z=1),
    "what lies behind a proxy": lambda m: m.behind.update(y=object()),
    "an inner mode": lambda m: setattr(m.inner, "training", True),
    "a class": lambda m: setattr(m.inner, "__class__", type("Other", (nn.Linear,), {})),
    "an item": lambda m: m.items.__setitem__(0, object()),
    "a new item": lambda m: m.items.append(1),
    "a table of one's own": lambda m: setattr(m.own, "shown", object()),
    "a tensor": lambda m: m.weight.add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_at_every_call_from_then_on(made: SimpleNamespace, change: str) -> None:
    CHANGES[change](made)
    assert [made.lists.unchanged() for _ in range(3)] == [False] * 3


def test_what_is_put_back_is_as_it_was(made: SimpleNamespace) -> None:
    value = made.table["a"]
    made.table["a"] = object()
    assert not made.lists.unchanged()
    made.table["a"] = value
    assert made.lists.unchanged() and made.lists.unchanged()


def test_an_inner_mode_is_free_while_the_outermost_trains(made: SimpleNamespace) -> None:
    made.inner.training = made.outer.training = True
    assert made.lists.unchanged() and made.lists.unchanged()
    made.outer.training = False  # nothing that is watched was written to
    assert not made.lists.unchanged()


def test_entries_that_nobody_watches_may_come_and_go(made: SimpleNamespace) -> None:
    made.table["other"] = 1
    assert made.lists.unchanged()
    made.table["a"] = object()
    assert not made.lists.unchanged()
