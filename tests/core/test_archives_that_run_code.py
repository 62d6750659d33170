"""A .pt2 of somebody's runs no code of his, as an artifact and as a model: every way in which
torch.export.load, or the source that fx writes of a graph, would.

Each case leaves a file behind where its code ran. Before they were refused all did but two, which torch 2.13
happens to stumble over before: a text within a size, the name of an input.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import effcompile
from effcompile.core.errors import FormatError, UsageError
from effcompile.core.torch_compat_archives import what_runs_code
from effcompile.loader.reading import load

Members = dict[str, bytes]


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.mark}",)


def pickled(value: object) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def named(members: Members, end: str) -> str:
    return next(name for name in members if name.endswith(end))


def program(members: Members, change: Callable[[str], str]) -> None:
    name = named(members, "models/model.json")
    text = members[name].decode()
    members[name] = change(text).encode()
    assert members[name].decode() != text


def sample_inputs(members: Members, mark: Path) -> None:
    members[named(members, "sample_inputs/model.pt")] = pickled((Touches(mark),))


def older_weights(members: Members, mark: Path) -> None:
    members[named(members, "weight_0").replace("weight_0", "model.pt")] = pickled({"a": Touches(mark)})


def a_weight(members: Members, mark: Path) -> None:
    name = named(members, "model_weights_config.json")
    config = json.loads(members[name])
    for entry in config["config"].values():
        entry["use_pickle"] = True
        members[name.replace("model_weights_config.json", entry["path_name"])] = pickled(Touches(mark))
    members[name] = json.dumps(config).encode()


def a_size(members: Members, mark: Path) -> None:
    code = f"__import__('os').system('touch {mark}')"
    program(members, lambda text: re.sub(r'"expr_str": "[^"]*"', f'"expr_str": "{code}"', text, count=1))


def a_size_in_a_text(members: Members, mark: Path) -> None:
    code = f"Add('__import__(\\\\'os\\\\').system(\\\\'touch {mark}\\\\')', Integer(1))"
    program(
        members, lambda text: re.sub(r'"expr_str": "[^"]*"', lambda _: f'"expr_str": "{code}"', text, count=1)
    )


def an_input(members: Members, mark: Path) -> None:
    code = f"x=__import__('os').system('touch {mark}')"
    program(members, lambda text: re.sub(r'"name": "x"', lambda _: f'"name": "{code}"', text))


def a_structure(members: Members, mark: Path) -> None:
    (Path.cwd() / "brought.py").write_text(f"open({str(mark)!r}, 'w')")
    enum = json.dumps({"__enum__": True, "fqn": "brought:X", "name": "x"})
    spec = json.dumps([1, {"type": "builtins.dict", "context": f"[{enum}]", "children_spec": []}])
    program(
        members,
        lambda text: re.sub(
            r'"in_spec": "(?:[^"\\]|\\.)*"', lambda _: f'"in_spec": {json.dumps(spec)}', text
        ),
    )


WAYS = [sample_inputs, older_weights, a_weight, a_size, a_size_in_a_text, an_input, a_structure]


def rewritten(file: Path, change: Callable[[Members, Path], None], mark: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members, mark)
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).eval()


class Named(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


@pytest.fixture(scope="module")
def artifact(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return effcompile.optimize(
        Named(model),
        inputs=(torch.randn(4, 16),),
        target="cpu-generic",
        backend="torch-eager",
        max_error=0.05,
    )


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_artifact_runs_none(
    artifact: Any, way: Callable[[Members, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder, mark = artifact.save(tmp_path / "out"), tmp_path / "ran"
    rewritten(folder / "model.pt2", way, mark)
    plan = json.loads((folder / "plan.json").read_text())
    plan["artifact"]["model.pt2"] = hashlib.sha256((folder / "model.pt2").read_bytes()).hexdigest()
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(FormatError, match=r"model\.pt2' holds .*may run code") as refused:
        effcompile.load(folder)(torch.randn(4, 16))
    assert not mark.exists()
    assert "Write it again" in str(refused.value)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_program_that_is_planned_runs_none(
    model: nn.Module, way: Callable[[Members, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    file, mark = tmp_path / "model.pt2", tmp_path / "ran"
    free = {"x": {0: torch.export.Dim("batch")}}
    torch.export.save(torch.export.export(Named(model), (torch.randn(4, 16),), dynamic_shapes=free), file)
    rewritten(file, way, mark)
    with pytest.raises(UsageError, match=r"may run code.*--allow-pickle"):
        load(str(file))
    assert not mark.exists()


class Sizes(nn.Module):
    """Sizes that are sums, products, quotients and the larger of two; a module that has an odd name."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.ModuleDict({"a b-<c>": nn.Linear(8, 8)})

    def forward(self, x: torch.Tensor, y: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = torch.cat([x, y["y"]], 1)
        half = rows[:, : rows.shape[1] // 2]
        padded = nn.functional.pad(half, (0, 0, 0, max(x.shape[1], 3 * y["y"].shape[1] + 2)))
        return self.odd["a b-<c>"](padded).reshape(x.shape[0] * 2, -1)


def test_what_torch_exports_is_read(tmp_path: Path) -> None:
    free = {"x": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}, "y": {"y": {1: torch.export.Dim.AUTO}}}
    given = (torch.randn(2, 6, 8), {"y": torch.randn(2, 10, 8)})
    exported = torch.export.export(Sizes().eval(), given, dynamic_shapes=free)
    torch.export.save(exported, tmp_path / "model.pt2")
    assert what_runs_code(tmp_path / "model.pt2") is None


def test_names_that_stand_twice_are_refused(model: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (torch.randn(4, 16),)), file)
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(named(dict.fromkeys(archive.namelist(), b""), "models/model.json"), "{}")
    assert what_runs_code(file) is not None
