"""What is taken apart by its place in memory is the same wherever a pass has put it."""

import pytest
import torch
from torch import Tensor, fx, nn

from effcompile.capture.inference import capture

aten = torch.ops.aten


class Windows(nn.Module):
    """Overlapping windows of rows, as Longformer cuts them."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.layer, self.turned = nn.Linear(6, 4), turned

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.turned:
            return y.transpose(0, 1).as_strided((3, 4, 4), (8, 1, 4)).softmax(-1)
        return y.as_strided((3, 4, 4), (8, 4, 1)).softmax(-1)


class Elsewhere(fx.Interpreter):
    """Runs a graph whose linears write into a wider tensor, as merged ones do."""

    def run_node(self, n: fx.Node) -> object:
        found = super().run_node(n)
        if n.target is aten.linear.default:
            wide = torch.full((*found.shape[:-1], 3 * found.shape[-1]), torch.nan)
            wide[..., found.shape[-1] : 2 * found.shape[-1]] = found
            return wide[..., found.shape[-1] : 2 * found.shape[-1]]
        return found


@pytest.mark.parametrize("turned", [False, True])
def test_windows_of_what_lies_elsewhere_are_the_models(turned: bool) -> None:
    torch.manual_seed(0)
    model, x = Windows(turned).eval(), torch.randn(8, 6)
    program = capture(model, (x,), dynamic=False)
    with torch.no_grad():
        found = Elsewhere(program.module).run(x, enable_io_processing=False)
        torch.testing.assert_close(*found, model(x))
