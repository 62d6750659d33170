"""A backend predicted slower by far is not built, unless running the best leaves it undecided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from captured_once import steps_once
from generation_models import captured

import effcompile
from effcompile.compiler.generation import build
from effcompile.core.findings import NotBuilt
from effcompile.proof.generation import measured, prompts
from effcompile.proof.generation.measured import Interleaved, Seconds

pytest.importorskip("onnxruntime")


@pytest.mark.parametrize(("takes", "late"), [(1e-9, False), (10.0, True)])
def test_what_is_far_from_the_best_is_built_where_running_leaves_it_open(
    monkeypatch: pytest.MonkeyPatch, takes: float, late: bool
) -> None:
    compared: list[list[str]] = []

    def timed(model: Any, steps: Any, *_: Any) -> Interleaved:
        compared.append(list(steps))
        each = {name: Seconds(prefill=takes, decode=takes) for name in (measured.ORIGINAL, *steps)}
        return Interleaved(each=each, stream=0.0, read=8)

    monkeypatch.setattr(build, "SHORTLIST", 0.0)
    monkeypatch.setattr(measured, "compared", timed)
    torch.manual_seed(0)
    model = captured("llama")[0]
    with steps_once():
        plan = effcompile.optimize(model, mode="generation", context=24, prompt=8, new=4).plan
    assert [len(names) for names in compared] == ([1, 2] if late else [1])
    left = [each for each in plan.candidates if isinstance(each.note, NotBuilt)]
    assert len(left) == (0 if late else 1)


@pytest.mark.parametrize("holds", [0, 1 << 40])
def test_what_is_predicted_to_hold_less_than_the_best_does_is_built_where_memory_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, holds: int
) -> None:
    """A backend whose runtime holds what nobody foresaw was returned as the least."""
    built: list[str] = []
    settled, finished = build._settle, build._finished

    def counted(*given: Any, **how: Any) -> Any:
        made = settled(*given, **how)
        built.extend([] if isinstance(made, NotBuilt) else [made.plan.backend])
        return made

    def told(bench: Any, outcomes: Any, *rest: Any) -> Any:
        made = finished(bench, outcomes, *rest)
        assert made.plan.measured is not None
        if len(outcomes) == 1:
            made.plan = replace(made.plan, measured=replace(made.plan.measured, peak_bytes=holds))
        return made

    monkeypatch.setattr(build, "SHORTLIST", 0.0)
    monkeypatch.setattr(build, "_settle", counted)
    monkeypatch.setattr(build, "_finished", told)
    torch.manual_seed(0)
    model = captured("llama")[0]
    with steps_once():
        asked = {"mode": "generation", "context": 24, "prompt": 8, "new": 4, "minimize": "memory"}
        plan = effcompile.optimize(model, **asked).plan
    assert len(built) == len(set(built)) == (2 if holds else 1)
    assert sum(isinstance(each.note, NotBuilt) for each in plan.candidates) == (0 if holds else 1)


def test_long_prompts_are_read_twice_only_where_it_may_decide() -> None:
    found = prompts.undecided({measured.ORIGINAL: 7.0, "a": 2.0, "b": 3.9, "c": 4.1})
    assert found == ["a", "b"]
    assert prompts.undecided({measured.ORIGINAL: 0.9, "a": 0.1}) == [measured.ORIGINAL, "a"]
    assert prompts.undecided({measured.ORIGINAL: 9.0, "a": 4.1}) == []  # nothing to choose between


def test_a_long_prompt_of_the_model_itself_is_timed_by_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token takes 1 and what stands before it: the first and the last quarter say what the whole takes."""
    model, step = captured("llama")
    lengths: list[tuple[int, int]] = []
    now = iter([0.0, 512 * 1.0 + 512**2 / 2, 0.0, 512 * 1.0 + (2048**2 - 1536**2) / 2])

    def read(ids: torch.Tensor, cache: Any) -> None:
        lengths.append((cache.get_seq_length(), ids.shape[1]))
        made = torch.zeros(1, 2, ids.shape[1], 8)
        for layer in range(2):
            cache.update(made, made, layer)

    monkeypatch.setattr(prompts.time, "perf_counter", lambda: next(now))
    ids = torch.ones((1, 2048), dtype=torch.int64)
    found = prompts.of_two_parts(read, model, step.layout, ids)
    assert found is not None
    assert lengths == [(0, 512), (1536, 512)]
    assert found.seconds == pytest.approx(2048 + 2048**2 / 2)
    assert (found.tokens, found.cache.get_seq_length()) == (1024, 2048)
    assert prompts.of_two_parts(read, model, step.layout, ids[:, :1024]) is None  # read soon
