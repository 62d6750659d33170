"""The scale of an fp16 loss: torch.amp.GradScaler's, with gradients withheld in the place of a
skipped step.
"""

import copy

import pytest
import torch

from effcompile.backends.torch.loss_scale import LossScale


def test_gradients_are_divided_once_also_where_two_names_share_one() -> None:
    scale = LossScale("cpu")
    tangent = scale.scaled(torch.ones(()))
    one = torch.full((3, 2), 5.0) * tangent
    shared, spread = one.clone(), tangent.reshape(1, 1).expand(4, 4)
    found = scale.unscaled([one, shared, shared, None, spread])
    assert found[3] is None and not scale.overflowed
    assert all(torch.equal(found[i], torch.full((3, 2), 5.0)) for i in (0, 1, 2))
    assert torch.equal(found[4], torch.ones(4, 4))


def test_the_scale_moves_as_grad_scalers_does() -> None:
    scale, parameter = LossScale("cpu"), torch.nn.Parameter(torch.zeros(2))
    reference, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([parameter], lr=0.0)
    for ours in (scale.scaler, reference):
        ours.set_growth_interval(2)
    for value in (1.0, float("inf"), 1.0, 1.0, float("nan"), 1.0, 1.0, 1.0):
        gradient = torch.tensor([value, 1.0])
        parameter.grad = gradient * float(reference.scale(torch.ones(())))
        reference.step(optimizer)
        reference.update()
        scaled = gradient * float(scale.scaled(torch.ones(())))
        if torch.isfinite(gradient).all():
            assert torch.equal(scale.unscaled([scaled])[0], gradient)
        else:
            with pytest.warns(UserWarning, match="withheld"):
                assert scale.unscaled([scaled]) == [None] and scale.overflowed
        assert scale.scaler.get_scale() == reference.get_scale()


def test_a_copy_has_a_scale_of_its_own() -> None:
    scale = LossScale("cpu")
    scale.scaled(torch.ones(()))
    other = copy.deepcopy(scale)
    other.scaled(torch.ones(()))
    with pytest.warns(UserWarning, match="withheld"):
        other.unscaled([torch.full((2,), torch.inf)])
    assert other.scaler.get_scale() == scale.scaler.get_scale() / 2
