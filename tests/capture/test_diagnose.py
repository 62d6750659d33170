"""What cannot be captured is said with the setting that mends it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from effcompile.capture.training import capture_training
from effcompile.core.errors import CaptureError


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
