"""From a program to an OpenVINO model in which exactly the planned linears are quantised (by NNCF)."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from effcompile.core import torch_compat
from effcompile.core.arrays import Array
from effcompile.core.errors import LoweringError
from effcompile.core.garbage import uncollected
from effcompile.core.stages import first_line
from effcompile.core.torch_compat_narrow import products_saturate
from effcompile.ir.export import reexport
from effcompile.ir.formats import BF16, FP16, FP32, INT8_STATIC, NOT_FOUND, TABLE_INT8_ROWS, Form
from effcompile.ir.program import Program
from effcompile.sites.attention.expand import without_ours
from effcompile.sites.parts import attentions, embeddings, linears

#: A model, a node or a request of openvino, which ships no types.
Untyped = Any

#: Operators between a constant and the product or lookup that reads it.
_PASSED_THROUGH = ("Convert", "Multiply", "Subtract", "Reshape", "Transpose", "FakeQuantize")
_ATTENTION = "ScaledDotProductAttention"
#: `runtimePrecision` of a compiled layer → its format.
_FORMATS = {"f32": FP32, "bf16": BF16, "f16": FP16, "u8": INT8_STATIC, "i8": INT8_STATIC}


def convert(program: Program) -> Untyped:
    """An `openvino.Model` of the program, with its dynamic axes; static where the program has none.

    Raises:
        LoweringError: torch.export or OpenVINO cannot take the graph.
    """
    import openvino

    try:
        with torch_compat.quiet_export(), uncollected():  # else half as long again (a Llama of 6 layers)
            model = openvino.convert_model(reexport(without_ours(program)))
    except Exception as error:
        raise LoweringError(
            f"OpenVINO cannot convert {program.name}: {first_line(error)}. Choose another backend."
        ) from error
    if len(model.inputs) != len(program.inputs):
        raise LoweringError(
            f"OpenVINO kept {len(model.inputs)} of {program.name}'s {len(program.inputs)} inputs. Choose "
            "another backend."
        )
    shapes = [[-1 if isinstance(dim, str) else dim for dim in spec.shape] for spec in program.inputs]
    model.reshape(
        {port: openvino.PartialShape(shape) for port, shape in zip(model.inputs, shapes, strict=True)}
    )
    return model


def names_of_sites(program: Program, model: Untyped) -> dict[str, str]:
    """site → friendly name of its MatMul or Gather, matched by the weight's values (names are renumbered on
    the way).
    """
    readers = [(op, constant) for op in model.get_ordered_ops() if (constant := _constant_of(op)) is not None]
    tables = [(s.site, program.tensor(s.weight), "Gather") for s in embeddings(program)]
    products = [(s.site, program.tensor(s.weight), "MatMul") for s in linears(program)]
    names: dict[str, str] = {}
    for site, weight, kind in [*products, *tables]:
        assert weight is not None
        values = weight.detach().float().numpy()
        for op, constant in readers:
            if (
                op.get_type_name() == kind
                and op.get_friendly_name() not in names.values()
                and _same(constant.get_data(), values)
            ):
                names[site] = op.get_friendly_name()
                break
    return names


def names_of_attentions(program: Program, model: Untyped) -> dict[str, str]:
    """site → friendly name of its ScaledDotProductAttention, matched by order; nothing where their numbers
    differ.
    """
    products = [op.get_friendly_name() for op in model.get_ordered_ops() if op.get_type_name() == _ATTENTION]
    found = attentions(program)
    return (
        dict(zip((s.site for s in found), sorted(products, key=_number), strict=True))
        if len(products) == len(found)
        else {}
    )


def quantize(
    program: Program, model: Untyped, names: Mapping[str, str], calibration: Sequence[Sequence[torch.Tensor]]
) -> Untyped:
    """The model with the sites tagged int8 quantised by NNCF (SmoothQuant and its transformer preset), all
    else untouched.

    Raises:
        LoweringError: no calibration inputs, a site that conversion lost, or NNCF failed.
    """
    products = {site.site for site in linears(program) if program.format_at(site.site) == INT8_STATIC}
    tables = {
        site.site for site in embeddings(program) if program.format_at(site.site) == TABLE_INT8_ROWS
    } & set(names)  # others were folded
    heads = {site.site for site in attentions(program) if program.word_at(site.site) == "sdpa_int8"}
    if not products | tables | heads:
        return model
    if lost := sorted(heads - set(names)):
        raise LoweringError(f"OpenVINO's conversion took {lost[0]} apart; it cannot be quantised as one.")
    if lost := sorted(products - set(names)):
        raise LoweringError(
            f"OpenVINO's conversion merged {lost[0]} with another linear; it cannot be quantised alone."
        )
    if not calibration:
        raise LoweringError(
            "int8_static needs calibration inputs: pass calibration inputs, or let effcompile generate them."
        )
    chosen = {names[site] for site in products | tables | heads}
    kept = [
        op.get_friendly_name()
        for op in model.get_ordered_ops()
        if _quantisable(op) and op.get_friendly_name() not in chosen
    ]
    samples = [[t.detach().cpu().numpy() for t in inputs] for inputs in calibration]
    order = [port.get_any_name() for port in model.inputs]
    try:
        with _silent_nncf() as nncf:
            return nncf.quantize(
                model,
                nncf.Dataset(samples, lambda inputs: dict(zip(order, inputs, strict=True))),
                model_type=nncf.ModelType.TRANSFORMER,
                subset_size=len(samples),
                ignored_scope=nncf.IgnoredScope(names=kept, validate=False),
                advanced_parameters=_ranges(nncf),
            )
    except Exception as error:
        raise LoweringError(
            f"NNCF cannot quantise {program.name}: {first_line(error)}. Choose another backend."
        ) from error


def _ranges(nncf: Untyped) -> Untyped:
    """Activations' ranges are those of all samples together, for NNCF's own means of each sample's cut what
    is in few of them: what a short text attends to is larger than the mean that a long one does.

    All weights are in 7 bits where oneDNN adds products in 16: the remedy of NNCF, which else gives it to the
    first layer only.
    """
    from nncf.quantization.range_estimator import RangeEstimatorParametersSet

    chosen = {"activations_range_estimator_params": RangeEstimatorParametersSet.MINMAX}
    if products_saturate():
        chosen["overflow_fix"] = nncf.OverflowFix.ENABLE
    return nncf.AdvancedQuantizationParameters(**chosen)


@contextlib.contextmanager
def _silent_nncf() -> Iterator[Untyped]:
    """The package nncf, which else draws progress bars on stdout and logs there, through a handler it makes
    when imported.
    """
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere):
        import nncf

        logger = logging.getLogger("nncf")
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is nowhere:
                # this was the import
                handler.setStream(sys.stderr)
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield nncf
        finally:
            logger.setLevel(level)


def applied(compiled: object, model: Untyped, names: Mapping[str, str]) -> dict[str, Form]:
    """site → form found: int8 by the quantised model's constants, the rest by what the compiled layers
    report.

    A compiled layer that contradicts the model (an int8 product run in fp32) is believed.
    """
    layers = _layer_forms(compiled)
    ops = {
        op.get_friendly_name(): op
        for op in model.get_ordered_ops()
        if op.get_type_name() in ("Gather", "MatMul", _ATTENTION)
    }
    found = {}
    for site, name in names.items():
        if name in ops and ops[name].get_type_name() == _ATTENTION:
            found[site] = Form(
                word="sdpa_int8"
                if all(_quantised_on_the_way(ops[name].input_value(port)) for port in (0, 1))
                else "sdpa"
            )
            continue
        op, constant = ops.get(name), _constant_of(ops[name]) if name in ops else None
        narrow = constant is not None and constant.get_element_type().get_type_name() in ("i8", "u8")
        if op is None or op.get_type_name() == "Gather":
            found[site] = Form(weights=TABLE_INT8_ROWS if narrow else FP32) if op is not None else NOT_FOUND
            continue
        fed_by = op.input_value(0).get_node().get_type_name()
        # some fused int8 layers lose their name
        in_model = Form(weights=INT8_STATIC) if narrow and fed_by == "FakeQuantize" else NOT_FOUND
        found[site] = layers.get(_stem(name), in_model)
    return found


def _quantised_on_the_way(value: Untyped) -> bool:
    """Whether a FakeQuantize lies behind this, looking through operators that only move elements."""
    node = value.get_node()
    while node.get_type_name() in ("Reshape", "Transpose", "VariadicSplit", "Split"):
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "FakeQuantize")


def _layer_forms(compiled: Untyped) -> dict[str, Form]:
    """Stem of each product that a compiled layer was made from → the layer's form."""
    layers: dict[str, Form] = {}
    for op in compiled.get_runtime_model().get_ordered_ops():
        info = op.get_rt_info()
        if "layerType" not in info or info["layerType"].astype(str) not in ("FullyConnected", "MatMul"):
            continue
        precision = info["runtimePrecision"].astype(str)
        for original in info["originalLayersNames"].astype(str).split(","):
            layers.setdefault(
                _stem(original),
                Form(weights=_FORMATS[precision]) if precision in _FORMATS else Form(word=precision),
            )
    return layers


def _number(name: str) -> int:
    """The 3 of `scaled_dot_product_attention_3/...`, 0 without one: the exporter numbers an operator's calls
    in their order.
    """
    tail = name.split("/")[0].rpartition("_")[2]
    return int(tail) if tail.isdigit() else 0


def _stem(name: str) -> str:
    """`linear_1/aten.linear.default` of `linear_1/aten.linear.default/Add`: a layer is named after whatever
    was fused into it.
    """
    return "/".join(name.split("/")[:2])


def weight_bytes(model: Untyped) -> int:
    """Bytes of all constants."""
    return sum(op.get_byte_size() for op in model.get_ordered_ops() if op.get_type_name() == "Constant")


def _quantisable(op: Untyped) -> bool:
    return op.get_type_name() not in ("Parameter", "Result", "Constant", "Convert", "ReadValue", "Assign")


def _constant_of(op: Untyped) -> Untyped | None:
    """The constant weight behind a MatMul's second input or a Gather's first; None for anything else."""
    port = {"MatMul": 1, "Gather": 0}.get(op.get_type_name())
    if port is None:
        return None
    node = op.input_value(port).get_node()
    while node.get_type_name() in _PASSED_THROUGH:
        node = node.input_value(0).get_node()
    return node if node.get_type_name() == "Constant" else None


def _same(stored: Array, values: Array) -> bool:
    if stored.size != values.size or stored.ndim < 2:
        return False
    matrix = stored.reshape(stored.shape[-2:]) if stored.ndim > 2 else stored
    return any(
        matrix.shape == v.shape and matrix[0, -1] == v[0, -1] and np.array_equal(matrix, v)
        for v in (values, values.T)
    )
