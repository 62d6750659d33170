"""A random operator run again with its first numbers; the generator goes on as if it had not been."""

import pytest
import torch
from torch.nn import functional

from effcompile.ops.replay import CPU_STATE_BYTES, random_state, replay


def test_the_same_numbers_and_an_undisturbed_generator() -> None:
    torch.manual_seed(1)
    x = torch.ones(1000)
    state = random_state("cpu")
    first = functional.dropout(x, 0.3)
    after = torch.rand(5)
    torch.manual_seed(1)
    functional.dropout(x, 0.3)
    assert torch.equal(replay(state, "cpu", functional.dropout, x, p=0.3), first)
    assert torch.equal(torch.rand(5), after)
    assert torch.equal(replay(state, "cpu", functional.dropout, x, 0.3), first), "a state may be used again"


def test_an_operator_that_makes_its_own_tensor_keeps_its_device() -> None:
    state = random_state("cpu")
    first = torch.rand([3, 2], device="cpu")
    assert torch.equal(
        replay(state, "cpu", torch.ops.aten.rand.default, [3, 2], device=torch.device("cpu")), first
    )


def test_the_generator_is_put_back_when_the_operator_raises() -> None:
    torch.manual_seed(2)
    state = random_state("cpu")
    torch.rand(3)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        replay(state, "cpu", torch.ops.aten.bernoulli.p, torch.ones(2), 7.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_state_takes_the_bytes_that_the_simulation_counts() -> None:
    assert random_state("cpu").untyped_storage().nbytes() == CPU_STATE_BYTES


def test_a_state_is_a_copy() -> None:
    torch.manual_seed(3)
    state = random_state("cpu")
    kept = state.clone()
    torch.rand(100)
    assert torch.equal(state, kept)
