"""The ONNX Runtime backend: export, graph forms, planned precision, a self-contained model.onnx."""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from effcompile.backends.base import Run
from effcompile.backends.mapped import copied
from effcompile.backends.onnxruntime import kernels, session
from effcompile.backends.onnxruntime.beside import check_beside
from effcompile.backends.onnxruntime.custom_ops import library_for
from effcompile.backends.onnxruntime.in_place import InPlace
from effcompile.backends.onnxruntime.unsigned import INT8_WEIGHTS, SIGNED, products_saturate
from effcompile.core.arrays import Array
from effcompile.core.errors import LoweringError, UsageError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Reason, Unsupported
from effcompile.core.temporary import own_folder, remove
from effcompile.core.torch_compat_narrow import made_elsewhere
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.machine.memory import give_back
from effcompile.machine.target import KernelCall
from effcompile.ops.grouped import multiplies_runs
from effcompile.ops.recurrence import RECURRENCES
from effcompile.sites.attention.cached import IN_PLACE, SITE

if TYPE_CHECKING:
    import onnxruntime

    from effcompile.backends.onnxruntime.lowering import Built

_NEEDED = ("onnx", "onnxruntime", "onnxscript")


@dataclass(frozen=True)
class OnnxRuntime:
    """ONNX Runtime on CPU."""

    name: ClassVar[str] = "onnxruntime"
    conflicts: ClassVar[tuple[tuple[str, str], ...]] = ()
    slack: ClassVar[float] = 1.0
    copies: ClassVar[float] = 3.25
    of_steps: ClassVar[str] = "effcompile.backends.onnxruntime:OnnxRuntime"

    def unavailable(self) -> Unsupported | None:
        missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
        return (
            Unsupported.of("{} not installed: pip install {}", ", ".join(missing), " ".join(missing))
            if missing
            else None
        )

    def refuses(self, program: Program, goal: Goal) -> Unsupported | None:
        if goal.mode == "training":
            return Unsupported("ONNX Runtime lowers inference only")
        if program.on_gpu:
            return Unsupported("its sessions run on the processor here, and the model lies on a GPU")
        if name := program.at_boundary("bfloat16"):
            return Unsupported.of(
                "{} is bfloat16, and ONNX Runtime is given NumPy's arrays, which have no such dtype", name
            )
        if any(node.target in RECURRENCES for node in program.graph.nodes):
            return Unsupported("ONNX has no operator for the recurrence of a layer that keeps a state")
        if any(multiplies_runs(node.target) for node in program.graph.nodes):
            return Unsupported("ONNX has no product of tokens in groups by expert")
        if program.weight_bytes() > session.PROTOBUF_LIMIT and not goal.exact:
            return Unsupported("onnxruntime.quantization handles models below 2 GiB of fp32 weights")
        return None

    def lacks(self, call: KernelCall) -> Reason | None:
        return kernels.lacks(call) if self.unavailable() is None else None

    def measure(self, call: KernelCall) -> float | None:
        return None if self.unavailable() else kernels.measure(call)

    def lower(self, program: Program, plan: Plan, calibration: Sequence[Sequence[torch.Tensor]]) -> OnnxModel:
        from effcompile.backends.onnxruntime.lowering import build

        folder = own_folder("effcompile-ort-")
        try:
            asked = bool(program.carried) and plan.forms().get(SITE) == IN_PLACE  # of a step alone
            built = build(program, calibration, folder, in_place=asked)
        except BaseException:
            remove(folder)
            raise
        told: dict[str, object] = {"opset": built.opset}
        if any(form.weights in SIGNED for form in built.applied.values()):
            told[INT8_WEIGHTS] = "unsigned" if products_saturate() else "signed"
        if (library := library_for(built.path)) is not None:
            # what a user of bare ONNX Runtime has to call; never read from a plan
            told["register_custom_ops_library"] = str(library)
        return OnnxModel(built, [spec.name for spec in program.inputs], told)

    def open(self, directory: Path, plan: Plan) -> Run:
        model = plan.file(directory, "model.onnx")
        check_beside(model, plan.artifact)
        call = load(model, plan.settings)

        def run(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
            return [
                torch.from_numpy(np.asarray(array))
                for array in call(session.numpy_feeds(list(tensors), list(tensors.values())))
            ]

        return run


class OnnxModel:
    """A lowered model in a temporary folder of its own (removed with the object), and a session on it.

    Args:
        names: of the program's inputs.
        told: what the plan's settings say beside those of the session.
    """

    def __init__(self, built: Built, names: list[str], told: Mapping[str, object]) -> None:
        self.applied, self.weight_bytes = dict(built.applied), built.weight_bytes
        self._path, self._names, self._told = built.path, names, dict(told)
        self._finalizer = weakref.finalize(self, remove, built.path.parent)
        self._session: onnxruntime.InferenceSession | None = built.opened
        self._chosen = session.default_settings()
        self._peaks = dict[tuple[object, ...], int | None]()  # measured in a process of its own each
        #: Calls whose caches stay in their buffers, where the model has such.
        self.in_place = InPlace(names, built.opened)
        present = {value.name for value in built.opened.get_inputs()}
        # an input that changes nothing is dropped by export
        self._present = [name in present for name in names]

    @property
    def settings(self) -> dict[str, object]:
        return {**session.settings_dict(self._chosen), **self._told}

    def tune(self, inputs: Sequence[torch.Tensor]) -> bool:
        from effcompile.backends.onnxruntime.tuned import tuned

        feeds, before = self._feeds(inputs), self._chosen
        found = tuned(self._path, feeds, lambda: self._fastest(feeds))
        self._told["tried"] = found.told()
        if found.chosen != self._chosen:
            self._session, self._chosen = None, found.chosen
        self._opened()
        return found.chosen != before

    def _fastest(self, feeds: Mapping[str, Array]) -> tuple[session.Settings, dict[str, float]]:
        """See `session.tune`: it has the session, which holds the weights, opened under the defaults."""
        if self._chosen != (default := session.default_settings()):
            self._session, self._chosen = None, default
        before = session.timed(self._opened(), feeds)
        self._session = None
        give_back()
        chosen, seconds, self._session = session.tune(self._path, feeds, before)
        return chosen, seconds

    def leaner(self) -> bool:
        """See `backends.base.Leaner`."""
        if not self._chosen.pattern:
            return False
        self._session, self._chosen = None, replace(self._chosen, pattern=False)
        return True

    def rest(self) -> None:
        """Close the session of a model that is large enough to be missed; the next call opens it again."""
        if self.weight_bytes > session.BESIDE:
            self._session = None
            give_back()

    def _opened(self) -> onnxruntime.InferenceSession:
        if self._session is None:
            self._session = session.open_session(self._path, self._chosen)
            give_back()  # the file, read as a whole, beside what the session made of it
        return self._session

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        if self.in_place:
            return self.in_place(self._opened(), inputs)
        return [
            torch.from_numpy(np.asarray(array)) for array in session.run(self._opened(), self._feeds(inputs))
        ]

    def save(self, directory: Path) -> tuple[Path, ...]:
        """Copy model.onnx, and the data of a large one beside it, into `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        # the data's names begin with the model's
        parts = sorted(self._path.parent.glob(f"{self._path.name}*"))
        return tuple(copied(part, directory / part.name) for part in parts)

    def peak_bytes(self, inputs: Sequence[torch.Tensor]) -> int | None:
        caches, given = self.in_place.caches, dict(zip(self._names, inputs, strict=True))
        measured = (self._chosen, *(tensor.shape for tensor in inputs))
        if measured not in self._peaks:
            self._peaks[measured] = session.peak_bytes(self._path, self._feeds(inputs), self._chosen, caches)
        found = self._peaks[measured]
        # rows that are written into buffers, which stood before
        new = sum(given[name][:, :, :1].nbytes * given["tokens"].shape[1] for name in caches)
        return None if found is None else found + new

    def _feeds(self, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
        kept = [
            (name, tensor)
            for name, tensor, present in zip(self._names, inputs, self._present, strict=True)
            if present
        ]
        return session.numpy_feeds([name for name, _ in kept], [tensor for _, tensor in kept])


class OpenedStep:
    """A saved graph of a generation at work again: tensors in the order of `names` → outputs.

    Raises: as `load`.
    """

    def __init__(self, path: Path, settings: Mapping[str, object], names: Sequence[str]) -> None:
        self._session, self._names = _opened(path, settings), list(names)
        self.in_place = InPlace(names, self._session)

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        if self.in_place:
            return self.in_place(self._session, inputs)
        feeds, wanted = session.numpy_feeds(self._names, inputs), self._session.get_inputs()
        found = session.run(self._session, {value.name: feeds[value.name] for value in wanted})
        return [torch.from_numpy(array) for array in found]


def load(path: Path, settings: Mapping[str, object]) -> Callable[[Mapping[str, Array]], list[Array]]:
    """A saved artifact as a callable on named numpy arrays; for `effcompile run`.

    Raises:
        UsageError: there is none. LoweringError: ORT refuses the file.
    """
    opened = _opened(path, settings)
    wanted = {value.name for value in opened.get_inputs()}

    def call(feeds: Mapping[str, Array]) -> list[Array]:
        missing = wanted - set(feeds)
        if missing:
            raise LoweringError(f"The artifact needs the input {', '.join(sorted(missing))}.")
        return session.run(opened, {name: value for name, value in feeds.items() if name in wanted})

    return call


def _opened(path: Path, settings: Mapping[str, object]) -> onnxruntime.InferenceSession:
    if not path.exists():
        raise UsageError(
            f"No artifact {str(path)!r}. Make it with `effcompile optimize ... -o {path.parent}`."
        )
    if settings.get(INT8_WEIGHTS) == "signed" and products_saturate():
        raise made_elsewhere(path)
    opened = session.open_session(path, session.settings_of(settings))
    give_back()  # the file, read as a whole, beside what the session made of it
    return opened
