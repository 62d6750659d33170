"""Paths of leaves: torch's own where torch has names, and names where it has none."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import effcompile
from effcompile.core.trees import leaves_with_path


@dataclass
class Named(OrderedDict):
    """As diffusers' outputs: a dictionary of its fields, registered without names of what it holds."""

    sample: torch.Tensor

    def __post_init__(self) -> None:
        for field in fields(self):
            super().__setitem__(field.name, getattr(self, field.name))


class Pair:
    def __init__(self, left: object, right: object) -> None:
        self.left, self.right = left, right


pytree.register_pytree_node(
    Named,
    pytree._dict_flatten,
    lambda values, context: Named(**pytree._dict_unflatten(values, context)),
    serialized_type_name="tests.Named",
)
pytree.register_pytree_node(Pair, lambda pair: ([pair.left, pair.right], None), lambda both, _: Pair(*both))
Point = namedtuple("Point", "x y")

_KNOWN = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=12,
)


@given(_KNOWN)
def test_what_torch_names_has_torchs_paths(tree: object) -> None:
    assert leaves_with_path(tree) == pytree.tree_leaves_with_path(tree)


@given(_KNOWN)
def test_leaves_come_in_torchs_order_through_classes_without_names(tree: object) -> None:
    whole = {"a": Named(sample=Pair(tree, [Pair(1, tree)])), "b": 2}
    with pytest.raises(ValueError, match="flatten_with_keys_fn"):
        pytree.tree_leaves_with_path(whole)
    assert [leaf for _, leaf in leaves_with_path(whole)] == pytree.tree_leaves(whole)


def test_keys_of_a_context_are_names_and_others_are_positions() -> None:
    paths = [pytree.keystr(path) for path, _ in leaves_with_path([Named(sample=Pair(1, 2))])]
    assert paths == ["[0]['sample'][0]", "[0]['sample'][1]"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Named:
        return Named(sample=torch.relu(self.linear(x)))


def test_a_model_that_returns_such_a_class_is_optimized() -> None:
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(4, 8)
    planned = effcompile.optimize(model, (x,), backend="torch-eager")
    with torch.no_grad():
        found = planned(x)
        assert type(found) is Named
        torch.testing.assert_close(found.sample, model(x).sample)
