"""Random models × error limits × backends × ways to call: the answer is eager's within the limit, or an
EffcompileError is raised.

The oracle is the model itself in eager PyTorch, and this file's own arithmetic: nothing of effcompile's
comparing or capturing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conditioning import moved_answers
from fuzz_settings import ASKED, fuzzed
from hypothesis import given, note
from hypothesis import strategies as st
from inference_models import CHANGES, WORDS, Case, Model, Setting, drawn
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import effcompile
from effcompile.capture.state import ModelGuards
from effcompile.compiler import measure, open_artifact
from effcompile.core import timing
from effcompile.core.errors import EffcompileError, InternalError, LoweringError, VerificationError
from effcompile.ir.program import Program
from effcompile.machine.machines import load_target
from effcompile.search import captured

#: Relative error that fp32 arithmetic in another order may make of models as small as these.
ROUNDING = 1e-4
#: What inputs that no calibration saw may do to an error that was declared for those that it did (issue 13.10
#: prints it).
OFF_CALIBRATION = 8.0

#: What was refused in words, for whoever looks whether it was right: soak.py writes it into a file.
REFUSED = logging.getLogger("effcompile.fuzz.refused")

#: What is called so, and its arguments.
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """All settings of a model plan for one capture, and nothing is timed for long: plans of another quality,
    of the same correctness.
    """
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(captured, "capture", captured_once(captured.capture))
        patch.setattr(measure, "_MOST", 4)
        patch.setattr(timing, "PATIENCE", 0.0)
        yield


def captured_once(capture: Callable[..., Program]) -> Callable[..., Program]:
    """The latest model is captured once for all settings.

    That is honest, for a capture depends on the model and its example inputs alone, and its graph is never
    edited: passes change copies. What the guards remember is each plan's own.
    """
    latest: list[tuple[nn.Module, Program]] = []

    def once(model: nn.Module, *args: Any, **kwargs: Any) -> Program:
        if not latest or latest[0][0] is not model:
            latest[:] = [(model, capture(model, *args, **kwargs))]
        return replace(latest[0][1], state=ModelGuards(model, training=False), recovered={})

    return once


#: Backends that are installed here; what is not is skipped in plain sight.
OTHERS = tuple(name for name in ("onnxruntime", "openvino") if importlib.util.find_spec(name))
#: Settings of one model at the most; half as many in the mean, so that fewer models are drawn than cases are
#: asked for.
SEVERAL = 6 if ASKED else 3


@fuzzed(5, share=0.5 / 3)
@given(case=drawn(("torch-eager",), SEVERAL))
def test_torch_answers_as_eager_does(case: tuple[Case, list[Setting]], tally: Counter[str]) -> None:
    check(*case, tally)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@fuzzed(3, share=0.25 / 3)
@given(data=st.data())
def test_other_backends_answer_as_eager_does(backend: str, data: st.DataObject, tally: Counter[str]) -> None:
    pytest.importorskip(backend)
    check(*data.draw(drawn((backend,), SEVERAL)), tally)


def check(case: Case, settings: Sequence[Setting], tally: Counter[str]) -> None:
    """Optimize for each setting, call in several ways, change the model: each answer is compared with the
    model itself.
    """
    note(f"{case!r}, {settings!r}")
    model = case.model()
    example = case.inputs(case.batch, case.length, strided=case.strided)
    trials = [Trial(case, setting, model, tally) for setting in settings]
    planned = [(trial, run) for trial in trials if (run := trial.optimized(example)) is not None]
    for name, change in CHANGES.items() if planned else ():
        undo = change(model)
        try:
            for trial, run in planned:
                trial.compare(model, run, f"changed: {name}", (), example)
                trial.count("changes of the model")
        finally:
            undo()


@dataclass(frozen=True)
class Trial:
    """One setting of one model."""

    case: Case
    setting: Setting
    model: Model
    tally: Counter[str]

    def count(self, what: str) -> None:
        self.tally[f"inference: {self.setting.backend}: {what}"] += 1

    def optimized(self, example: dict[str, Tensor]) -> Any:
        """The planned model, called in several ways; None where it is refused in words."""
        self.count("cases")
        try:
            run = self.plan(example)
        except InternalError:
            raise
        except EffcompileError as error:
            note(str(error))
            REFUSED.info("(%r, [%r])\n%s: %s", self.case, self.setting, type(error).__name__, error)
            self.count(f"refused, {type(error).__name__}")
            plain = self.setting.backend == "torch-eager"
            if isinstance(error, VerificationError) and plain and self.case.dtype == torch.float32:
                raise AssertionError("torch's own kernels came out wrong") from error
            if isinstance(error, LoweringError) and plain and answers(self.model, example):
                raise AssertionError("torch's own operators, which eager runs, could not be run") from error
            return None
        self.count("optimized")
        calls = ways(self.case, self.setting, example)
        for way, args, kwargs in calls:
            self.compare(self.model, run, way, args, kwargs)
        if self.setting.saved:
            self.open_saved(run, calls)
        return run

    def plan(self, example: dict[str, Tensor]) -> Any:
        case, setting = self.case, self.setting
        calibrated = (
            [case.inputs(case.batch, case.length, strided=False) for _ in range(2)]
            if setting.max_error
            else None
        )
        return effcompile.optimize(
            self.model,
            inputs=example if case.by_name else tuple(example.values()) if _in_order(example) else example,
            max_error=setting.max_error,
            minimize=setting.minimize,
            passes=setting.passes,
            backend=setting.backend,
            target=load_target("cpu-generic"),
            dynamic=case.dynamic,
            calibration=calibrated,
        )

    def open_saved(self, run: Any, calls: Sequence[Call]) -> None:
        """The same calls of what was saved and opened again."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                opened = open_artifact(run.save(Path(folder) / "artifact"))
            except LoweringError as error:  # what torch.export cannot save
                note(str(error))
                self.count("not saved")
                return
            for way, args, kwargs in calls:
                self.compare(Flat(self.model), opened, f"{way}, saved and opened", args, kwargs)

    def compare(self, model: Any, run: Any, way: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One call, beside the model's own."""
        with torch.no_grad():
            try:
                wanted = model(*args, **kwargs)
            except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as raised:
                # as InstanceNorm does at one token
                note(f"{way}: eager raises {raised}")
                with pytest.raises(EffcompileError):
                    run(*args, **kwargs)
                self.count("calls refused as eager's are")
                return
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before = [leaf.clone() for leaf in given]
        try:
            found = run(*args, **kwargs)
        except InternalError:
            raise
        except EffcompileError as error:
            self.count("calls refused")
            if way.removesuffix(", saved and opened") in ANSWERED:
                raise AssertionError(f"{way}: refused") from error
            return
        self.count("answers compared")
        assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True)), (
            f"{way}: inputs were changed"
        )
        self.same(found, wanted, way, lambda: moved_answers(model, args, kwargs))

    def same(self, found: Any, wanted: Any, way: str, moved: Callable[[], Iterable[Any]] = tuple) -> None:
        """Structure, kinds and values of an answer; beyond the limit, an error is held against the answers of
        `moved` values, for the model itself may be steep there.
        """
        ours, theirs = (pytree.tree_flatten_with_path(output)[0] for output in (found, wanted))
        assert [path for path, _ in ours] == [path for path, _ in theirs], f"{way}: another structure"
        limit = self.allowed(way)
        scale = next(
            (
                float(b.double().square().mean().sqrt())
                for _, b in theirs
                if isinstance(b, Tensor) and b.is_floating_point()
            ),
            0.0,
        )
        for (path, a), (_, b) in zip(ours, theirs, strict=True):
            place = f"{way}, output{pytree.keystr(path)}"
            if not isinstance(b, Tensor):
                assert type(a) is type(b) and a == b, f"{place}: {a!r} for {b!r}"
                continue
            assert isinstance(a, Tensor) and a.shape == b.shape and a.dtype == b.dtype, (
                f"{place}: another shape or dtype"
            )
            if b.is_floating_point():
                least = scale * self.terms(way, b, theirs) ** 0.5
                error = distance(a, b, least)
                assert error <= limit or error <= self.steepness(path, b, way, moved), (
                    f"{place}: relative error {error:.2e} > {limit:.0e}"
                )

    def steepness(self, path: Any, wanted: Tensor, way: str, moved: Callable[[], Iterable[Any]]) -> float:
        """How far an output goes with what eight bits may move; 0 where the plan promised more."""
        if way.startswith("example") or not self.setting.max_error:
            return 0.0
        outputs = (dict(pytree.tree_flatten_with_path(answer)[0])[path] for answer in moved())
        worst = max((distance(output, wanted) for output in outputs), default=0.0)
        self.count("answers beside those of moved values")
        return worst

    def terms(self, way: str, output: Tensor, outputs: Sequence[tuple[Any, Any]]) -> int:
        """Of how many values an output is made: a mean or a sum of both signs may be nearly nothing beside
        the errors of its terms.

        For what was planned for, the limit is of each output by itself, of its own values then; and so it is
        where nothing but rounding is allowed, which of the mean of values of both signs is as large as of one
        of them.
        """
        if way.startswith("example") or not self.setting.max_error:
            return output.numel()
        return max(other.numel() for _, other in outputs if isinstance(other, Tensor))

    def allowed(self, way: str) -> float:
        rounding = 6e-2 if self.case.dtype == torch.bfloat16 else ROUNDING
        return max(
            rounding,
            (self.setting.max_error or 0.0) * (OFF_CALIBRATION if not way.startswith("example") else 1.01),
        )


def answers(model: nn.Module, example: dict[str, Tensor]) -> bool:
    """Whether eager takes these inputs."""
    with torch.no_grad():
        try:
            model(**example)
        except (RuntimeError, ValueError, IndexError):
            return False
    return True


class Flat(nn.Module):
    """What a saved artifact returns: the tensors of the model's output, in order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves(self.model(*args, **kwargs)) if isinstance(leaf, Tensor)]


def _in_order(example: dict[str, Tensor]) -> bool:
    """Whether the inputs are the first ones of the forward, in its order, and can be given by position."""
    return list(example) == ["x", "scale", "mask"][: len(example)]


def ways(case: Case, setting: Setting, example: dict[str, Tensor]) -> list[Call]:
    """Calls: the example, other values, other strides, other sizes, by position and by name."""
    fresh = case.inputs(case.batch, case.length, strided=False)
    found: list[Call] = [
        ("example", (), example),
        ("other values", (), fresh),
        ("other strides", (), case.inputs(case.batch, case.length, strided=not case.strided)),
        ("other batch", (), case.inputs(case.batch + 2, case.length, strided=False)),
        ("other length", (), case.inputs(case.batch, case.length + 3, strided=False)),
        ("one of one", (), case.inputs(1, 1, strided=False)),
        ("x by position", (fresh["x"],), {name: value for name, value in fresh.items() if name != "x"}),
        ("names turned round", (), dict(reversed(fresh.items()))),
    ]
    if _in_order(fresh):
        found.append(("all by position", tuple(fresh.values()), {}))
    x = fresh["x"]
    found += [
        (
            "another dtype",
            (),
            {**fresh, "x": x.int() if case.ids else x.double() if case.dtype != torch.float64 else x.float()},
        ),
        ("an empty batch", (), {name: t[:0] if name != "scale" else t for name, t in fresh.items()}),
        ("one argument more", (), {**fresh, "alpha": 2.0}),
        ("None for what was left out", (), {"scale": None, "mask": None} | fresh),
        ("another rank", (), {**fresh, "x": x[0]}),
        ("no x", (), {name: t for name, t in fresh.items() if name != "x"}),
    ]
    if case.ids:
        found += [
            ("an id below 0", (), {**fresh, "x": x - x.max() - 1}),
            ("an id too large", (), {**fresh, "x": x + WORDS}),
        ]
    elif setting.max_error is None:
        found.append(("large values", (), {**fresh, "x": x * 6}))
    return found


#: Calls like those that were planned for: to refuse them is wrong.
ANSWERED = (
    "example", "other values", "other strides", "x by position", "names turned round", "all by position",
    "None for what was left out", "large values",
)  # fmt: skip


def distance(found: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    """‖a − b‖ / ‖b‖, or beside `least` where that is more; what both have infinite or NaN alike counts
    nothing.
    """
    a, b = found.double().flatten(), wanted.double().flatten()
    alike = (a == b) | (a.isnan() & b.isnan())
    a, b = a[~alike], b.masked_fill(~b.isfinite(), 0)
    if not len(a):
        return 0.0
    apart = float((a - wanted.double().flatten()[~alike]).norm())
    return apart / max(float(b.norm()), least, 1e-30)
