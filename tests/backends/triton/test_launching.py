"""What a call of attention costs before its kernels run, in instructions of Python, and that what calls share
is only what they may.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from effcompile.backends.torch.kept import keeping
from effcompile.backends.triton.configs import interpreting
from effcompile.ops.visibility import Visibility

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from effcompile.backends.triton import attention, attention_calls, configs, proof, tune
from effcompile.core.building import building

pytestmark = pytest.mark.skipif(interpreting(), reason="kernels are launched by the interpreter here")
#: (batch, heads, length, width) of q; k and v have half the heads.
SHAPE = (2, 4, 64, 16)
NOTHING = (None,) * 6
FORM: dict[str, Any] = {"scale": 0.25, "hi": 0}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of launches, which are not carried out."""
    found: list[dict[str, Any]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        found.append(
            {"kernel": self.__name__, "grid": grid, **dict(zip(self.arg_names, args, strict=False)), **given}
        )

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(attention, "_forms", {})
    return found


def qkv(
    dtype: torch.dtype = torch.bfloat16, shape: tuple[int, int, int, int] = SHAPE
) -> tuple[Tensor, Tensor, Tensor]:
    b, h, s, d = shape
    return torch.zeros(shape, dtype=dtype), *(torch.zeros(b, h // 2, s, d, dtype=dtype) for _ in range(2))


def step(*rest: Any, tensors: tuple[Tensor, Tensor, Tensor] | None = None, **form: Any) -> None:
    """Forward and backward."""
    q, k, v = tensors or qkv()
    form = FORM | form
    out, lse = attention._attention(q, k, v, *rest, **form)
    attention._attention_backward(torch.ones_like(out), q, k, v, out, lse, *rest, **form, bias_gradient=True)


def instructions(call: Callable[[], object]) -> int:
    """Of Python, that the call executes."""
    count = 0

    def look(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_a_second_call_of_a_form_is_a_fraction_of_the_first(launches: list[dict[str, Any]]) -> None:
    """3,654 instructions made a backward of three launches, and 2,228 a forward, when each call was checked
    and taken apart anew (219 and 84 µs; 26 and 10 now).
    """
    q, k, v = qkv()
    out, lse = attention._attention(q, k, v, **FORM)
    backward = lambda: attention._attention_backward(out, q, k, v, out, lse, **FORM)  # noqa: E731
    backward()
    forward = instructions(lambda: attention._attention(q, k, v, **FORM))
    assert forward < 600
    assert instructions(backward) < 1250
    attention._forms.clear()
    assert instructions(lambda: attention._attention(q, k, v, **FORM)) > 3 * forward


def test_arguments_go_by_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty keywords were half of a launch's time: each function on the way makes a dictionary of them."""
    named = list[set[str]]()
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *args, grid, warmup, **keywords: named.append(set(keywords))
    )
    monkeypatch.setattr(attention, "_forms", {})
    step()
    step(torch.zeros(1, H, S, S), *NOTHING[1:])
    assert len(named) == 8
    assert set.union(*named) == {"num_warps", "num_stages", "enable_fp_fusion"}


def told(launch: dict[str, Any]) -> dict[str, Any]:
    """Tensors by what a kernel sees of them."""
    return {
        name: (t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else t for name, t in launch.items()
    }


def wide() -> tuple[Tensor, Tensor, Tensor]:
    """As `qkv`, with rows that lie further apart."""
    q, k, v = qkv(shape=(2, 4, 64, 32))
    return q[..., :16], k[..., :16], v[..., :16]


def across() -> tuple[Tensor, Tensor, Tensor]:
    """As `qkv`, with rows that do not lie in rows."""
    q, k, v = (t.mT.contiguous().mT for t in qkv())
    return q, k, v


B, H, S, _ = SHAPE
LISTS = Visibility(hi=0).tiles(32, 32, q_len=S, k_len=S).tensors()
#: What may be different between two calls of one model.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"lo": -9},
    "open": {"hi": None},
    "chunks": {"chunk": 16},
    "softcap": {"softcap": 30.0},
    "scale": {"scale": 1.0},
    "fp16": {"tensors": qkv(torch.float16)},
    "shorter": {"tensors": qkv(shape=(2, 4, 48, 16))},
    "other heads": {"tensors": qkv(shape=(2, 8, 64, 16))},
    "rows apart": {"tensors": wide()},
    "columns first": {"tensors": across()},
    "bias": {"rest": (torch.zeros(1, H, S, S), *NOTHING[1:])},
    "bias for all heads": {"rest": (torch.zeros(1, 1, S, S), *NOTHING[1:])},
    "bias in bf16": {"rest": (torch.zeros(1, H, S, S, dtype=torch.bfloat16), *NOTHING[1:])},
    "sink": {"rest": (None, torch.zeros(H), *NOTHING[2:])},
    "mask": {"rest": (None, None, torch.ones(B, 1, S, S, dtype=torch.bool))},
    "documents": {
        "rest": (None, None, None, torch.zeros(B, S, dtype=torch.int64), torch.zeros(1, S, dtype=torch.int64))
    },
    "padding": {"rest": (*NOTHING[:5], torch.ones(B, S, dtype=torch.bool))},
    "lists": {"rest": (*NOTHING, LISTS), "block_q": 32, "block_k": 32},
    "four lists": {"rest": (*NOTHING, LISTS[:4]), "block_q": 32, "block_k": 32},
    "uniform": {"uniform_empty": True, "fills": True},
}


def test_a_form_is_not_taken_for_another(launches: list[dict[str, Any]]) -> None:
    """Every case in turn, twice: what is launched is what is launched where no other call ever was."""
    alone = {}
    for name, case in CASES.items():
        attention._forms.clear()
        step(*case.get("rest", ()), **{key: value for key, value in case.items() if key != "rest"})
        alone[name] = list(map(told, launches))
        launches.clear()
    # copied into rows, the same tiles, made even afterwards
    like_plain = {"columns first", "lists", "four lists", "uniform"}
    assert {name for name, found in alone.items() if found == alone["plain"]} == like_plain | {"plain"}
    assert len({str(found) for found in alone.values()}) == len(CASES) - len(like_plain)
    attention._forms.clear()
    for _ in range(2):
        for name, case in CASES.items():
            step(*case.get("rest", ()), **{key: value for key, value in case.items() if key != "rest"})
            assert list(map(told, launches)) == alone[name], name
            launches.clear()
    assert len(attention._forms) == 2 * len(CASES)


def test_forms_hold_no_tensor_and_are_not_held_without_end(
    launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_FORMS", 4)
    for length in range(17, 27):
        step(tensors=qkv(shape=(1, 2, length, 16)))
    assert len(attention._forms) <= 4
    assert not [t for form in attention._forms.values() for t in tensors_in(form)]


def tensors_in(form: Any) -> Iterator[Tensor]:
    for launch in form._launches.values():
        yield from (one for one in (*launch.values, *(launch.lists or ())) if isinstance(one, Tensor))
    yield from (
        one for name in form.numbers.__slots__ if isinstance(one := getattr(form.numbers, name), Tensor)
    )


def test_a_tile_that_was_measured_meanwhile_is_taken(
    launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was called before it was planned has the table's first tile until then, and no longer."""
    chosen = [configs.LaunchConfig(block_m=m, block_n=32, warps=4, stages=1) for m in (64, 32)]
    monkeypatch.setattr(attention_calls, "_chosen", lambda *_, **__: chosen[tune.Tuner.measured > 0])
    monkeypatch.setattr(tune.Tuner, "measured", 0)
    step()
    with building():
        monkeypatch.setattr(tune.Tuner, "measured", 1)
        step()
    step()
    assert [launch["BLOCK_M"] for launch in launches if launch["kernel"] == "attention_forward"] == [
        64,
        32,
        32,
    ]


@pytest.mark.parametrize(
    ("planning", "recording", "measured"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_tiles_are_measured_while_planning_and_never_in_a_recording(
    planning: bool, recording: bool, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded call takes what is known, as any call does."""
    offered = [configs.LaunchConfig(block_m=m, block_n=32, warps=4, stages=1) for m in (64, 32)]
    asked: list[bool] = []

    def choose(name: str, options: Any, trial: Any, *, measure: bool) -> Any:
        asked.append(measure)
        return options[1]

    monkeypatch.setattr(attention_calls, "options", lambda *_: offered)
    monkeypatch.setattr(tune, "tuner", lambda device: SimpleNamespace(choose=choose))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with building() if planning else nullcontext():
        assert (
            attention_calls._chosen("forward", torch.device("cuda", 0), torch.bfloat16, 64, 64) == offered[1]
        )
    assert asked == [measured]


@pytest.mark.parametrize(("verdict", "offered"), [(None, [False, True]), ("NaN in bfloat16", [False])])
def test_what_copies_whole_tiles_is_timed_where_it_was_right(
    verdict: str | None, offered: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compared in a process of its own before it runs in this one."""
    plain = configs.LaunchConfig(block_m=64, block_n=32, warps=4, stages=1)
    asked: list[list[bool]] = []

    def choose(name: str, options: Any, trial: Any, *, measure: bool) -> Any:
        asked.append([one.tma for one in options])
        return options[0]

    monkeypatch.setattr(attention_calls, "options", lambda *_: (plain, replace(plain, tma=True)))
    monkeypatch.setattr(tune, "tuner", lambda device: SimpleNamespace(choose=choose))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(proof, "proven", lambda families, *_: dict.fromkeys(families, verdict))
    with building():
        attention_calls._chosen("forward", torch.device("cuda", 0), torch.bfloat16, 64, 64, tma=True)
        attention_calls._chosen("forward", torch.device("cuda", 0), torch.bfloat16, 64, 64)
    assert asked == [offered], "the second is not of whole tiles, and has nothing to choose from"


def test_what_is_tried_once_is_not_kept(launches: list[dict[str, Any]]) -> None:
    narrow = configs.LaunchConfig(block_m=16, block_n=16, warps=4, stages=1)
    step()
    with configs.using(forward=narrow):
        step()
    step()
    assert [launch["BLOCK_M"] for launch in launches if launch["kernel"] == "attention_forward"] == [
        32,
        16,
        32,
    ]


def test_a_recording_keeps_the_lists_of_every_launch(launches: list[dict[str, Any]]) -> None:
    """Whether a form is known or not: a CUDA graph reads them when the cache has forgotten them."""
    for _ in range(2):
        launches.clear()
        with keeping() as kept:
            step()
        walked = [launch["partial_index"] for launch in launches if "partial_index" in launch]
        assert len(walked) == 3
        assert all(any(t is one for one in kept) for t in walked)
