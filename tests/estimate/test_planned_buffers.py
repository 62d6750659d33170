"""What a runtime holds that plans its buffers before it runs: counted by hand."""

import torch
from torch import nn

from effcompile.capture import capture
from effcompile.estimate.planned_buffers import planned_bytes
from effcompile.search.regimes import Regimes

ROWS, NARROW, WIDE = 64, 32, 1024


class Attended(nn.Module):
    def forward(self, q, mask):
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)


class Between(nn.Module):
    """An MLP, an attention of many scores, and an MLP that is as wide as the first one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (
            nn.Sequential(nn.Linear(NARROW, WIDE), nn.GELU(), nn.Linear(WIDE, NARROW)) for _ in range(2)
        )

    def forward(self, x):
        x = self.a(x).view(1, 1, ROWS, NARROW)
        return self.b(nn.functional.scaled_dot_product_attention(x, x, x)[0, 0])


def test_an_attention_has_all_its_scores_and_its_mask_in_floats():
    b, h, s, d = 2, 4, 256, 16
    mask = torch.ones(b, 1, s, s, dtype=torch.bool)
    program = capture(Attended().eval(), (torch.randn(b, h, s, d), mask), {})
    scores, floats = 4 * b * h * s * s, 4 * b * s * s
    assert planned_bytes(program) >= b * s * s + 2 * 4 * b * h * s * d + scores + floats
    call = Regimes.of_call(program)
    assert call.kept("onnxruntime") >= call.kept("torch-eager") + scores // 2


def test_buffers_that_a_later_layer_takes_again_stay_meanwhile():
    program = capture(Between().eval(), (torch.randn(ROWS, NARROW),), {})
    wide, scores, narrow = 4 * ROWS * WIDE, 4 * ROWS * ROWS, 4 * ROWS * NARROW
    found, graph = planned_bytes(program), 100 * 1024
    assert wide + scores + narrow < found < wide + scores + 4 * narrow + graph, "GELU writes where it reads"


def test_what_is_read_again_is_not_written_over():
    class Twice(nn.Module):
        def forward(self, x):
            y = x + 1
            return (y.exp() @ y.T).sum()

    program = capture(Twice().eval(), (torch.randn(1024, 64),), {})
    x, graph = 4 * 1024 * 64, 40 * 1024
    assert 3 * x + 16 * x < planned_bytes(program) < 3 * x + 16 * x + graph
