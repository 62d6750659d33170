"""Static ranges hold at lengths that the example does not have; skipped where the extra is not installed."""

import pytest
import torch
from form_names import forms
from torch import nn

from effcompile.backends.openvino import OpenVino
from effcompile.capture import capture
from effcompile.core.goal import Goal
from effcompile.search.pricing import generated, ranged

WORDS, WIDTH = 512, 128


class Attends(nn.Module):
    """Of one token its value enters `out`, of many their mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        nn.init.normal_(self.query.weight, std=0.02)  # all tokens are seen alike
        nn.init.normal_(self.key.weight, std=0.02)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        rows = (*ids.shape, 4, -1)
        q, k, v = (f(x).view(rows).transpose(1, 2) for f in (self.query, self.key, self.value))
        seen = attention_mask.bool()[:, None, None]
        heads = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(heads.transpose(1, 2).flatten(2))


@pytest.mark.skipif(OpenVino().unavailable() is not None, reason="openvino or nncf is not installed")
def test_short_texts_are_about_as_near_as_long_ones() -> None:
    model = Attends().eval()
    ids = torch.randint(0, WORDS, (1, 64))
    program = capture(model, (ids, torch.ones_like(ids)), {})
    calibration = [
        program.flat_inputs(*inputs) for inputs in ranged(program, Goal(max_error=0.03), generated(program))
    ]
    tags = forms({"out": "int8_static"})
    lowered = OpenVino().lower(program.tagged(tags, "test"), None, calibration)
    assert lowered.applied["out"] == tags["out"]

    def error(rows: int, tokens: int) -> float:
        given = torch.randint(0, WORDS, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
        with torch.no_grad():
            wanted = model(given, torch.ones_like(given))
        found = lowered(given, torch.ones_like(given))[0]
        return float((found - wanted).norm() / wanted.norm())

    errors = {tokens: error(max(1, 64 // tokens), tokens) for tokens in (1, 2, 4, 16, 64, 200)}
    # by NNCF's means of each input's range, with two texts of one token: 0.52, 0.39, 0.29, 0.16, 0.01, 0.01
    assert max(errors.values()) < 0.05, errors
