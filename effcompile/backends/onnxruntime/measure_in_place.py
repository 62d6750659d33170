"""Seconds of an attention over a cache in both ways: past and new rows joined, and in place (grouped.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from effcompile.backends.onnxruntime.in_place import DOMAIN, GROUPED, ROOM, InPlace
from effcompile.backends.onnxruntime.session import numpy_feeds, open_session, run
from effcompile.core.timing import faster_half_median, interleaved

#: Layers of a call of one token, and of more, each with a cache of its own: as in a model, they share what a
#: call costs.
_LAYERS, _OF_MANY = 8, 2
_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """`heads` queries read `groups` of keys, rows of `width`; so many `new` tokens behind `past` ones."""

    batch: int
    heads: int
    groups: int
    width: int
    past: int
    new: int

    @property
    def layers(self) -> int:
        """That are timed in a call."""
        return _LAYERS if self.new == 1 else _OF_MANY


def seconds(sizes: Sizes) -> tuple[float, float]:
    """Of one attention with joined rows, and in place; timed in turn, of several layers in a call.

    Raises:
        LoweringError: ONNX Runtime has no such operator.
    """
    b, g, d, past, new = sizes.batch, sizes.groups, sizes.width, sizes.past, sizes.new
    buffers = [torch.zeros(b, g, past + new, d) for _ in range(2 * sizes.layers)]
    rows = {f"past_{at}": cache[:, :, :past] for at, cache in enumerate(buffers)}
    given = {"mask": torch.ones(1, 1, new, past + new, dtype=torch.bool).tril(past)}
    given |= {name: torch.randn(b, n, new, d) for name, n in (("q", sizes.heads), ("k", g), ("v", g))}
    counted = {"tokens": torch.ones(b, new, dtype=torch.int64)} | given | rows
    apart = given | {name: each.contiguous() for name, each in rows.items()}
    joined, grouped = (open_session(_model(sizes, own).SerializeToString()) for own in (False, True))
    in_place = InPlace(list(counted), grouped)
    runs: Mapping[str, Callable[[], object]] = {
        "joined": lambda: run(joined, numpy_feeds(list(apart), list(apart.values()))),
        "in place": lambda: in_place(grouped, list(counted.values())),
    }
    found = interleaved(runs, _ROUNDS, repeats=1)
    of_joined, of_place = (faster_half_median(found[name]) / sizes.layers for name in runs)
    return of_joined, of_place


def _model(sizes: Sizes, own: bool) -> onnx.ModelProto:
    """Attentions side by side, their past and present rows its inputs and outputs."""
    heads, groups, width = sizes.heads, sizes.groups, sizes.width
    value = helper.make_tensor_value_info
    inputs = [value("tokens", TensorProto.INT64, ["b", "s"])] if own else []
    inputs.append(value("mask", TensorProto.BOOL, ["m", 1, "s", "t"]))
    for name, count in (("q", heads), ("k", groups), ("v", groups)):
        inputs.append(value(name, TensorProto.FLOAT, ["b", count, "s", width]))
    results = [value(f"y_{at}", TensorProto.FLOAT, ["b", heads, "s", width]) for at in range(sizes.layers)]
    for at in range(2 * sizes.layers):
        axes = (f"{ROOM}past_{at}",) * 2 if own else (f"past_{at}", f"next_{at}")
        inputs.append(value(f"past_{at}", TensorProto.FLOAT, ["b", groups, axes[0], width]))
        results.append(value(f"next_{at}", TensorProto.FLOAT, ["b", groups, axes[1], width]))
    made = _shared() if own else []
    for at in range(sizes.layers):
        made += _grouped(sizes, at) if own else _joined(sizes, at)
    graph = helper.make_graph(made, "attentions", inputs, results, _constants(sizes) if own else [])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _joined(sizes: Sizes, at: int) -> list[onnx.NodeProto]:
    node, keys, values = helper.make_node, f"next_{2 * at}", f"next_{2 * at + 1}"
    return [
        node("Concat", [f"past_{2 * at}", "k"], [keys], axis=-2),
        node("Concat", [f"past_{2 * at + 1}", "v"], [values], axis=-2),
        node("Attention", ["q", keys, values, "mask"], [f"y_{at}"], scale=sizes.width**-0.5),
    ]


def _shared() -> list[onnx.NodeProto]:
    """What all attentions read, as grouped.py writes it."""
    node = helper.make_node
    return [
        node("Shape", ["mask"], ["all"], start=3, end=4), node("Squeeze", ["all"], ["number"]),
        node("Cast", ["number"], ["whole"], to=TensorProto.INT32), node("Sub", ["whole", "one"], ["last"]),
        node("Shape", ["tokens"], ["rows"], start=0, end=1), node("Expand", ["last", "rows"], ["lengths"]),
        node("Where", ["mask", "nothing", "least"], ["bias"]),
    ]  # fmt: skip


def _grouped(sizes: Sizes, at: int) -> list[onnx.NodeProto]:
    """As grouped.py writes it."""
    node, moved, made = helper.make_node, [0, 2, 1, 3], list[onnx.NodeProto]()
    packed = [f"{name}_packed_{at}" for name in "qkv"]
    for name, to in zip("qkv", packed, strict=True):
        made.append(node("Transpose", [name], [f"{to}_moved"], perm=moved))
        made.append(node("Reshape", [f"{to}_moved", "flat"], [to]))
    keys, values = (f"past_{2 * at}", f"next_{2 * at}"), (f"past_{2 * at + 1}", f"next_{2 * at + 1}")
    inputs = [*packed, keys[0], values[0], "lengths", "whole", "", "", "", "bias"]
    made += [
        node(
            GROUPED, inputs, [f"packed_{at}", keys[1], values[1]], domain=DOMAIN, num_heads=sizes.heads,
            kv_num_heads=sizes.groups, scale=sizes.width**-0.5,
        ),
        node("Reshape", [f"packed_{at}", "split"], [f"apart_{at}"]),
        node("Transpose", [f"apart_{at}"], [f"y_{at}"], perm=moved),
    ]  # fmt: skip
    return made


def _constants(sizes: Sizes) -> list[onnx.TensorProto]:
    of = {
        "one": np.int32(1),
        "nothing": np.float32(0),
        "least": np.finfo(np.float32).min,
        "flat": np.array([0, 0, -1]),
        "split": np.array([0, 0, sizes.heads, sizes.width]),
    }
    return [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in of.items()]
