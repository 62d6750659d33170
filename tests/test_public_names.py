"""The names users rely on, pinned: removing or renaming one is a decision, not an accident."""

import inspect
import subprocess
import sys
from importlib.util import find_spec

import pytest

import effcompile
from effcompile.core.errors import EffcompileError

NAMES = [
    "CaptureError",
    "Cluster",
    "CriticalBatch",
    "DynamicSparsity",
    "EffcompileError",
    "Executable",
    "FormatError",
    "Goal",
    "GuardError",
    "InfeasibleError",
    "InputsError",
    "LoweringError",
    "MissingPackageError",
    "OutOfMemoryError",
    "Plan",
    "Run",
    "Scores",
    "SparseLayers",
    "Stage",
    "Strategy",
    "Target",
    "TrainingExecutable",
    "UnknownNameError",
    "UsageError",
    "VerificationError",
    "compilations",
    "critical_batch",
    "frontier",
    "load",
    "optimize",
    "plan",
    "schedule",
    "scores",
    "sparse_layers",
]


def test_names_are_these() -> None:
    assert sorted(effcompile.__all__) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_name_resolves(name: str) -> None:
    assert getattr(effcompile, name) is not None
    assert name in dir(effcompile)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="optimise"):
        effcompile.optimise  # noqa: B018


def test_no_module_is_named_as_a_public_name() -> None:
    """`import effcompile.plan as m` would give the function."""
    assert not [name for name in NAMES if find_spec(f"effcompile.{name}")]


def test_optimize_takes_the_agreed_arguments() -> None:
    parameters = inspect.signature(effcompile.optimize).parameters
    assert list(parameters)[:2] == ["model", "inputs"]  # as `plan` and `frontier` have them, and torch.export
    for name in ("goal", "target", "backend", "plan", "optimizer"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["target"].default == "auto"


def test_every_error_is_ours_and_exits_1_or_2() -> None:
    errors = [getattr(effcompile, name) for name in NAMES if name.endswith("Error")]
    assert all(issubclass(error, EffcompileError) and error.exit_code in (1, 2) for error in errors)


def test_import_needs_no_torch() -> None:
    code = "import sys, effcompile; effcompile.Plan, effcompile.Goal; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
