"""A model compiled for the sizes it is really called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np

from effcompile.backends.openvino.measure import Untyped, config
from effcompile.core.arrays import Array
from effcompile.core.errors import InputsError, LoweringError

#: Where a model says that its last output tells whether all indices were in range.
FLAG = ["effcompile", "indices_in_range"]


#: Of int64 its plugin makes words of 32 bits, and some operators (remainders, divisions, sums, clamps) make
#: numbers of fp32 of them, which hold integers up to here.
LARGEST = 1 << 24


def check_numbers(arrays: Mapping[str, Array]) -> None:
    """Raises InputsError where an input has NaN, or an integer that is beyond what it computes with."""
    for name, array in arrays.items():
        if array.dtype.kind in "iu" and array.itemsize >= 4 and array.size:
            beyond = next((n for n in (int(array.max()), int(array.min())) if abs(n) > LARGEST), None)
            if beyond is not None:
                raise InputsError(
                    f"The input {name} has {beyond}. OpenVINO computes with integers up to 2^24, beyond "
                    "which some of its operators round and others cut off. Give smaller ones, or choose "
                    "another backend."
                )
        if array.dtype.kind == "f" and bool(np.isnan(array).any()):
            raise InputsError(
                f"The input {name} has NaN. OpenVINO's operators take it for a number (relu makes 0 of it, "
                "the largest value passes over it) where the model's answer is NaN. Mend the input, or "
                "choose another backend."
            )


def check_flag(flag: Array) -> None:
    """Raises LoweringError where the last output says that an index was in no row, or an integer too large,
    or is no such output.
    """
    if flag.shape != () or flag.dtype != bool:
        raise LoweringError(
            f"The model's last output is {flag.dtype} {list(flag.shape)}, and its file says that it tells "
            "whether all indices are in range: the file was changed. Write it again."
        )
    if not flag:
        raise LoweringError(
            "An index that the model computes from these inputs is negative or too large for what is "
            "looked up (the model itself raises for it, too), or an integer that it computes from them is "
            "2^24 or beyond, which some of OpenVINO's operators round. Give other inputs, or for large "
            "integers choose another backend."
        )


class Shaped:
    """Compiled for the sizes of its first call; when other sizes come, compiled once more for any and both
    kept.

    With sizes known OpenVINO plans memory and fuses once instead of at each call: BERT-base 1×128 int8 took 3
    % less.

    Args:
        model: an `openvino.Model`; left as it is.
        precision: "f32" or "bf16".
    """

    def __init__(self, model: Untyped, precision: str) -> None:
        self._model, self._precision, self._flagged = model, precision, bool(model.has_rt_info(FLAG))
        self._sizes: tuple[tuple[int, ...], ...] | None = None
        self._for_sizes: Any = None
        self._for_any: Any = None
        self.compiled: Any = None  # of the first call
        # a request holds the results of its last call: of two threads, one would be given the other's
        self._one_at_a_time = Lock()

    def infer(self, arrays: Sequence[Array]) -> list[Array]:
        """One call.

        Raises:
            RuntimeError: OpenVINO cannot compile or run it. InputsError: an input has NaN, which OpenVINO
                takes for a number, or an integer that it rounds.
            LoweringError: an index that the model computed is in no row.
        """
        names = (port.get_any_name() for port in self._model.inputs)
        check_numbers(dict(zip(names, arrays, strict=True)))
        sizes = tuple(array.shape for array in arrays)
        with self._one_at_a_time:
            if self._sizes is None:
                self._for_sizes = self._request(self._sized(sizes))
                self._sizes = sizes
            if sizes != self._sizes and self._for_any is None:
                self._for_any = self._request(self._model)
            request = self._for_sizes if sizes == self._sizes else self._for_any
            outputs = list(request.infer(list(arrays), share_inputs=True).values())
        if self._flagged:
            check_flag(outputs.pop())
        return outputs

    def _request(self, model: Untyped) -> Untyped:
        import openvino

        compiled = openvino.Core().compile_model(model, "CPU", config(self._precision))
        self.compiled = self.compiled or compiled
        return compiled.create_infer_request()

    def _sized(self, sizes: tuple[tuple[int, ...], ...]) -> Untyped:
        """A copy with fixed sizes, the constants shared; the model itself where it has no others."""
        import openvino

        if not any(port.get_partial_shape().is_dynamic for port in self._model.inputs):
            return self._model
        copy = self._model.clone()
        copy.reshape(
            {port: openvino.PartialShape(list(shape)) for port, shape in zip(copy.inputs, sizes, strict=True)}
        )
        return copy
