"""Hashes of gradients: of the same content the same ones, and of no other."""

import pytest
import torch

from effcompile.ir import content
from effcompile.proof.digests import Digests, digest, digests


def of(**values: torch.Tensor | None) -> Digests:
    found = Digests()
    for name, value in values.items():
        found.put(name, value)
    return found


def test_the_order_in_which_gradients_come_does_not_count() -> None:
    a, b = torch.randn(3), torch.randn(4)
    assert of(a=a, b=b, c=None).in_order() == of(c=None, b=b.clone(), a=a).in_order()
    assert "c" in of(c=None) and list(of(b=b, a=a)) == ["b", "a"] and len(of(a=a)) == 1


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([1.0, 2.0, 3.0, 4.0]).nextafter(torch.tensor(9.0)),
        torch.tensor([1, 2, 3, 4], dtype=torch.int32),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([1.0, 2.0, 3.0]),
        None,
    ],
)
def test_other_content_has_another_hash(other: torch.Tensor | None) -> None:
    assert of(x=torch.tensor([1.0, 2.0, 3.0, 4.0])).in_order() != of(x=other).in_order()


def test_a_name_put_again_is_replaced_and_no_tensor_is_given_out() -> None:
    found = of(x=torch.ones(2))
    found.put("x", torch.zeros(2))
    assert found.in_order() == of(x=torch.zeros(2)).in_order()
    with pytest.raises(TypeError, match="nothing but its hash"):
        found["x"]


def test_what_is_put_may_be_changed_and_what_is_kept_is_hashed_beside_others() -> None:
    found, kept, value = Digests(), Digests(), torch.randn(1 << 18)
    for number in range(8):
        kept.put_kept(str(number), value + number)
        found.put(str(number), changed := value + number)
        changed.zero_()
    assert found.in_order() == kept.in_order() and found.seconds > 0 == kept.seconds


def test_what_has_no_bytes_to_read_is_not_raised_while_a_step_runs() -> None:
    found = of(x=torch.eye(3).to_sparse(), y=torch.ones(1))
    assert "x" in found
    with pytest.raises(content.UNREADABLE):
        found.in_order()


def test_several_at_a_time_are_each_ones_hash_in_order() -> None:
    parts = [torch.randn(100_000), "text", torch.arange(5), None, torch.randn(7, 3).t()]
    assert digests(parts) == [digest(part) for part in parts]
    with pytest.raises(content.UNREADABLE):
        digests([torch.ones(2), torch.eye(2).to_sparse()])
