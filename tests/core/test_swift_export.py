"""Exports that leave out what changes nothing give what torch's own give."""

from __future__ import annotations

import contextlib
import io
import warnings

import onnx_ir
import onnxscript.optimizer
import pytest
import torch
from torch import nn

from effcompile.core import torch_compat_export as swift


class Views(nn.Module):
    """Composite operators that torch takes apart."""

    def forward(self, x: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = x.chunk(2, -1)
        taken = x[1:, 0].unflatten(-1, (2, -1)).movedim(0, 1).swapaxes(0, 1).flatten(0, 1).T
        made = (
            nn.functional.dropout(x, 0.5, training=False)
            .to(torch.float64)
            .to("cpu")
            .contiguous()
            .narrow(0, 0, 2)
        )
        return (
            (a * b).transpose(0, 1).reshape(-1),
            taken,
            made,
            like.view_as(x).reshape_as(x),
            a[..., :1].expand_as(a),
            *x.unbind(0),
        )


class Composite(nn.Module):
    """Composite operators that stay whole, among others that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bsd,btd->bst", self.layer(x), like)
        y.add_(1.0)
        return nn.functional.instance_norm(self.norm(x.transpose(1, 2))) @ y


class Promotions(nn.Module):
    """Operators on several types, on numbers of another type, and what reads their results; a clip for the
    rewriter to fuse.
    """

    def forward(self, x: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = (like > 0).to(torch.int32)
        mixed = x * whole + 1
        y = torch.where(mixed > 0, mixed, 0.0) / (whole + 2)
        return (
            y.softmax(-1) @ x.mT,
            nn.functional.relu(y).clamp(0.1, 0.5),
            x.half() * 3 + whole,
            nn.functional.layer_norm(y + 0, (8,)),
        )


@pytest.mark.parametrize("made", [Promotions, Views, Composite])
def test_an_onnx_model_is_torchs_and_onnxscripts_own(made: type[nn.Module]) -> None:
    x, like = torch.randn(3, 4, 8), torch.randn(3, 4, 8)

    def exported() -> bytes:
        torch.manual_seed(0)
        with warnings.catch_warnings(), torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.export.export(made().eval(), (x, like), strict=False)
            model = torch.onnx.export(program, (), dynamo=True, optimize=False, verbose=False)
            assert model is not None
            onnxscript.optimizer.optimize_ir(model.model)
        return onnx_ir.to_proto(model.model).SerializeToString()

    theirs = exported()
    with swift.swift_onnx():
        ours = exported()
    assert ours == theirs


def test_what_is_left_out_is_known_by_the_names_that_are_replaced() -> None:
    """Else the test above compares torch's way with itself."""
    promotion = vars(swift.private_module("torch.onnx._internal.fx.passes.type_promotion"))[
        "_TypePromotionInterpreter"
    ]
    matcher = vars(swift.private_module("onnxscript.rewriter._matcher"))["SimplePatternMatcher"]
    before = promotion.run_node, matcher.match
    with swift.swift_onnx():
        assert promotion.run_node is not before[0] and matcher.match is not before[1]
    assert (promotion.run_node, matcher.match) == before
