"""The steps from a tagged Program to a model.onnx on disk, and what each site became there."""

from __future__ import annotations

import gc
import hashlib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime
import torch

from effcompile.backends.mapped import copied, mapped, put_aside
from effcompile.backends.onnxruntime.export import OPSETS, OnnxExport, export
from effcompile.backends.onnxruntime.forms import apply_forms, linears_as_matmul, weights_as_read
from effcompile.backends.onnxruntime.grouped import group_attentions
from effcompile.backends.onnxruntime.in_place import InPlace
from effcompile.backends.onnxruntime.quantise import found_formats, quantise
from effcompile.backends.onnxruntime.ranges import input_ranges
from effcompile.backends.onnxruntime.session import BESIDE, numpy_feeds, open_session, run
from effcompile.backends.onnxruntime.sparse import found_forms, make_sparse
from effcompile.capture import variants
from effcompile.core.errors import LoweringError
from effcompile.core.types import Inputs
from effcompile.ir.export import sizes_of
from effcompile.ir.formats import FP32, Form, WeightFormat
from effcompile.ir.program import Program
from effcompile.machine.memory import give_back
from effcompile.sites.attention.cached import IN_PLACE, JOINED, SITE


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model file, the session of default settings that it was tried in, the opset it loads with, and site →
    form found in it.
    """

    path: Path
    opened: onnxruntime.InferenceSession
    opset: int
    applied: Mapping[str, Form]
    weight_bytes: int


def build(
    program: Program, calibration: Sequence[Sequence[torch.Tensor]], folder: Path, *, in_place: bool = False
) -> Built:
    """Export at the newest opset whose model ORT loads, apply the program's tags, write `folder`/model.onnx.

    `in_place`: attentions over a cache write into it where they can (grouped.py).

    Raises:
        LoweringError: no opset works; the reason is that of the newest.
    """
    failures: list[LoweringError] = []
    apart = _mapped(program, folder)
    for opset in OPSETS:
        try:
            return _build_at(program, calibration, folder, opset, apart, in_place)
        except LoweringError as error:
            failures.append(error)
    raise failures[0]


def _build_at(
    program: Program,
    calibration: Sequence[Sequence[torch.Tensor]],
    folder: Path,
    opset: int,
    apart: Sequence[mmap.mmap],
    in_place: bool,
) -> Built:
    path = folder / "model.onnx"
    applied, linears = _write(program, calibration, path, opset, in_place)
    written = ir.load(str(path))
    forms, weight_bytes = found_forms(written, linears.values()), _weight_bytes(written)
    del written
    tried = _tried(program)  # runs the program, whose weights are then left alone
    if weight_bytes > BESIDE:
        gc.collect()
        put_aside(apart)
    give_back()  # what was exported and written, before a session holds the weights once more
    opened = _running(program, path, tried)
    found = {site: Form(weights=forms[node]) for site, node in linears.items() if node in forms}
    return Built(
        path=path, opened=opened, opset=opset, applied={**applied, **found}, weight_bytes=weight_bytes
    )


def _mapped(program: Program, folder: Path) -> list[mmap.mmap]:
    """Have the weights that a pass made mapped from files, whose pages can be dropped while torch.export's
    leavings refer to them.
    """
    there = dict(program.module.named_parameters()) if program.weight_bytes() > BESIDE else {}
    # a later pass may have put another in its place
    return mapped((there[name] for name in program.made if name in there), folder)


def _write(
    program: Program,
    calibration: Sequence[Sequence[torch.Tensor]],
    path: Path,
    opset: int,
    in_place: bool,
) -> tuple[dict[str, Form], Mapping[str, str]]:
    """Write the model; (site → form found in it, linear's site → name of its node)."""
    exported = export(program, opset=opset)
    applied = apply_forms(exported, program)
    if in_place:
        applied[SITE] = IN_PLACE if group_attentions(exported, program) else JOINED
    sparse = {
        node: block for site, node in exported.linears.items() if (block := program.format_at(site).block)
    }
    make_sparse(exported, sparse)
    formats, ranges = _planned(program, exported, calibration)
    if formats:
        linears_as_matmul(exported, formats)
    elif _weight_bytes(exported.model) > BESIDE:
        weights_as_read(exported.model.graph)
    model = _serialised(exported.model, path, quantising=bool(formats))
    if model is not None:
        model = quantise(model, formats, ranges)
        onnx.save_model(model, str(path))
    for value in exported.model.graph.initializers.values():
        # rules of the optimiser remember what they matched last, and with it the graph
        value.const_value = None
    return {**applied, **_found(model, exported)}, exported.linears


def _tried(program: Program) -> list[Inputs]:
    """What a written model must run at: the example.

    Where an axis of it is 1, what must be of equal size may be so by chance: then a second shape, too.
    """
    if 1 not in sizes_of(program).values():
        return [(program.args, program.kwargs)]
    return [(args, kwargs) for _, args, kwargs in variants(program)[:2]]


def _running(program: Program, path: Path, tried: Sequence[Inputs]) -> onnxruntime.InferenceSession:
    """A session that has run; what cannot be loaded and run is a failure here, and the next opset
    is tried.
    """
    opened, specs = open_session(path), [spec.name for spec in program.inputs]
    names, in_place = [value.name for value in opened.get_inputs()], InPlace(specs, opened)
    for args, kwargs in tried:
        tensors = program.flat_inputs(args, kwargs)
        given = dict(zip(specs, tensors, strict=True))
        if in_place:
            in_place(opened, tensors)
        else:
            run(opened, numpy_feeds(names, [given[name] for name in names]))
    give_back()  # the file, read as a whole, beside what the session made of it
    return opened


def _planned(
    program: Program, exported: OnnxExport, calibration: Sequence[Sequence[torch.Tensor]]
) -> tuple[dict[str, WeightFormat], dict[str, tuple[float, float]]]:
    """(node → format, node → input range) for everything that is to be quantised."""
    nodes = {**exported.linears, **exported.embeddings}
    formats = {
        node: held
        for site, node in nodes.items()
        if (held := program.format_at(site)) != FP32 and not held.block
    }
    ranges = {
        nodes[site]: bounds for site, bounds in input_ranges(program, calibration).items() if site in nodes
    }
    return formats, ranges


def _found(model: onnx.ModelProto | None, exported: OnnxExport) -> dict[str, Form]:
    """Site → form read from the written model; fp32 everywhere when nothing was quantised."""
    nodes = {**exported.linears, **exported.embeddings}
    if model is None:
        return dict.fromkeys(nodes, Form(weights=FP32))
    by_node = found_formats(model, list(nodes.values()))
    return {site: by_node[node] for site, node in nodes.items()}


def _serialised(model: ir.Model, path: Path, *, quantising: bool) -> onnx.ModelProto | None:
    """The model as protobuf for the quantisers, or None after writing it as it is."""
    if quantising:
        return ir.serde.serialize_model(model)
    if _weight_bytes(model) <= BESIDE:
        ir.save(model, str(path))
        return None
    beside = path.with_name(f"{path.name}.{_digest(model)}.data")
    ir.save(model, str(path), external_data=beside.name)
    copied(beside, beside.with_suffix(".again")).replace(beside)
    return None


def _digest(model: ir.Model) -> str:
    """Of all weights: a model can only be read with the data that it was written with, whoever copies or
    replaces files.
    """
    digest = hashlib.sha256()
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            digest.update(value.const_value.tobytes())
    return digest.hexdigest()[:16]


def _weight_bytes(model: ir.Model) -> int:
    """Bytes of the initializers as stored."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
