"""effcompile.load: an Executable in a process that has neither the model nor its code; copies, pickles and
torch.compile of Executables.
"""

import copy
import io
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import effcompile
from effcompile.core.errors import FormatError, GuardError, InputsError, UsageError
from effcompile.ir.returned import Returned, value_of


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Named:
    logits: Tensor | None = None
    hidden: Tensor | None = None
    extra: Tensor | None = None


pytree.register_pytree_node(
    Named,
    lambda n: (
        [v for v in vars(n).values() if v is not None],
        [k for k, v in vars(n).items() if v is not None],
    ),
    lambda values, names: Named(**dict(zip(names, values, strict=True))),
    serialized_type_name="test_loaded.Named",
    flatten_with_keys_fn=lambda n: (
        [(pytree.MappingKey(k), v) for k, v in vars(n).items() if v is not None],
        [k for k, v in vars(n).items() if v is not None],
    ),
)


class Model(nn.Module):
    """Returns every kind of container around tensors, a size and None."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {
            "pair": Pair(y, x * 2),
            "named": Named(logits=y, extra=y.sum()),
            "list": [y + scale, (x,)],
            "size": 2 * x.shape[0],
            "no": None,
        }


X, SCALE = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.ones(8)


@pytest.fixture(scope="module")
def made() -> tuple[Model, effcompile.Executable]:
    model = Model().eval()
    return model, effcompile.optimize(model, inputs=(X, SCALE), backend="torch-eager", target="cpu-generic")


@pytest.fixture(scope="module")
def folder(made: tuple[Model, effcompile.Executable], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made[1].save(tmp_path_factory.mktemp("saved") / "dir")


ELSEWHERE = """
import io, json, sys, torch
import effcompile
run = effcompile.load(sys.argv[1])
assert isinstance(run, effcompile.Executable) and "test_loaded" not in sys.modules
x, scale = torch.load(sys.argv[2])
out = run(x, scale=scale)
first, second = out["pair"]
named, held = out["named"], out["list"]
assert out["pair"].first is first and named.hidden is None and named["logits"] is named[0]
saved = [first, second, named.logits, named.extra, held[0], held[1][0], out["size"], out["no"]]
torch.save(saved, sys.argv[3])
"""


def test_another_process_gives_the_models_answers_in_its_structure(
    made: tuple[Model, effcompile.Executable], folder: Path, tmp_path: Path
) -> None:
    x = torch.randn(5, 8)
    torch.save((x, SCALE), tmp_path / "in.pt")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(folder), str(tmp_path / "in.pt"), str(tmp_path / "out.pt")],
        check=False, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "out.pt")
    with torch.no_grad():
        y = made[0].linear(x)
    for tensor, wanted in zip(found[:6], (y, x * 2, y, y.sum(), y + SCALE, x), strict=True):
        torch.testing.assert_close(tensor, wanted)
    assert found[6:] == [10, None]


def test_it_refuses_what_its_executable_would(folder: Path) -> None:
    run = effcompile.load(folder)
    with pytest.raises(GuardError, match="float64"):
        run(X.double(), SCALE)
    with pytest.raises(UsageError, match="without the model"):
        run.train()
    with pytest.raises(UsageError, match="without the model"):
        run.state_dict()
    with pytest.raises(InputsError, match="fixed when it is planned"):
        run.half()
    assert run.eval().to("cpu") is run


def test_it_runs_in_the_autocast_that_it_was_planned_in(folder: Path, tmp_path: Path) -> None:
    """Whatever its caller's is: the casts of one stand in no graph."""
    linear, x = nn.Linear(8, 8).eval(), torch.randn(3, 8)
    loaded = effcompile.load(folder)
    wanted = loaded(X, SCALE)["pair"][0]
    goal: dict[str, Any] = {
        "target": "cpu-generic",
        "backend": "torch-eager",
        "max_error": 0.05,
        "passes": [],
    }
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loaded(X, SCALE)["pair"][0], wanted)
        planned = effcompile.optimize(linear, inputs=(x,), **goal)
        narrow = planned(x)
        assert narrow.dtype is torch.bfloat16
        opened = effcompile.load(planned.save(tmp_path / "narrow"))
    assert torch.equal(opened(x), narrow)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(opened(x), narrow)


class Flat(nn.Module):
    """Rows of all examples are one axis, which the mask's sizes divide again, as GPT-2's linears do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(10, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        rows = self.linear(self.embed(ids).view(-1, 8))
        return rows.view(*mask.shape, 8) * mask[..., None]


def test_sizes_that_hang_together_by_arithmetic_alone_are_free(tmp_path: Path) -> None:
    """Torch's guards of them, `(batch * seq) % batch == 0`, had all other sizes refused once it was saved."""
    ids, mask = torch.randint(0, 10, (2, 5)), torch.ones(2, 5, dtype=torch.long)
    executable = effcompile.optimize(Flat().eval(), (ids, mask), backend="torch-eager", target="cpu-generic")
    loaded = effcompile.load(executable.save(tmp_path / "saved"))
    for sizes in ((2, 5), (1, 5), (3, 9)):
        given = torch.randint(0, 10, sizes), torch.ones(sizes, dtype=torch.long)
        assert torch.equal(loaded(*given), executable(*given))
    for run in (executable, loaded):
        with pytest.raises(GuardError, match="seq"):
            run(ids[:, :1], mask[:, :1])


class Cut(nn.Module):
    """Has rows for so many tokens, the last of which stand beside a shorter text's, as MPT's do."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.linear = nn.Parameter(torch.randn(16, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.rows[max(0, 16 - x.shape[1]) :]


def test_sizes_that_hang_together_in_another_way_are_asked_of_each_call(tmp_path: Path) -> None:
    """They were those of the example alone, once it was saved."""
    executable = effcompile.optimize(
        Cut().eval(), (torch.randn(2, 5, 8),), backend="torch-eager", target="cpu-generic"
    )
    loaded = effcompile.load(executable.save(tmp_path / "saved"))
    for seq in (5, 9, 16):
        x = torch.randn(3, seq, 8)
        assert torch.equal(loaded(x), executable(x))
    for run in (executable, loaded):
        with pytest.raises(GuardError, match="17"):
            run(torch.randn(3, 17, 8))


class Deep(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"logits": x + 1, "seen": {"rows": (x * 2, [(x - 1, {"last": x * 3})])}}


def test_what_is_returned_may_nest_as_deep_as_those_of_models_do(tmp_path: Path) -> None:
    """Of Qwen3-VL with an image five levels: a saved one returned all tensors side by side."""
    run = effcompile.optimize(
        Deep().eval(), (torch.randn(2, 3),), backend="torch-eager", target="cpu-generic"
    )
    x = torch.randn(2, 3)
    found = effcompile.load(run.save(tmp_path / "saved"))(x)
    assert torch.equal(found["seen"]["rows"][1][0][1]["last"], x * 3)
    assert torch.equal(found["logits"], x + 1)


def test_copies_and_pickles_of_a_loaded_one(folder: Path, tmp_path: Path) -> None:
    run = effcompile.load(folder)
    wanted = run(X, SCALE)["pair"].first
    stored = io.BytesIO()
    torch.save(run, stored)
    stored.seek(0)
    again = effcompile.load(run.save(tmp_path / "copy"))
    for other in (
        copy.copy(run),
        copy.deepcopy(run),
        pickle.loads(pickle.dumps(run)),
        torch.load(stored, weights_only=False),
        again,
    ):
        assert isinstance(other, effcompile.Executable)
        assert torch.equal(other(X, SCALE)["pair"].first, wanted)


def test_a_pickle_of_a_folder_that_holds_another_artifact_now(folder: Path, tmp_path: Path) -> None:
    stored = pickle.dumps(effcompile.load(effcompile.load(folder).save(tmp_path / "dir")))
    other = Model().eval()
    nn.init.zeros_(other.linear.weight)
    effcompile.optimize(other, inputs=(X, SCALE), backend="torch-eager", target="cpu-generic").save(
        tmp_path / "dir"
    )
    with pytest.raises(FormatError, match="another artifact"):
        pickle.loads(stored)


def test_copies_of_an_executable_follow_their_own_model(made: tuple[Model, effcompile.Executable]) -> None:
    _, run = made
    wanted = run(X, SCALE)["pair"].first
    other = copy.deepcopy(run)
    assert torch.equal(copy.copy(run)(X, SCALE)["pair"].first, wanted)
    assert torch.equal(other(X, SCALE)["pair"].first, wanted)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    assert torch.equal(run(X, SCALE)["pair"].first, wanted)
    with pytest.raises(GuardError, match="weight"):
        other(X, SCALE)


def test_pickling_an_executable_says_what_to_do_instead(made: tuple[Model, effcompile.Executable]) -> None:
    for pickled in (pickle.dumps, lambda run: torch.save(run, io.BytesIO())):
        with pytest.raises(UsageError, match=r"save\(folder\).*effcompile.load"):
            pickled(made[1])


def test_torch_compile_runs_an_executable_as_it_is(
    made: tuple[Model, effcompile.Executable], folder: Path
) -> None:
    for run in (made[1], effcompile.load(folder)):
        compiled = torch.compile(run, backend="eager")
        assert torch.equal(compiled(X, SCALE)["pair"].first, run(X, SCALE)["pair"].first)


def test_an_executable_has_what_the_model_has_beside(made: tuple[Model, effcompile.Executable]) -> None:
    model, run = made
    model.config = object()
    assert run.config is model.config
    with pytest.raises(AttributeError, match="nothing"):
        run.nothing  # noqa: B018
    del model.config


def test_a_folder_without_a_plan(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no folder"):
        effcompile.load(tmp_path / "none")
    with pytest.raises(UsageError, match=r"plan\.json"):
        effcompile.load(tmp_path)


@pytest.mark.parametrize(
    "formula",
    ["__import__('os').getpid()", "batch.real", "9**9**9**9", "batch if batch else 1", "other", "(" * 200],
)
def test_a_formula_of_a_foreign_plan_is_arithmetic(formula: str) -> None:
    with pytest.raises(FormatError, match="no arithmetic"):
        value_of(formula, {"batch": 2})


def test_arithmetic_of_sizes() -> None:
    assert value_of("FloorDiv(batch*seq + 3, 2) - 1", {"batch": 3, "seq": 4}) == (3 * 4 + 3) // 2 - 1
    assert Returned(kind="tuple", parts=(Returned(kind="tensor"), Returned(kind="plain", value=1.5))).built(
        [7], {}
    ) == (7, 1.5)
