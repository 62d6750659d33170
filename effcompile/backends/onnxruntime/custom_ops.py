"""Our operators inside ONNX Runtime: the library that has them, checked once, and whether a model needs it.

A model says by its operator domains that it needs the library, never where one is: what is loaded is always
what this effcompile compiled from its own source (`ops/block_sparse_ort.cpp`), whatever files lie beside a
model.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effcompile.core.errors import LoweringError
from effcompile.ops.block_sparse_native import BLOCKS, onnxruntime_library

if TYPE_CHECKING:
    import onnx

DOMAIN = "effcompile"
VERSION = 1
BLOCK_SPARSE = "BlockSparseLinear"

_OPSET_IMPORT = 8  # the field of ModelProto
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LIMIT = 1e-5  # relative error of fp32 sums in another order


def custom_ops_library() -> Path:
    """The file for `SessionOptions.register_custom_ops_library`; compiled for this machine at its first use,
    some seconds.

    Raises:
        LoweringError: it cannot be compiled (says how to mend that), not be loaded by this ONNX Runtime, or
            computes wrong.
    """
    path = onnxruntime_library()
    if (objection := _objection(path)) is not None:
        raise LoweringError(f"ONNX Runtime cannot use effcompile's operators: {objection}")
    return path


def library_for(model: Path | bytes) -> Path | None:
    """The library that a model needs; None for a model of standard operators.

    Raises:
        LoweringError: it needs one that there cannot be here.
    """
    if DOMAIN not in _domains_of(model):
        return None
    try:
        return custom_ops_library()
    except LoweringError as error:
        raise LoweringError(f"The model has block-sparse operators of effcompile. {error}") from error


def block_sparse_node(
    inputs: list[str], output: str, *, rows: int, cols: int, block: int, name: str = ""
) -> onnx.NodeProto:
    """y (.., rows) = x (.., cols) Wᵀ + bias; inputs: x, values, crow, col and maybe bias."""
    from onnx import helper

    return helper.make_node(
        BLOCK_SPARSE, inputs, [output], name=name, domain=DOMAIN, rows=rows, cols=cols, block=block
    )


# ------------------------------------------------------------------ what a model needs


def _domains_of(model: Path | bytes) -> set[str]:
    """The operator domains that a serialised model imports; of what is no model, as many as can be read."""
    if isinstance(model, bytes):
        return set(_domains(memoryview(model)))
    try:
        with (
            model.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as data,
        ):
            return set(_domains(data))
    except (OSError, ValueError):  # no file, or an empty one: ONNX Runtime says so better
        return set()


def _domains(data: memoryview) -> Iterator[str]:
    """Walks the fields of a ModelProto, stepping over its graph: gigabytes need not be parsed."""
    import onnx
    from google.protobuf.message import DecodeError

    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        field, wire = tag >> 3, tag & 7
        if wire == _BYTES:
            length, place = _varint(data, place)
            if field == _OPSET_IMPORT:
                with data[place : place + length] as part, contextlib.suppress(DecodeError):
                    yield onnx.OperatorSetIdProto.FromString(bytes(part)).domain
            place += length
        elif wire == _VARINT:
            _, place = _varint(data, place)
        elif wire in (_FIXED64, _FIXED32):
            place += 8 if wire == _FIXED64 else 4
        else:
            return


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    """(number, where it ends) of protobuf's encoding: 7 bits a byte, the lowest first; what is cut off reads
    as 0 at the end.
    """
    number = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            return 0, len(data)
        byte = data[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place
    return 0, len(data)


# ------------------------------------------------------------------ the library, checked once


@functools.cache
def _objection(path: Path) -> str | None:
    """What is wrong with its results on small weights of every block size; None when they are right.

    A weight of 3 × 2 blocks, the second block row empty, with a bias and without.
    """
    import onnxruntime

    model, feeds, wanted = _small_example()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        options.register_custom_ops_library(str(path))
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        found = session.run(list(wanted), feeds)
    except Exception as error:  # ONNX Runtime raises types of its own
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:400]
    wrong = [name for name, y in zip(wanted, found, strict=True) if not _close(y, wanted[name])]
    return f"its compiled kernels gave wrong results ({', '.join(wrong)})" if wrong else None


def _small_example() -> tuple[onnx.ModelProto, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(model, inputs, what comes out)."""
    from onnx import TensorProto, helper, numpy_helper

    constants: dict[str, np.ndarray] = {
        "crow": np.array([0, 2, 2, 3], np.int32),
        "col": np.array([0, 1, 1], np.int32),
    }
    nodes, feeds, wanted = [], {}, {}
    for block in BLOCKS:
        names = (f"x{block}", f"values{block}", "crow", "col", f"bias{block}")
        x, values, bias = _numbers(block)
        feeds[names[0]], constants[names[1]], constants[names[4]] = (
            array.astype(np.float32) for array in (x, values, bias)
        )
        weight = np.zeros((3 * block, 2 * block))
        weight[:block], weight[2 * block :, block:] = (
            np.concatenate([values[0], values[1]], axis=1),
            values[2],
        )
        for inputs, added, said in ((names, bias, "with a bias"), (names[:4], 0, "without one")):
            y = f"blocks of {block} {said}"
            nodes.append(block_sparse_node(list(inputs), y, rows=3 * block, cols=2 * block, block=block))
            wanted[y] = x @ weight.T + added
    given, returned = (
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
            for name, array in arrays.items()
        ]
        for arrays in (feeds, wanted)
    )
    graph = helper.make_graph(
        nodes,
        "check",
        given,
        returned,
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), feeds, wanted


def _numbers(block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x (19, 2 b), values (3, b, b) and bias (3 b)."""
    numbers = np.arange(38 * block * block, dtype=np.float64)
    return (
        np.sin(0.7 * numbers)[: 38 * block].reshape(19, -1),
        np.cos(1.3 * numbers)[: 3 * block**2].reshape(3, block, block),
        np.sin(numbers)[: 3 * block],
    )


def _close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.linalg.norm(found - wanted) <= _LIMIT * np.linalg.norm(wanted))
