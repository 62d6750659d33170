"""Steps of generation in OpenVINO: fp32, or weights in 4 and 8 bits; the cache stays in its requests."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from effcompile.backends import resident
from effcompile.backends.base import Run
from effcompile.backends.indices import flagged
from effcompile.backends.openvino import codes
from effcompile.backends.openvino import model as models
from effcompile.backends.openvino.backend import OpenVino, unchanged, written
from effcompile.backends.openvino.edits import attended, joined
from effcompile.backends.openvino.measure import ROUNDED, config
from effcompile.backends.openvino.shapes import FLAG, LARGEST, check_flag, check_numbers
from effcompile.backends.openvino.states import ORDER, TO, KeptRows, Requests, plain, states_of, with_states
from effcompile.core.errors import FormatError, LoweringError, MissingPackageError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Reason, Unsupported
from effcompile.core.stages import first_line
from effcompile.ir.formats import FP32, TABLE_INT8_ROWS, Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall
from effcompile.ops.grouped import multiplies_runs
from effcompile.ops.recurrence import RECURRENCES

#: A model, a node or a request of openvino, which ships no types.
Untyped = Any
_TOKENS = "tokens"
#: The cache in the model's own numbers: OpenVINO would round it to 8 bits by itself.
_CACHE = {"KV_CACHE_PRECISION": "f32"}
#: See backend.py: of a model with states these are given before the call.
_MEASURE_PEAK = """
import json, openvino
from openvino import opset13 as ops
core = openvino.Core()
config, names = json.loads(options[0]), options[1:]
value = ops.parameter([1], numpy.float32)
nothing = openvino.Model([ops.relu(value)], [value])
core.compile_model(nothing, "CPU", config).create_infer_request().infer([numpy.zeros(1, numpy.float32)])
before()
request = core.compile_model(core.read_model(path), "CPU", config).create_infer_request()
given = dict(zip(names, inputs))
for state in request.query_state():
    state.state = openvino.Tensor(given.pop(state.name.partition(":")[0]))
loaded()
request.infer(given)
"""


_CALLS = OpenVino()


class OpenVinoSteps:
    """Runs the graphs of a generation.

    Nothing runs in bf16, which its hint makes of positions, too: beyond 256 they are no whole numbers.
    """

    name: ClassVar[str] = OpenVino.name
    conflicts: ClassVar[tuple[tuple[str, str], ...]] = ()
    slack: ClassVar[float] = OpenVino.slack
    copies: ClassVar[float] = OpenVino.copies

    def unavailable(self) -> Unsupported | None:
        return _CALLS.unavailable()

    def refuses(self, program: Program, goal: Goal) -> Unsupported | None:
        if any(node.target in RECURRENCES for node in program.graph.nodes):
            return Unsupported("OpenVINO has no operator for the recurrence of a layer that keeps a state")
        if any(multiplies_runs(node.target) for node in program.graph.nodes):
            return Unsupported("OpenVINO has no product of tokens in groups by expert here")
        if name := program.at_boundary("float64"):
            return Unsupported.of("{} is float64, which OpenVINO computes in 32 bits on a processor", name)
        return _CALLS.misfit(program)

    def lacks(self, call: KernelCall) -> Reason | None:
        held = call.format
        if held in (None, FP32, TABLE_INT8_ROWS) and call.kernel != "attention/sdpa_int8":
            return _CALLS.lacks(call)
        if held is None or held.family not in codes.FAMILIES or held.group < codes.ACTIVATION_GROUP:
            return Unsupported("a step of OpenVINO has no {name} here", (call.kernel.replace("/", " in "),))
        if call.dims[1] % held.group:
            return Unsupported("its K, {}, is no multiple of {}", (call.dims[1], held.group))
        return None

    def measure(self, call: KernelCall) -> float | None:
        return _CALLS.measure(call)

    def open(self, directory: Path, plan: Plan) -> Run:
        return _CALLS.open(directory, plan)

    def lower(
        self, program: Program, plan: Plan, calibration: Sequence[Sequence[torch.Tensor]]
    ) -> OpenVinoGraph:
        """See `backends.base.Backend.lower`; acts on `program.tags`.

        Raises:
            LoweringError: it cannot be converted.
        """
        checked = joined(attended(flagged(program, LARGEST)))
        model = models.convert(checked)
        named = [spec.name for spec in program.inputs]
        for port, name in zip(model.inputs, named, strict=True):
            port.get_tensor().set_names({name})
        for at, port in enumerate(model.outputs):
            port.get_tensor().set_names({f"{TO}{at}"})
        sites = models.names_of_sites(program, model)
        model = codes.narrowed(program, model, sites)
        applied = {**unchanged(program), **codes.found(model, sites)}
        rounded = codes.ACTIVATION_GROUP if any(_in_codes(form) for form in applied.values()) else 0
        given = config("f32") | _CACHE | {ROUNDED: rounded}
        for name in ("INFERENCE_PRECISION_HINT", *_CACHE, ROUNDED):
            model.set_rt_info(str(given[name]), ["runtime_options", name])
        if len(model.outputs) > len(program.outputs):
            model.set_rt_info("the last output", FLAG)
        return OpenVinoGraph(model, named, applied, given)


def _in_codes(form: Form) -> bool:
    return form.weights is not None and form.weights.family in codes.FAMILIES


class OpenVinoGraph:
    """See `backends.base.Lowered`. Compiled at its first call, for any sizes.

    Args:
        names: of its inputs, in order.
        given: what it is compiled with.
    """

    def __init__(
        self, model: Untyped, names: Sequence[str], applied: Mapping[str, Form], given: Mapping[str, object]
    ) -> None:
        self._model, self._names, self._given = model, list(names), dict(given)
        self.applied, self.weight_bytes = dict(applied), models.weight_bytes(model)
        self._flagged = bool(model.has_rt_info(FLAG))
        self._requests: Requests | None = None
        self._states: list[tuple[int, int]] = []
        self._find_states()

    def _find_states(self) -> None:
        """(place among the inputs, among the outputs) of what is kept."""
        pairs = [(self._names.index(into), int(out[len(TO) :])) for into, out in states_of(self._model)]
        self._states, self._requests = sorted(pairs), None

    @property
    def settings(self) -> dict[str, object]:
        """How it is run."""
        told = {name.lower(): value for name, value in (_CACHE | {ROUNDED: self._given[ROUNDED]}).items()}
        return {
            "threads": self._given["INFERENCE_NUM_THREADS"],
            "precision_hint": self._given["INFERENCE_PRECISION_HINT"],
            **told,
        }

    def carrying(self, places: Mapping[int, int]) -> OpenVinoGraph:
        """Keep what enters at these places and leaves at those, from one call to the next.

        Raises:
            LoweringError: OpenVINO cannot compile it so.
        """
        if places and not self._states:
            pairs = {self._names[into]: f"{TO}{out}" for into, out in places.items()}
            self._model = with_states(self._model, pairs, _TOKENS)
            self._find_states()
        self._compiled()
        return self

    def _compiled(self) -> Requests:
        if self._requests is None:
            import openvino

            try:
                compiled = openvino.Core().compile_model(self._model, "CPU", self._given)
            except RuntimeError as error:
                raise LoweringError(
                    f"OpenVINO cannot compile a graph of the step: {first_line(error)}. Choose another "
                    "backend."
                ) from error
            self._requests = Requests(compiled, [self._names[into] for into, _ in self._states])
        return self._requests

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        requests, kept = self._compiled(), dict(self._states)
        arrays = {
            name: plain(tensor).numpy()
            for at, (name, tensor) in enumerate(zip(self._names, inputs, strict=True))
            if at not in kept
        }
        check_numbers(arrays)
        rows = [inputs[into] for into in kept]
        found = requests.of(rows)
        new, order = 0, {}
        if rows:
            batch, new = inputs[self._names.index(_TOKENS)].shape
            order = {ORDER: np.arange(batch, dtype=np.int32)}
        before, found.rows = found.rows, -1
        outputs = list(found.request.infer({**arrays, **order}, share_inputs=True).values())
        if self._flagged:
            check_flag(outputs.pop())
        answers = [torch.from_numpy(value) for value in outputs]
        found.rows = before + new
        for place, (into, out) in enumerate(self._states):
            sizes = (*inputs[into].shape[:2], found.rows, inputs[into].shape[3])
            answers.insert(out, KeptRows(found, place, sizes, inputs[into].dtype))
        return answers

    def save(self, directory: Path) -> tuple[Path, ...]:
        """Write `model.xml` and `model.bin`.

        Raises:
            UsageError: the folder cannot be written.
        """
        return written(self._model, directory)

    def tune(self, inputs: Sequence[torch.Tensor]) -> bool:
        return False  # its own plugin chooses

    def rest(self) -> None:
        """What it converted lies in memory, in no file."""

    def peak_bytes(self, inputs: Sequence[torch.Tensor]) -> int | None:
        """See `OpenVinoLowered.peak_bytes`; what is kept is counted as OpenVINO holds it, and not as it is
        given.
        """
        import json

        with tempfile.TemporaryDirectory(prefix="effcompile-openvino-") as folder:
            path, _ = self.save(Path(folder))
            arrays = [plain(tensor).numpy() for tensor in inputs]
            if self._states:
                arrays.append(np.arange(len(inputs[self._names.index(_TOKENS)]), dtype=np.int32))
            found = resident.peak_bytes(
                _MEASURE_PEAK, path, arrays, json.dumps(self._given), *self._names, ORDER
            )
        return None if found is None else found - sum(inputs[into].nbytes for into, _ in self._states)


def open_graph(file: Path, names: Sequence[str]) -> OpenVinoGraph:
    """What was saved, at work again.

    Raises:
        MissingPackageError: OpenVINO is not installed. FormatError: it is none of its models.
    """
    try:
        import openvino
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "openvino", "Running this artifact", "pip install 'effcompile[openvino]'"
        ) from error
    try:
        model = openvino.Core().read_model(file)
        said = {
            name: str(model.get_rt_info(["runtime_options", name]).astype(str))
            for name in ("INFERENCE_PRECISION_HINT", *_CACHE, ROUNDED)
        }
    except RuntimeError as error:
        raise FormatError(
            f"{str(file)!r} is no OpenVINO model of a step: {first_line(error)}. Write it again."
        ) from error
    return OpenVinoGraph(model, names, {}, config(said["INFERENCE_PRECISION_HINT"]) | said)
