"""A box with two different GPUs: what the kernels are not for, or were not right on, is PyTorch's there,
though they are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from effcompile.backends import triton
from effcompile.backends.triton import (
    attention,
    attention_tiles,
    block_sparse,
    compress,
    configs,
    group_quant,
    loss_head,
    places,
    proof,
    rows,
    states8,
)
from effcompile.ops import compress as compress_ops
from effcompile.ops import group_quant as group_ops
from effcompile.ops import loss_head as head_ops
from effcompile.ops import rows as row_ops
from effcompile.ops import states8 as state_ops
from effcompile.ops.attention_terms import Terms

OLD, NEW = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A V100 and an H100; which of them is the current one, as a list of one."""
    found, now = {0: (7, "Tesla V100"), 1: (9, "NVIDIA H100")}, [0]

    def of(device: torch.device | int | None = None) -> tuple[int, str]:
        return found[
            device.index if isinstance(device, torch.device) else now[0] if device is None else device
        ]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(major=of(device)[0])
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: of(device)[1])
    monkeypatch.setattr(triton, "interpreting", lambda: False)
    monkeypatch.setattr(places, "_left", set())
    caches = (configs.architecture, triton._unavailable, triton._refuted)
    for one in caches:
        one.cache_clear()
    yield now
    for one in caches:
        one.cache_clear()


def test_each_gpu_is_asked_for_itself(two_gpus: list[int]) -> None:
    assert "no tiles were made for Tesla V100" in str(triton.unavailable())
    two_gpus[0] = 1
    assert triton.unavailable() is None
    two_gpus[0] = 0
    assert triton.unavailable() is not None
    assert (
        not places.runs("rows", OLD) and places.runs("rows", NEW) and places.runs("rows", torch.device("cpu"))
    )


def test_what_was_wrong_on_one_gpu_is_left_to_torch_there_alone(
    two_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two H100s, and kernels that are wrong on the second."""
    monkeypatch.setattr(places, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(triton, "unavailable", lambda: None)
    monkeypatch.setattr(
        triton, "refuted", lambda device: {"states8": "relative error 2.0e-01"} if two_gpus[0] else {}
    )
    monkeypatch.setattr(
        triton.importlib, "import_module", lambda name: SimpleNamespace(register=lambda device: None)
    )
    for gpu in (0, 1):
        two_gpus[0] = gpu
        assert triton.register("cuda") is None
    assert not places.runs("states8", NEW)
    assert places.runs("states8", OLD) and places.runs("rows", NEW)


def test_kernels_are_compared_on_the_gpu_that_is_asked_about(
    two_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, which would take the first."""
    started, taken = list[str](), list[torch.device]()

    def start(command: list[str], **_: Any) -> Any:
        started.append(command[3])
        return SimpleNamespace(communicate=lambda timeout: ("", ""))

    monkeypatch.setattr(proof.subprocess, "Popen", start)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for gpu in (0, 1):
        two_gpus[0] = gpu
        proof._run([[("rows", "float32", 0)]], "cuda")
    proof._run([[("rows", "float32", 0)]], "cpu")
    assert started == ["cuda:0", "cuda:1", "cpu"]
    proof.main("cuda:1")
    proof.main("cpu")
    assert taken == [NEW]


def made(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _head(forward: Callable[..., Any]) -> Any:
    x, weight, target = made(6, 8), made(10, 8), torch.arange(6)
    return forward(x, weight, None, target, head_ops.MEAN, -100, 1.0, 1.0, False, 2)


def _update(step: Callable[..., None]) -> tuple[Tensor, ...]:
    p, codes, scale, table = (
        made(512),
        torch.zeros(512, dtype=torch.uint8),
        torch.ones(2),
        torch.linspace(-1, 1, 256),
    )
    step(p, made(512) + 1, codes, scale, table, 1e-3, 0.9, 0.99, 0.0)
    return p, codes, scale


PACKED = compress_ops.pack_by_torch(made(300), [1])
#: Family → a call of its launcher and of PyTorch's own.
CALLS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "norm": (
        lambda: rows.norm(made(3, 8), None, made(8), 1e-5),
        lambda: row_ops.rms_norm_by_torch(made(3, 8), None, made(8), 1e-5),
    ),
    "swiglu": (
        lambda: rows.swiglu(made(3, 8), made(3, 8)),
        lambda: row_ops.swiglu_by_torch(made(3, 8), made(3, 8)),
    ),
    "loss head": (lambda: _head(loss_head.forward), lambda: _head(head_ops.loss_head_forward._init_fn)),
    "codes": (
        lambda: group_quant.quantize(made(4, 64), 32, torch.int8),
        lambda: group_ops.quantize_by_torch(made(4, 64), 32, torch.int8),
    ),
    "packed": (lambda: compress.compress(made(300), [1]), lambda: PACKED),
    "unpacked": (
        lambda: compress.decompress(PACKED, [300], [1], torch.float32),
        lambda: compress_ops.unpack_by_torch(PACKED, [300], [1], torch.float32),
    ),
    "states": (lambda: _update(states8.lion), lambda: _update(state_ops.lion8_by_torch)),
    "attention": (
        lambda: attention._attention(
            made(1, 2, 9, 16), made(1, 1, 9, 16), made(1, 1, 9, 16), scale=0.25, hi=0
        )[0],
        lambda: torch.nn.functional.scaled_dot_product_attention(
            made(1, 2, 9, 16),
            made(1, 1, 9, 16),
            made(1, 1, 9, 16),
            is_causal=True,
            scale=0.25,
            enable_gqa=True,
        ),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_launched_where_a_family_is_left_to_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all GPUs here none is one of the kernels', and launches would end in the compiler."""

    def launched(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(JITFunction, "run", launched)
    monkeypatch.setattr(attention, "_forms", {})
    for module in (rows, loss_head, group_quant, compress, states8, block_sparse, attention_tiles):
        monkeypatch.setattr(module, "runs", lambda family, device: False)
    ours, torchs = CALLS[name]
    torch.testing.assert_close(ours(), torchs())
    assert isinstance(block_sparse.kernels(made(4, 64), 32), str)
    assert attention.declines(made(1, 1, 4, 16), made(1, 1, 4, 16), made(1, 1, 4, 16), Terms(scale=1.0))


def test_every_family_asks_where_it_runs() -> None:
    asked = {file.stem: file.read_text(encoding="utf-8") for file in configs.TABLE.parent.glob("*.py")}
    for family in triton._OPERATORS:
        assert any(f'runs("{family}", ' in text for text in asked.values()), family
