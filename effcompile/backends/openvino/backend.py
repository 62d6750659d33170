"""The OpenVINO backend (`pip install 'effcompile[openvino]'`): fp32, static int8 per linear, bf16 for all the
rest or none.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from effcompile.backends import resident
from effcompile.backends.base import Run
from effcompile.backends.indices import flagged
from effcompile.backends.openvino import model as models
from effcompile.backends.openvino.edits import attended
from effcompile.backends.openvino.measure import KERNELS, measure
from effcompile.backends.openvino.shapes import FLAG, LARGEST, Shaped
from effcompile.core.errors import FormatError, LoweringError, MissingPackageError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Reason, Unsupported
from effcompile.core.stages import first_line
from effcompile.ir.formats import BF16, FP32, INT8_STATIC, TABLE_INT8_ROWS, Form, WeightFormat
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall
from effcompile.sites.parts import add_norms, attentions, embeddings, gelus, linears

ARTIFACT = "model.xml"
INSTALL = "pip install 'effcompile[openvino]'"
_LINEAR_FORMATS = (FP32, BF16, INT8_STATIC)
KNOWN = (*_LINEAR_FORMATS, TABLE_INT8_ROWS)
#: NNCF smooths activations (SmoothQuant, Xiao et al. 2023, eq. 4) until each channel's maximum over its
#: samples is about the range of all: of a pooler's single rows, one in ten elements of others lies beyond
#: (BERT-base: 13 % off, where 2.7 % were foreseen).
_FEWEST_ROWS = 16
_FEW_ROWS = "NNCF would take its range from {} rows an input, which others exceed"
#: A compiled nothing loads the CPU plugin, so that it is not taken for a part of the model.
_MEASURE_PEAK = """
import openvino
from openvino import opset13 as ops
core = openvino.Core()
config = {"INFERENCE_NUM_THREADS": int(options[0]), "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY",
          "INFERENCE_PRECISION_HINT": options[1]}
value = ops.parameter([1], numpy.float32)
nothing = openvino.Model([ops.relu(value)], [value])
core.compile_model(nothing, "CPU", config).create_infer_request().infer([numpy.zeros(1, numpy.float32)])
before()
request = core.compile_model(core.read_model(path), "CPU", config).create_infer_request()
loaded()
request.infer(inputs)
"""


class OpenVino:
    """Converts the exported program; NNCF quantises exactly what is planned as `int8_static`, `int8` or
    `sdpa_int8`.
    """

    name: ClassVar[str] = "openvino"
    #: the bf16 hint holds for a whole model
    conflicts: ClassVar[tuple[tuple[str, str], ...]] = (("fp32", "bf16"),)
    slack: ClassVar[float] = 1.2  # BERT-base 1×128 int8: predicted 45 ms, measured 38 ms
    copies: ClassVar[float] = 3.25
    of_steps: ClassVar[str] = "effcompile.backends.openvino.steps:OpenVinoSteps"

    def unavailable(self) -> Unsupported | None:
        missing = [package for package in ("openvino", "nncf") if importlib.util.find_spec(package) is None]
        return (
            Unsupported.of("the package {} is not installed. Install it with: {}", repr(missing[0]), INSTALL)
            if missing
            else None
        )

    def refuses(self, program: Program, goal: Goal) -> Unsupported | None:
        if goal.mode != "inference":
            return Unsupported("OpenVINO runs forward calls only")
        return self.misfit(program)

    def misfit(self, program: Program) -> Unsupported | None:
        """Why it is not run here in any mode."""
        if program.on_gpu:
            return Unsupported("its models run on the processor here, and the model lies on a GPU")
        if name := program.at_boundary("bfloat16"):
            return Unsupported.of(
                "{} is bfloat16, and OpenVINO is given NumPy's arrays, which have no such dtype", name
            )
        return _why_not(program)

    def lacks(self, call: KernelCall) -> Reason | None:
        held = call.format
        if held == INT8_STATIC and call.dims[0] < _FEWEST_ROWS:
            return Unsupported(_FEW_ROWS, (call.dims[0],))
        if held is None or (call.kernel in KERNELS and held in KNOWN):
            return None
        return Unsupported("OpenVINO has no {name} here", (call.kernel.replace("/", " in "),))

    def measure(self, call: KernelCall) -> float | None:
        return None if self.unavailable() else measure(call)

    def lower(
        self, program: Program, plan: Plan, calibration: Sequence[Sequence[torch.Tensor]]
    ) -> OpenVinoLowered:
        """See `backends.base.Backend.lower`; acts on `program.tags`.

        Raises:
            LoweringError: also for bf16 beside fp32 linears, which OpenVINO cannot do.
        """
        if refusal := _why_not(program):
            raise LoweringError(f"OpenVINO cannot run {program.name} as planned: {refusal}.")
        checked = flagged(program, LARGEST)
        converted = models.convert(attended(checked))
        names = models.names_of_sites(program, converted) | models.names_of_attentions(program, converted)
        quantized = models.quantize(program, converted, names, calibration)
        precision = "bf16" if BF16 in _linear_formats(program) else "f32"
        quantized.set_rt_info(precision, ["runtime_options", "INFERENCE_PRECISION_HINT"])
        if len(checked.outputs) > len(program.outputs):
            quantized.set_rt_info("the last output", FLAG)
        return _compile(program, quantized, names, precision)

    def open(self, directory: Path, plan: Plan) -> Run:
        path = plan.file(directory, ARTIFACT)
        if (weights := path.with_suffix(".bin")).is_file():  # which it reads, too
            plan.file(directory, weights.name)
        call = load(path)
        return lambda tensors: call(*tensors.values())


@dataclass(frozen=True, kw_only=True)
class OpenVinoLowered:
    """See `backends.base.Lowered`.

    Saved as OpenVINO IR, which plain OpenVINO loads with the same precision.
    """

    model: Any
    shaped: Shaped
    applied: Mapping[str, Form]
    settings: Mapping[str, Any]
    weight_bytes: int

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.from_numpy(value) for value in self.shaped.infer([t.detach().cpu().numpy() for t in inputs])
        ]

    def save(self, directory: Path) -> tuple[Path, ...]:
        """Write `model.xml` and `model.bin`.

        Raises:
            UsageError: the folder cannot be written.
        """
        return written(self.model, directory)

    def tune(self, inputs: Sequence[torch.Tensor]) -> bool:
        return False  # its own plugin chooses

    def rest(self) -> None:
        """What it converted lies in memory, in no file."""

    def peak_bytes(self, inputs: Sequence[torch.Tensor]) -> int | None:
        """Peak resident bytes over one call, in a process of its own (OpenVINO reports no memory); None off
        Linux.

        What OpenVINO itself takes, its CPU plugin included, is not counted; pages of the model's file that it
        reads are.
        """
        with tempfile.TemporaryDirectory(prefix="effcompile-openvino-") as folder:
            path, _ = self.save(Path(folder))
            arrays = [t.detach().cpu().numpy() for t in inputs]
            return resident.peak_bytes(
                _MEASURE_PEAK, path, arrays, self.settings["threads"], self.settings["precision_hint"]
            )


def written(model: models.Untyped, directory: Path) -> tuple[Path, ...]:
    """The files of a model in a folder: its graph, and its weights.

    Raises:
        UsageError: the folder cannot be written.
    """
    import openvino

    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ARTIFACT
    try:
        openvino.save_model(model, path, compress_to_fp16=False)
    except RuntimeError as error:  # its writer's, also for a full disk
        raise UsageError(
            f"OpenVINO cannot write {str(path)!r}: {first_line(error)}. Choose another folder with -o."
        ) from error
    return path, path.with_suffix(".bin")


def load(path: Path) -> Callable[..., list[torch.Tensor]]:
    """The saved model as a function of its flat tensors.

    Raises:
        MissingPackageError, UsageError (no such file), FormatError (not an OpenVINO model).
    """
    if importlib.util.find_spec("openvino") is None:
        raise MissingPackageError("openvino", "Running this artifact", INSTALL)
    if not path.is_file():
        raise UsageError(f"There is no {str(path)!r}. Give the folder that `effcompile optimize -o` wrote.")
    import openvino

    try:
        model = openvino.Core().read_model(path)
        shaped = Shaped(model, _precision(model))
    except RuntimeError as error:
        raise FormatError(
            f"{str(path)!r} is not an OpenVINO model: {first_line(error)}. Write it again."
        ) from error

    def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [torch.from_numpy(value) for value in shaped.infer([t.detach().cpu().numpy() for t in inputs])]

    return call


def _compile(program: Program, model: Any, names: Mapping[str, str], precision: str) -> OpenVinoLowered:
    shaped = Shaped(model, precision)
    try:
        shaped.infer([t.numpy() for t in program.flat_inputs()])
    except RuntimeError as error:
        raise LoweringError(
            f"OpenVINO cannot run {program.name}: {first_line(error)}. Choose another backend."
        ) from error
    return OpenVinoLowered(
        model=model,
        shaped=shaped,
        applied={**unchanged(program), **models.applied(shaped.compiled, model, names)},
        settings={"threads": torch.get_num_threads(), "precision_hint": precision},
        weight_bytes=models.weight_bytes(model),
    )


def _precision(model: Any) -> str:
    hint = ["runtime_options", "INFERENCE_PRECISION_HINT"]
    return str(model.get_rt_info(hint).astype(str)) if model.has_rt_info(hint) else "f32"


def _linear_formats(program: Program) -> set[WeightFormat]:
    return {program.format_at(site.site) for site in linears(program)}


def _why_not(program: Program) -> Unsupported | None:
    if not program.tags:
        return None
    formats = _linear_formats(program)
    if other := sorted(held.name for held in formats - set(_LINEAR_FORMATS)):
        return Unsupported.of(
            "OpenVINO has no linear {} here; it has {}",
            repr(other[0]),
            ", ".join(held.name for held in _LINEAR_FORMATS),
        )
    if {BF16, FP32} <= formats:
        return Unsupported(
            "OpenVINO's bf16 is one switch for the whole model: no linear may stay fp32 beside bf16 ones"
        )
    return None


def unchanged(program: Program) -> dict[str, Form]:
    """Sites that OpenVINO takes as the graph has them."""
    # lookups of constant ids became constants
    found = {site.site: Form(word="folded") for site in embeddings(program)}
    found.update({site.site: Form(word="causal" if site.causal else "sdpa") for site in attentions(program)})
    found.update({site.site: Form(word="split") for site in add_norms(program)})
    found.update({site.site: Form(word="erf") for site in gelus(program)})
    return found
