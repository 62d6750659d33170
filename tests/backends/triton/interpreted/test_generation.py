"""Generation by the triton backend, in the interpreter in the place of a GPU: the model's own tokens, by the
kernels.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_once import steps_once
from generation_models import bare, captured, ids, more, same, tiny
from torch.utils._python_dispatch import TorchDispatchMode

import effcompile
from effcompile.backends.torch import graphs
from effcompile.backends.torch.still import StillStep
from effcompile.backends.triton import cached_attention, group_linear
from effcompile.backends.triton.backend import Triton
from effcompile.core.files import cache_folder
from effcompile.ops import elsewhere
from effcompile.proof.generation import check, measured
from effcompile.runtime.generation.executable import GenerationExecutable
from effcompile.runtime.generation.rows import SharedRows

CONTEXT = 64
KERNELS = {
    cached_attention: ("cached_attention_part", "cached_attention_whole", "append_rows"),
    group_linear: ("grouped_product",),
}


@pytest.fixture(scope="module", autouse=True)
def _shared_steps() -> Iterator[None]:
    with steps_once():
        yield


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched, by name."""
    names: list[str] = []
    for module, found in KERNELS.items():
        for name in found:
            monkeypatch.setattr(module, name, Spy(getattr(module, name), names))
    return names


class Spy:
    def __init__(self, kernel: Any, names: list[str]) -> None:
        self.kernel, self.names = kernel, names

    def __getitem__(self, grid: Any) -> Any:
        self.names.append(self.kernel.__name__)
        return self.kernel[grid]


@pytest.mark.parametrize("kind", ["llama", *more("gemma3_text", "bart")])
def test_it_says_what_the_model_says(kind: str, launched: list[str]) -> None:
    """Greedy and with beams, whose cache is reordered; each layer's attention is one of the kernels', its
    keys and values are appended by one.
    """
    planned = bare(captured(kind), "triton", CONTEXT)
    new = 12 if kind == "gemma3_text" else 5  # beyond its window
    same(planned, ids(2, 9), max_new_tokens=new, do_sample=False)
    assert set(launched) >= {"cached_attention_part", "append_rows"}
    same(planned, ids(1, 9), max_new_tokens=3, num_beams=2, do_sample=False)
    launched.clear()
    planned[1].generate(ids(1, 40), max_new_tokens=2, do_sample=False)
    # attentions of 40 tokens that are read at once are torch's; an encoder's are read for each token
    layers, attended = 2, 4 if kind == "bart" else 1
    assert launched.count("cached_attention_part") == layers * attended
    moved = 2 * (kind == "gemma3_text")  # a window, out of the buffer of so many tokens
    assert launched.count("append_rows") == 2 * layers * 2 + moved


def test_left_padding(launched: list[str]) -> None:
    text, mask = ids(2, 9), torch.ones(2, 9, dtype=torch.int64)
    text[0, :4], mask[0, :4] = 0, 0
    same(
        bare(captured("llama"), "triton", CONTEXT),
        text,
        attention_mask=mask,
        max_new_tokens=6,
        do_sample=False,
    )
    assert "cached_attention_part" in launched


@pytest.mark.parametrize("narrow", ["int8", *more("bfloat16")])
def test_a_narrower_cache_is_that_of_a_processor(narrow: str, launched: list[str]) -> None:
    """The same codes, so the same logits but for the order of sums, as torch's operators give for them."""
    text, sizes = ids(2, 21), [12, 1, 5, 1, 1, 1]
    _, executable = bare(captured("llama"), "triton", CONTEXT, narrow=narrow)
    found = forced(executable, text, sizes)
    assert launched.count("append_rows") == 4 * len(sizes) and "cached_attention_part" in launched
    kernels = dict(elsewhere._kernels)
    elsewhere._kernels.clear()
    try:
        told = forced(executable, text, sizes)
    finally:
        elsewhere._kernels.update(kernels)
    assert float((found - told).norm() / told.norm()) < 5e-4


def forced(executable: GenerationExecutable, text: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    parts, cache, at = [], None, 0
    for size in sizes:
        made = executable(text[:, at : at + size], past_key_values=cache, use_cache=True)
        cache, at = made.past_key_values, at + size
        parts.append(made.logits)
    return torch.cat(parts, 1)


def test_rows_of_several_requests(launched: list[str]) -> None:
    """Of different lengths in one batch: each says what it says alone."""
    model, executable = bare(captured("llama"), "triton", CONTEXT)
    rows, prompts = (
        SharedRows(executable.stepper),
        [ids(1, 5, seed=2)[0].tolist(), ids(1, 11, seed=3)[0].tolist()],
    )
    caches = [rows.opened() for _ in prompts]
    last = [int(rows.read(cache, prompt).argmax()) for cache, prompt in zip(caches, prompts, strict=True)]
    rows.change([], caches)
    said = [[token] for token in last]
    for _ in range(4):
        logits = rows.next([own[-1] for own in said])
        for own, row in zip(said, logits, strict=True):
            own.append(int(row.argmax()))
    for prompt, own in zip(prompts, said, strict=True):
        told = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)  # type: ignore[operator]
        assert told[0, len(prompt) :].tolist() == own
    assert "cached_attention_part" in launched


@pytest.mark.skipif(not more(True), reason="takes 20 seconds: EFFCOMPILE_EVERY=1")
def test_a_plan_and_its_folder(launched: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Priced, compared and measured, weights in groups; its folder opens without the model, on the same
    kernels.
    """
    own = tmp_path / "cache"  # of times that are made up, and of what was compiled before
    if (compiled := cache_folder() / "native").is_dir():
        shutil.copytree(compiled, own / "native")
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(own))
    monkeypatch.setattr(measured, "_ROUNDS", 1)  # what the interpreter takes tells nothing
    monkeypatch.setattr(check, "_DECODED", 3)
    cheap = {"linear/int8_groups", "linear/int4_groups"}
    monkeypatch.setattr(Triton, "measure", lambda _, call: 1e-9 if call.kernel in cheap else 1e-3)
    planned = effcompile.optimize(
        tiny("llama", num_hidden_layers=1), inputs={"input_ids": ids(1, 16)}, mode="generation", context=16,
        prompt=4, new=4, max_error=0.1, backend="triton", passes=["no-rows"],
    )  # fmt: skip
    forms = [d.applied for d in planned.plan.decisions if d.kind == "linear"]
    count = sum(form in ("int8_groups", "int4_groups") for form in forms)
    assert count > len(forms) / 2
    assert planned.plan.backend == "triton" and all(one.passed for one in planned.plan.checks)
    told = planned.plan.settings["kernels"]
    assert told == f"group_linear ×{count}; attention over a cache; in its interpreter"
    text = ids(1, 7)
    wanted = planned.generate(text, max_new_tokens=6, do_sample=False)
    opened = effcompile.load(planned.save(tmp_path / "out"))
    launched.clear()
    assert torch.equal(opened.generate(text, max_new_tokens=6, do_sample=False), wanted)
    assert {"cached_attention_part", "grouped_product"} <= set(launched)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFCOMPILE_CUDA_GRAPHS", "1")


WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)


class NoWaiting(TorchDispatchMode):
    """An error where the host reads what a device computed."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in WAITS, func
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_steps_of_one_token_stand_still(recording: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph needs: the kernels are given the same places token after token, and so many rows; the
    host waits for nothing. Padded rows say what they say in the model.
    """
    model, executable = bare(captured("llama"), "triton", CONTEXT)
    step = executable.lowered.run
    assert isinstance(step, StillStep) and executable.plan.settings["CUDA graph"] == "each token"
    assert graphs.waits(step._still.graph) is None
    given: list[tuple[object, ...]] = []
    attend, write = cached_attention.attend, cached_attention.write
    for name, kernel in (("cached_attention", attend), ("append_rows", write)):
        monkeypatch.setitem(elsewhere._kernels, (name, "cpu"), Noting(kernel, given))
    text, mask = ids(2, 9), torch.ones(2, 9, dtype=torch.int64)
    text[0, :4], mask[0, :4] = 0, 0
    seen: list[list[tuple[object, ...]]] = []
    still = step._still.forward

    def watched(*inputs: torch.Tensor) -> Any:
        given.clear()
        with NoWaiting() as watch:
            made = still(*inputs)
        assert watch.calls > 20
        seen.append([tuple(t.data_ptr() for t in inputs), *given])
        return made

    step._still.forward = watched
    same((model, executable), text, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert len(seen) == 3 and len(seen[0]) == 1 + 3 * 2, "of each layer an attention and two rows"
    assert all(each == seen[0] for each in seen)
    same((model, executable), ids(1, 12), max_new_tokens=3, do_sample=False)
    assert len(seen) == 5 and seen[3] == seen[4] != seen[0]


class Noting:
    """A kernel that notes the cache that it is given: address, sizes."""

    def __init__(self, kernel: Any, given: list[tuple[object, ...]]) -> None:
        self.kernel, self.given = kernel, given

    def __call__(self, *args: Any) -> Any:
        cache = args[1] if args[1].shape[2] > 1 else args[0]
        self.given.append((cache.data_ptr(), cache.shape))
        return self.kernel(*args)


@pytest.mark.parametrize("narrow", ["int8", *more("")])
def test_still_steps_say_what_others_say(
    narrow: str, recording: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, sizes = ids(2, 18), [9, 1, 1, 1, 3, 1, 1, 1]
    still = bare(captured("llama"), "triton", CONTEXT, narrow=narrow)[1]
    monkeypatch.delenv("EFFCOMPILE_CUDA_GRAPHS")
    moving = bare(captured("llama"), "triton", CONTEXT, narrow=narrow)[1]
    assert isinstance(still.lowered.run, StillStep) and not isinstance(moving.lowered.run, StillStep)
    assert "EFFCOMPILE_CUDA_GRAPHS=1" in moving.plan.settings["CUDA graph"]
    torch.testing.assert_close(forced(still, text, sizes), forced(moving, text, sizes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("gemma3_text", "move"), *more(("bart", "where the new row"), ("t5", "sees more or less"))],
)
def test_what_cannot_stand_still_says_why(kind: str, why: str, recording: None) -> None:
    """Windows; positions that are counted in the cache; a bias that is one of places."""
    executable = bare(captured(kind), "triton", CONTEXT)[1]
    assert why in executable.plan.settings["CUDA graph"] and not isinstance(executable.lowered.run, StillStep)
