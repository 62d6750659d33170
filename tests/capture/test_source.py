"""A forward that is captured again with a change is traced once; what comes of it is as of a capture anew."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx
from train_helpers import gpt2

from effcompile.capture.source import Source
from effcompile.ir.step import Step


def _without_gelu(front: fx.GraphModule, _: Sequence[Tensor]) -> None:
    for node in front.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
        node.target = torch.ops.aten.sigmoid.default


def _text(step: Step) -> list[str]:
    return [
        f"{node.format_node()} {node.meta.get('nn_module_stack') or node.meta.get('fwd_nn_module_stack')}"
        for node in step.graph.nodes
    ]


def test_a_forward_is_traced_once_and_no_change_of_it_reaches_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = gpt2(layers=1)
    fresh, changed = (
        Source(model=model, args=(), kwargs=batch).capture(edit) for edit in (None, _without_gelu)
    )
    traced, export = [], torch.export.export
    monkeypatch.setattr(
        torch.export, "export", lambda *args, **kwargs: traced.append(1) or export(*args, **kwargs)
    )
    source = Source(model=model, args=(), kwargs=batch)
    found = [source.capture(edit) for edit in (None, _without_gelu, None)]
    assert traced == [1]
    assert [_text(step) for step in found] == [_text(fresh), _text(changed), _text(fresh)]
    assert all(
        step.rebuild is not None and step.cut_off == fresh.cut_off and step.dropped == fresh.dropped
        for step in found
    )
