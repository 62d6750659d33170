"""The choice among tiles: the fastest by an injected timer, once per device, from a file that may be missing,
damaged or of other tiles.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from effcompile.backends.triton import attention_tiles, configs
from effcompile.backends.triton.configs import LaunchConfig, architecture_of, candidates
from effcompile.backends.triton.tune import Tuner

OPTIONS = tuple(LaunchConfig(block_m=m, block_n=64, warps=4, stages=2) for m in (128, 64, 32))
Trial = Callable[[], object]


class Clock:
    """Seconds by block_m; what is not in the table cannot be built."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.asked = {int(name[1:]): value for name, value in seconds.items()}, 0

    def __call__(self, run: Trial) -> float:
        self.asked += 1
        found = run()
        assert isinstance(found, int)
        return self.seconds[found]


def choose(path: Path, clock: Clock, options: tuple[LaunchConfig, ...] = OPTIONS) -> LaunchConfig:
    return Tuner(path, clock).choose("forward bf16 64", options, lambda config: lambda: config.block_m)


def test_the_fastest_is_taken_and_kept(tmp_path: Path) -> None:
    clock = Clock(m128=3.0, m64=1.0, m32=2.0)
    path = tmp_path / "new" / "tiles.json"
    assert choose(path, clock).block_m == 64
    assert clock.asked == 3
    assert choose(path, clock).block_m == 64  # another process: from the file
    assert clock.asked == 3
    tuner = Tuner(path, clock)
    tuner.choose("dq bf16 64", OPTIONS, lambda config: lambda: config.block_m)
    assert set(json.loads(path.read_text())) == {"forward bf16 64", "dq bf16 64"}
    assert [file.name for file in path.parent.iterdir()] == ["tiles.json"]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"forward bf16 64": 7}', '{"forward bf16 64": {"block_m": 8}}', "\x00"]
)
def test_a_damaged_file_is_measured_anew(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(content)
    clock = Clock(m128=3.0, m64=2.0, m32=1.0)
    assert choose(path, clock).block_m == 32
    assert clock.asked == 3
    assert choose(path, clock).block_m == 32
    assert clock.asked == 3


def test_a_choice_that_the_table_has_no_more_is_made_anew(tmp_path: Path) -> None:
    clock = Clock(m128=3.0, m64=2.0, m32=1.0)
    choose(tmp_path / "tiles.json", clock)
    assert choose(tmp_path / "tiles.json", clock, OPTIONS[:2]).block_m == 64


def test_what_cannot_be_built_is_passed_over(tmp_path: Path) -> None:
    assert choose(tmp_path / "tiles.json", Clock(m64=2.0)).block_m == 64
    nothing = tmp_path / "nothing.json"
    assert choose(nothing, Clock()) == OPTIONS[0]
    assert not nothing.exists()


def test_nothing_is_measured_for_one_option_or_when_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    assert choose(tmp_path / "tiles.json", clock, OPTIONS[1:2]) == OPTIONS[1]
    monkeypatch.setenv("EFFCOMPILE_TUNE", "off")
    assert choose(tmp_path / "tiles.json", clock) == OPTIONS[0]
    assert clock.asked == 0


def test_a_folder_that_cannot_be_written_costs_no_result(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert choose(tmp_path / "file" / "tiles.json", Clock(m128=1.0, m64=2.0, m32=3.0)).block_m == 128


def test_architectures() -> None:
    """By compute capability; what has no bf16 or other instructions than the table's has no tiles."""
    assert [architecture_of(major) for major in (7, 8, 9, 10, 12)] == [
        None,
        "sm_80",
        "sm_90",
        "sm_100",
        "sm_80",
    ]
    assert [architecture_of(9, amd) for amd in ("gfx942:sramecc+", "gfx950", "gfx1100", "gfx90a")] == [
        "gfx942",
        "gfx942",
        None,
        None,
    ]


def test_candidates_fit_the_gpu_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of sm_80's instructions with 99 KiB of shared memory takes what fits; with less than any tile's,
    attention is declined.
    """
    monkeypatch.setattr(configs, "interpreting", lambda: False)
    every = candidates("dq", "sm_80", torch.bfloat16, 256, 256)
    assert every
    assert not candidates("dq", "sm_80", torch.bfloat16, 256, 256, shared=1000)
    assert set(candidates("dq", "sm_80", torch.bfloat16, 256, 256, shared=99 << 10)) < set(every)
    assert not candidates("forward", "sm_80", torch.bfloat16, 512, 512)
    monkeypatch.setattr(attention_tiles, "options", lambda *_: ())
    q = torch.randn(1, 1, 8, 16)
    assert "fits this GPU" in (attention_tiles.declines(q, q, q, attention_tiles.Terms(scale=1.0)) or "")


def test_a_users_step_is_not_held_up(tmp_path: Path) -> None:
    """Where nothing was measured, and nothing may be, the first is taken, for this call alone."""
    clock = Clock(m128=3.0, m64=1.0, m32=2.0)
    tuner = Tuner(tmp_path / "tiles.json", clock)
    assert (
        tuner.choose("forward bf16 64", OPTIONS, lambda config: lambda: config.block_m, measure=False)
        == OPTIONS[0]
    )
    assert clock.asked == 0
    assert tuner.choose("forward bf16 64", OPTIONS, lambda config: lambda: config.block_m).block_m == 64
    assert (
        tuner.choose("forward bf16 64", OPTIONS, lambda config: lambda: config.block_m, measure=False).block_m
        == 64
    )


def test_a_tile_whose_result_is_another_is_not_taken(tmp_path: Path) -> None:
    """The fastest of three gives something else: the next one is taken."""
    right = torch.arange(6.0)
    results = {128: (right, right), 64: (right, right * 1.1), 32: (right, right + 1e-4)}
    seconds = iter([3.0, 2.0])
    found = Tuner(tmp_path / "tiles.json", lambda run: next(seconds)).choose(
        "dkdv bf16 64", OPTIONS, lambda config: lambda: results[config.block_m]
    )
    assert found.block_m == 32
