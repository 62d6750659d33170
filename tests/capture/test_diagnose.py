"""What cannot be captured is said with the setting that mends it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import effcompile
from effcompile.capture.training import capture_training
from effcompile.core.errors import CaptureError, InfeasibleError
from effcompile.core.goal import Mode


class Dropping(nn.Module):
    """As HuBERT's and M2M-100's encoders: a layer is left out by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.layerdrop = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), 0.1

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            dropout_probability = torch.rand([])
            skip_the_layer = self.training and dropout_probability < self.layerdrop
            if not skip_the_layer:
                x = layer(x)
        return x.square().mean()


class Masking(nn.Module):
    """As wav2vec2's: spans of time are hidden by a mask that NumPy draws from values of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(4, 4), SimpleNamespace(mask_time_prob=0.5)

    def _mask(self, lengths: Tensor) -> Tensor:
        return torch.from_numpy(
            np.arange(3)[None] < self.config.mask_time_prob * np.array(lengths.tolist())[:, None]
        )

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self._mask(x.sum((1, 2)).long()).unsqueeze(-1)).square().mean()


@pytest.mark.parametrize(("model", "setting"), [(Dropping(), "layerdrop"), (Masking(), "mask_time_prob")])
def test_the_setting_is_named(model: nn.Module, setting: str) -> None:
    with pytest.raises(CaptureError) as refused:
        capture_training(model.train(), (torch.randn(2, 3, 4),))
    assert f"{setting}" in str(refused.value).partition("Mend it:")[2]


class Forces(nn.Module):
    """As interatomic potentials: the loss is of a gradient that the forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.linear(x).tanh().sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return forces.square().mean()


def test_a_gradient_within_the_forward_is_named_by_its_line() -> None:
    with pytest.raises(CaptureError, match="a gradient that the forward takes itself") as refused:
        capture_training(Forces().train(), (torch.randn(2, 3, 4),))
    assert "torch.autograd.grad(energy, x" in str(refused.value).partition("Mend it:")[0]


class ByLabels(Dropping):
    """As wav2vec2's with CTC: the loss is of as many labels as are no padding."""

    config = SimpleNamespace(vocab_size=9)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if labels is not None and labels.max() >= self.config.vocab_size:
            raise ValueError("Label values must be <= vocab_size")
        return self.layers[0](x).square().mean()


def test_a_loss_of_selected_labels_is_to_be_given_beside_the_model() -> None:
    with pytest.raises(CaptureError) as refused:
        capture_training(ByLabels().train(), (torch.randn(2, 3, 4), torch.tensor([[1, 2], [3, -100]])))
    assert "loss=lambda outputs, inputs: F.ctc_loss" in str(refused.value).partition("Mend it:")[2]


class Halving(nn.Module):
    """Its gradient is written in Python, by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_full_backward_hook(lambda module, below, above: (below[0] / 2,))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x)).square().mean()


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("model", "mode", "said"),
    [(Halving(), "training", "BackwardHookFunction"), (Branching(), "inference", "x.sum()")],
)
def test_what_the_caller_was_handling_is_no_cause(model: nn.Module, mode: Mode, said: str) -> None:
    """Planning again stands in an `except`: of `on_change="replan"`, and of users with another budget."""
    try:
        raise InfeasibleError("nothing fits")
    except InfeasibleError:
        with pytest.raises(CaptureError) as refused:
            effcompile.plan(model.train(mode == "training"), inputs=torch.randn(2, 4), mode=mode)
    assert said in str(refused.value) and "nothing fits" not in str(refused.value)
