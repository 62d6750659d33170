"""Fronts kept on disk: another process finds them, with figures computed anew; a file that is not ours is as
none.
"""

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from remat_brute import transformer_block

from effcompile.planner.remat import BlockFront, BlockProblem, block, block_front, keep_fronts, kept


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    forget()
    yield
    forget()


def forget() -> None:
    """As in another process."""
    for known in (block._known, block._leanest, block._fresh, block._from_disk):
        known.clear()


def searched(monkeypatch: pytest.MonkeyPatch) -> list[BlockProblem]:
    """The blocks that are searched for from here on."""
    asked: list[BlockProblem] = []
    found = block._found

    def search(problem: BlockProblem, *rest: Any) -> BlockFront:
        asked.append(problem)
        return found(problem, *rest)

    monkeypatch.setattr(block, "_found", search)
    return asked


def first() -> BlockFront:
    front = block_front(transformer_block(), timeout=0.2)
    keep_fronts()
    forget()
    return front


def test_another_process_does_not_search_again(monkeypatch: pytest.MonkeyPatch) -> None:
    front = first()
    asked = searched(monkeypatch)
    again = block_front(transformer_block(), timeout=0.2)
    assert not asked
    assert again == front


def test_more_time_and_another_block_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    front = first()
    asked = searched(monkeypatch)
    problem = transformer_block()
    block_front(problem, timeout=0.2, points=5)
    dearer = replace(
        problem, forward=tuple(replace(op, seconds=2 * op.seconds + 1e-6) for op in problem.forward)
    )
    block_front(dearer, timeout=0.2)
    block_front(problem, timeout=0.3)
    assert asked[:2] == [problem, dearer]
    assert front.proven or asked[2:] == [problem]


def test_the_key_is_the_same_in_every_process() -> None:
    told = (
        "from remat_brute import transformer_block as t; from effcompile.planner.remat import kept; "
        "print(kept.hashed(t(), 3))"
    )
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    seeds = [{**os.environ, "PYTHONPATH": folders, "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    keys = {
        subprocess.run(
            [sys.executable, "-c", told], env=env, capture_output=True, text=True, check=True
        ).stdout
        for env in seeds
    }
    assert keys == {kept.hashed(transformer_block(), 3) + "\n"}


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda front: {**front, "kept": [[10_000], *front["kept"][1:]]},
        lambda front: {**front, "kept": [[-1], *front["kept"][1:]]},
        lambda front: {**front, "forms": [{"0": "elsewhere"}, *front["forms"][1:]]},
        lambda front: {**front, "forms": front["forms"][1:]},
        lambda front: {**front, "kept": [], "forms": []},
        lambda front: {**front, "kept": "all"},
    ],
)
def test_a_front_that_is_not_the_blocks_is_searched_for(spoilt, monkeypatch: pytest.MonkeyPatch) -> None:
    front = first()
    fronts = json.loads(kept.path().read_bytes())
    kept.path().write_text(json.dumps({key: spoilt(value) for key, value in fronts.items()}))
    asked = searched(monkeypatch)
    again = block_front(transformer_block(), timeout=0.2)
    assert len(asked) == 1
    assert again.options[0] == front.options[0]  # everything kept


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": 1}', b"\xff"])
def test_a_file_that_is_not_ours_is_as_none(content: bytes) -> None:
    kept.path().write_bytes(content)
    assert block_front(transformer_block(), timeout=0.2).options
    keep_fronts()
    assert kept.read(kept.path())


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path / "file"))
    assert block_front(transformer_block(), timeout=0.2).options
    keep_fronts()


ODD = [None, True, -1, 0, 3, 10**30, 1e300, -1e300, 1e-320, "x", [], {}, [[0]], {"0": "away"}, {"99": "x"}]


def spoiled(value: Any, dice: random.Random) -> Any:
    """The same with one place of it lost, repeated, or something else."""
    inner = (
        list(value if isinstance(value, dict) else range(len(value)))
        if isinstance(value, dict | list)
        else []
    )
    if not inner or dice.random() < 0.2:
        return dice.choice(ODD)
    key, made = dice.choice(inner), copy.copy(value)
    change = dice.randrange(6)
    if change == 0:
        del made[key]
    elif change == 1 and isinstance(made, list):
        made += [made[key]] * dice.choice([1, 300])
        dice.shuffle(made)
    else:
        made[key] = spoiled(made[key], dice)
    return made


def test_what_is_read_of_a_spoiled_file_is_options_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the figures that this process computes, in the order that a search gives, none of them covered by
    another.
    """
    monkeypatch.setattr(block, "_WORTH_KEEPING", 0.0)
    problem, dice, read = transformer_block(), random.Random(5), 0
    first()
    tree = json.loads(kept.path().read_bytes())
    (key,) = tree
    for _ in range(200):
        kept.path().write_text(json.dumps({key: spoiled(tree[key], dice)}))
        block._from_disk.clear()
        given, front = block._read(key, problem)
        if front is None:
            continue
        read += 1
        assert 0 <= given <= 1e6 and 0 <= front.seconds <= 1e6 and front.found >= 1
        assert [o.seconds for o in front.options] == sorted(o.seconds for o in front.options)
        for at, option in enumerate(front.options):
            assert problem.forced <= option.kept and option.kept.isdisjoint(option.forms)
            assert not any(
                o.kept_bytes <= option.kept_bytes and o.backward_peak <= option.backward_peak
                for o in front.options[:at]
            )
    assert read > 10
