"""A saved artifact, opened without the model, answers as the model does or refuses, as its
Executable would.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import effcompile
from effcompile.compiler import Artifact, open_artifact
from effcompile.core.errors import EffcompileError, FormatError, UsageError
from effcompile.ir.plan import Plan
from effcompile.ir.size_guards import holds, taken

IDS = torch.arange(12).reshape(2, 6)


class Model(nn.Module):
    """Goes another way at one token, and has at most 16 positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.position, self.linear = nn.Embedding(24, 8), nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(
        self,
        ids: Tensor,
        batch: dict[str, Tensor],
        mask: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> Tensor:
        h = self.table(ids) + self.position(torch.arange(ids.shape[1]))
        h = self.linear(h) if ids.shape[1] > 1 else h * 100
        return (h + batch["bias"]) * alpha * beta * (1.0 if mask is None else 0.0)


BIAS = {"bias": torch.ones(8)}
CALLS: dict[str, Callable[[Any], Any]] = {
    "by position": lambda f: f(IDS, BIAS, None, 2.0),
    "by name": lambda f: f(ids=IDS, batch=BIAS, alpha=2.0),
    "another value": lambda f: f(IDS, BIAS, alpha=3.0),
    "an int for a float": lambda f: f(IDS, BIAS, alpha=2),
    "a default given": lambda f: f(IDS, BIAS, alpha=2.0, beta=1.0),
    "another default": lambda f: f(IDS, BIAS, alpha=2.0, beta=2.0),
    "a value left out": lambda f: f(IDS, BIAS),
    "one token": lambda f: f(IDS[:, :1], BIAS, alpha=2.0),
    "one example": lambda f: f(IDS[:1], BIAS, alpha=2.0),
    "too many tokens": lambda f: f(IDS.repeat(1, 4) % 24, BIAS, alpha=2.0),
    "other sizes": lambda f: f(IDS.repeat(2, 2) % 24, BIAS, alpha=2.0),
    "an empty batch": lambda f: f(IDS[:0], BIAS, alpha=2.0),
    "another dtype": lambda f: f(IDS.int(), BIAS, alpha=2.0),
    "another device": lambda f: f(IDS.to("meta"), BIAS, alpha=2.0),
    "a sparse tensor": lambda f: f(IDS.to_sparse(), BIAS, alpha=2.0),
    "an id below 0": lambda f: f(IDS - 1, BIAS, alpha=2.0),
    "an id too large": lambda f: f(IDS + 20, BIAS, alpha=2.0),
    "a tensor for None": lambda f: f(IDS, BIAS, torch.ones(2, 6), 2.0),
    "another rank": lambda f: f(IDS[0], BIAS, alpha=2.0),
    "another size of a fixed axis": lambda f: f(IDS, {"bias": torch.ones(1)}, alpha=2.0),
    "a strided tensor": lambda f: f(IDS.t().contiguous().t(), BIAS, alpha=2.0),
    "another key": lambda f: f(IDS, {"other": torch.ones(8)}, alpha=2.0),
    "one key more": lambda f: f(IDS, {**BIAS, "other": torch.ones(8)}, alpha=2.0),
    "twice": lambda f: f(IDS, ids=IDS, batch=BIAS, alpha=2.0),
    "unknown": lambda f: f(IDS, BIAS, alpha=2.0, gamma=1.0),
    "nothing": lambda f: f(),
}
ANSWERED = ("by position", "by name", "a default given", "one example", "other sizes", "a strided tensor")


@pytest.fixture(scope="module", params=["torch-eager", pytest.param("onnxruntime", marks=pytest.mark.slow)])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    given = {"ids": IDS, "batch": BIAS, "alpha": 2.0}
    run = effcompile.optimize(Model().eval(), inputs=given, backend=request.param, target="cpu-generic")
    return open_artifact(run.save(tmp_path_factory.mktemp("saved") / "artifact"))


@pytest.mark.parametrize("name", CALLS)
def test_it_answers_as_the_model_or_refuses(opened: Artifact, name: str) -> None:
    call, model = CALLS[name], Model().eval()
    with torch.no_grad():
        try:
            found = call(opened)
        except EffcompileError:
            assert name not in ANSWERED
            return
        torch.testing.assert_close(found, [call(model)], rtol=1e-4, atol=1e-5)


def test_a_plan_that_does_not_say_what_its_artifact_takes_is_refused(
    opened: Artifact, tmp_path: Path
) -> None:
    folder = tmp_path / "artifact"
    folder.mkdir()
    for file in opened.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    data = msgspec.json.decode((folder / "plan.json").read_bytes())
    (folder / "plan.json").write_bytes(msgspec.json.encode({**data, "signature": None}))
    with pytest.raises(FormatError, match="does not say what its artifact takes"):
        open_artifact(folder)


def test_a_model_of_which_the_plan_has_no_digest_is_not_opened(opened: Artifact, tmp_path: Path) -> None:
    """It could be any other, and only what the plan names is compared with it."""
    folder = shutil.copytree(opened.folder, tmp_path / "out")
    (model,) = opened.plan.artifact
    shutil.copyfile(folder / model, folder / "other")
    opened.plan.with_changes(artifact={"other": opened.plan.artifact[model]}).save(folder / "plan.json")
    with pytest.raises(FormatError, match=rf"does not describe '{re.escape(model)}'.* files are other"):
        open_artifact(folder)


def test_a_file_whose_name_is_longer_than_one_may_be_is_told(opened: Artifact, tmp_path: Path) -> None:
    plan = opened.plan.to_dict()
    plan["artifact"] = {"x" * 300: "0" * 64}
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan))
    with pytest.raises(UsageError, match="There is no"):
        open_artifact(tmp_path)


def test_the_signature_is_read_back_as_it_was_written(opened: Artifact, tmp_path: Path) -> None:
    file = opened.plan.save(tmp_path / "plan.json")
    assert Plan.load(file).signature == opened.signature


@pytest.mark.parametrize(
    ("guard", "follows"),
    [
        ("L['x'].size()[1] == 8", True),
        ("L['x'].size()[0] <= 512", True),
        ("L['x'].size()[0] <= 511", False),
        ("L['x'].size()[0] >= 2", True),
        ("L['x'].size()[0] == L['y'].size()[1]", True),
        ("L['x'].size()[0] == L['y'].size()[0]", False),
        ("L['x'].size()[0] != 7", False),
        ("Mod(L['x'].size()[0], 4) == 0", False),
        ("L['x'].size()[0] * 2 <= 512", False),
        ("L['z'].size()[0] == 1", False),
        ("L['d']['k'].size()[0] == L['x'].size()[0]", True),
        ("L['alpha'] == 2.0", True),
        ("(L['x'].size()[0]*L['y'].size()[0]) % L['y'].size()[0] == 0", True),
        ("(L['x'].size()[0]*L['y'].size()[0]) // L['y'].size()[0] == L['y'].size()[1]", True),
        ("8*L['x'].size()[0] == 16*L['y'].size()[1] or (4*L['x'].size()[0] % 4) == 0", True),
        ("8*L['x'].size()[0] == 16*L['y'].size()[1] or (3*L['x'].size()[0] % 4) == 0", False),
        ("L['y'].size()[0] < L['y'].size()[0]*L['y'].size()[1]", True),
        ("8*max(1, L['x'].size()[0]) == 8*L['x'].size()[0]", True),
        ("8*max(3, L['x'].size()[0]) == 8*L['x'].size()[0]", False),
        ("L['y'].size()[0] % L['y'].size()[1] == 0", False),
        ("L['x'].size()[1] == 8 and L['y'].size()[0] == 3", False),
    ],
)
def test_guards_that_follow_from_the_rest(guard: str, follows: bool) -> None:
    sizes = {"['x']": ("seq", 8), "['y']": ("batch", "seq"), "['d']['k']": ("seq",)}
    found = taken([guard], sizes, {"seq": (2, 512)})
    assert (found is not None and not found[1]) is follows


def test_an_axis_is_one_where_all_guards_hold_there() -> None:
    sizes, bounds = {"['x']": ("batch", "seq"), "['y']": ("batch",)}, {"batch": (2, None), "seq": (2, 64)}
    inside, apart = "L['x'].size()[0] == L['y'].size()[0]", "L['y'].size()[0] < "
    apart += "L['x'].size()[0]*L['x'].size()[1]"
    assert taken([inside], sizes, bounds) == ({"batch": (1, None), "seq": (1, 64)}, ())
    assert taken([inside, apart], sizes, bounds) == ({"batch": (1, None), "seq": (2, 64)}, ())


def test_what_does_not_follow_is_asked_in_each_call() -> None:
    sizes, bounds = {"['x']": ("batch", "seq"), "['y']": ("3*seq",)}, {"batch": (2, None), "seq": (2, 64)}
    cut = "L['x'].size()[1] == 16 - max(0, 16 - L['x'].size()[1])"
    asked = ("seq == 16 - max(0, 16 - seq)", "12 // (3*seq) == 0")
    assert taken([cut, "12 // L['y'].size()[0] == 0"], sizes, bounds) == (
        {"batch": (1, None), "seq": (1, 64)},
        asked,
    )
    for unread in ("L['x'].size()[0] ** 2 == 4", "L['z'].size()[0] == 2", "L['x'].size()[0] =="):
        assert taken([unread], sizes, bounds) is None
    assert [holds(asked[0], {"seq": seq}) for seq in (1, 16, 17)] == [True, True, False]
    nobodys = ("", "seq ==", "__import__('os')", "seq ** 99 > 1", "seq // 0 == 0", "(" * 9999, "(1,) * seq")
    assert not any(holds(text, {"seq": 5}) for text in nobodys)


def test_a_call_whose_sizes_do_not_hang_together_is_told(opened: Artifact) -> None:
    signature = replace(opened.signature, guards=("batch % 2 == 0",))
    inputs = signature.inputs

    def said(batch: int) -> str:
        sizes = {n: 4 for each in inputs for n in each.sizes} | {"batch": batch}
        shapes = [
            tuple(sizes[n] if isinstance(n, str) else n for n in each.sizes) for each in signature.inputs
        ]
        return str(signature.refusal(shapes))

    assert "batch % 2" not in said(2)
    assert "takes sizes of which batch % 2 == 0 is true, and it is not at batch=3" in said(3)
