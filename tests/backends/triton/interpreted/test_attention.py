"""The attention kernels in the mended interpreter against float64, with every term of the operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from effcompile.backends.triton import attention, attention_calls, attention_launch
from effcompile.backends.triton.configs import LaunchConfig, using
from effcompile.ops.attention_terms import Terms, sink_rows
from effcompile.ops.visibility import Visibility

LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
VISIBLE = ("lo", "hi", "chunk", "q_ids", "k_ids", "valid", "mask")
B, H, K, SQ, SK, D = 2, 2, 1, 45, 58, 32  # ragged on purpose: 2 tiles of 32 with a rest


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels do not write is NaN."""

    def fill(make_empty: Any) -> Any:
        def filled(*args: Any, **kwargs: Any) -> Tensor:
            made: Tensor = make_empty(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return filled

    monkeypatch.setattr(Tensor, "new_empty", fill(Tensor.new_empty))
    monkeypatch.setattr(torch, "empty", fill(torch.empty))


def make(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """The operator's definition, dense, in the inputs' dtype."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * terms.scale
    scores = terms.softcap * torch.tanh(scores / terms.softcap) if terms.softcap else scores
    scores = scores if terms.bias is None else scores + terms.bias
    raw, form = scores, Visibility(**{name: getattr(terms, name) for name in VISIBLE})
    seen = form.dense(q.shape[0], q.shape[2], k.shape[2])
    scores = scores.masked_fill(~seen, float("-inf"))
    if terms.sink is not None:
        sink = sink_rows(terms.sink).expand(scores.shape[:3]).unsqueeze(3)
        return torch.cat([scores, sink], 3).softmax(3)[..., :-1] @ v
    empty = ~seen.any(3, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(3)
    if terms.uniform_empty and not terms.fills:
        # eager adds finfo.min: the weights are uniform, and gradients pass
        return torch.where(empty, raw + torch.finfo(raw.dtype).min, scores).softmax(3) @ v
    return weights.where(~empty, 1 / k.shape[2] if terms.uniform_empty else 0.0) @ v


IDS = torch.arange(SK).expand(B, -1) // torch.tensor([[20], [32]])
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"hi": SK - SQ},
    "causal, rows without keys": {"hi": -20},
    "window and sink": {"lo": -10, "hi": 0, "sink": make((H,), seed=5)},
    "two-sided and softcap": {"lo": -5, "hi": 5, "softcap": 4.0},
    "chunks": {"chunk": 24, "hi": 0},
    "documents": {"q_ids": IDS[:, :SQ], "k_ids": IDS, "hi": 0},
    "padding": {
        "valid": torch.arange(SK) >= torch.tensor([[0], [40]]),
        "hi": 0,
        "uniform_empty": True,
        "fills": True,
    },
    "padding, added": {
        "valid": torch.arange(SK) >= torch.tensor([[0], [40]]),
        "hi": 0,
        "uniform_empty": True,
    },
    "mask and its bias": {"mask": make((1, H, SQ, SK), seed=6) > 0.5, "bias": make((B, H, SQ, SK), seed=7)},
    "bias by head": {"bias": make((1, H, SQ, SK), seed=7), "softcap": 2.0},
    "bias by key": {"bias": make((B, 1, 1, SK), seed=8), "hi": 3},
    "bias by row, sink by row": {"bias": make((1, H, SQ, 1), seed=9), "sink": make((1, H, SQ), seed=5)},
}


def check(
    terms: dict[str, Any],
    dtype: torch.dtype,
    tiles: bool,
    dv: int = D,
    d: int = D,
    heads: tuple[int, int] = (H, K),
) -> None:
    q = make((B, SQ, heads[0], d), dtype, 1).transpose(1, 2)  # strided, as a projection's output is
    k, v = make((B, heads[1], SK, d), dtype, 2), make((B, heads[1], SK, dv), dtype, 3)
    grad = make((B, heads[0], SQ, dv), dtype, 4)
    given = Terms(
        scale=d**-0.5,
        **{
            n: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in terms.items()
        },
    )
    lists: list[Tensor] = []
    if tiles:
        form = Visibility(**{n: getattr(given, n) for n in VISIBLE})
        lists = form.tiles(64, 32, q_len=SQ, k_len=SK).tensors()
        given = Terms(scale=d**-0.5, **{n: getattr(given, n) for n in terms}, block_q=64, block_k=32)
    assert attention.declines(q, k, v, given, backward=True) is None
    out, lse = attention_calls.forward(q, k, v, given, lists)
    found = attention_calls.backward(attention_calls.AttentionCall.of(q, k, v, given, lists), grad, out, lse)

    wide = {
        n: t.double()
        for n, t in (("q", q), ("k", k), ("v", v), ("bias", given.bias), ("sink", given.sink))
        if t is not None
    }
    if "bias" in wide:
        wide["bias"] = wide["bias"].expand(B, heads[0], SQ, SK).contiguous()
    leaves = {n: t.requires_grad_() for n, t in wide.items()}
    extra = {n: getattr(given, n) for n in terms if n not in wide}
    expected = reference(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        Terms(scale=d**-0.5, bias=leaves.get("bias"), sink=leaves.get("sink"), **extra),
    )
    expected.backward(grad.double())
    close("out", out, expected.detach(), dtype)
    for name, got in zip(("q", "k", "v", "bias", "sink"), found, strict=True):
        if name in leaves:
            close(name, got, leaves[name].grad, dtype)


def close(name: str, got: Tensor, wanted: Tensor | None, dtype: torch.dtype) -> None:
    """Relative error in the Euclidean norm; of a broadcast term's gradient, to the sum of what
    cancels in it.
    """
    assert wanted is not None
    size = wanted.abs().sum_to_size(got.shape).norm()
    error = (got.double() - wanted.sum_to_size(got.shape)).norm() / size
    assert error <= LIMITS[dtype], f"{name}: {error.item():.2e}"  # NaN fails too


@pytest.mark.parametrize("case", CASES)
def test_terms_in_fp32(case: str) -> None:
    check(CASES[case], torch.float32, tiles=False)


@pytest.mark.parametrize("case", ["full", "window and sink", "documents", "mask and its bias"])
def test_given_lists(case: str) -> None:
    check(CASES[case], torch.float32, tiles=True)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("causal", torch.bfloat16),
        ("two-sided and softcap", torch.float16),
        ("mask and its bias", torch.bfloat16),
    ],
)
def test_narrow_dtypes(case: str, dtype: torch.dtype) -> None:
    check(CASES[case], dtype, tiles=False)


#: As the interpreter's other tile, copied whole.
IN_TILES = LaunchConfig(block_m=32, block_n=32, warps=4, stages=1, precision="ieee", tma=True)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Tiles of the tensors that were described, in their order."""
    found: list[list[int]] = []
    made = attention_launch._descriptor
    monkeypatch.setattr(
        attention_launch, "_descriptor", lambda t, tile: (found.append(tile), made(t, tile))[1]
    )
    return found


@pytest.mark.parametrize(
    ("case", "tiles"),
    [
        ("full", False),
        ("causal", False),
        ("window and sink", True),
        ("documents", True),
        ("mask and its bias", False),
    ],
)
def test_tiles_that_are_copied_whole(case: str, tiles: bool, described: list[list[int]]) -> None:
    with using(forward=IN_TILES, dq=IN_TILES, dkdv=IN_TILES):
        check(CASES[case], torch.float32, tiles=tiles)
        assert described == 6 * [[1, 1, 32, 32]]


@pytest.mark.parametrize("tiles", [False, True])
def test_copied_whole_beyond_the_width_are_zeros(tiles: bool, described: list[list[int]]) -> None:
    with using(forward=IN_TILES, dq=IN_TILES, dkdv=IN_TILES):
        check(CASES["causal"], torch.float32, tiles=tiles, d=24, dv=40)
        assert described == 3 * [[1, 1, 32, 32], [1, 1, 32, 64]]


def test_what_cannot_be_copied_whole_is_copied_by_rows(described: list[list[int]]) -> None:
    """Rows of 12 bytes more or less than a multiple of 16, or an address that is none."""
    q, k, v = make((B, H, SQ, D)), make((B, K, SK, D), seed=2), make((B, K, SK, D), seed=3)
    terms, wanted = Terms(scale=D**-0.5, hi=0), reference(q, k, v, Terms(scale=D**-0.5, hi=0))
    apart = make((B, K, SK, D + 3), seed=2)
    apart[..., :D] = k
    off = torch.zeros(k.numel() + 1)[1:].view(k.shape).copy_(k)
    with using(forward=IN_TILES, dq=IN_TILES, dkdv=IN_TILES):
        for keys in (apart[..., :D], off):
            close("out", attention_calls.forward(q, keys, v, terms)[0], wanted, torch.float32)
            assert not described
        close("out", attention_calls.forward(q, k, v, terms)[0], wanted, torch.float32)
        assert len(described) == 2


def test_widths_that_are_no_power_of_two_and_differ() -> None:
    check(CASES["causal"], torch.float32, tiles=False, d=24, dv=40, heads=(3, 1))


def test_offsets_beyond_2_to_the_31_elements() -> None:
    """The second batch entry of q lies 2³¹ elements behind the first; nobody touches the memory between."""
    far = 2**31 + 64
    storage = torch.empty_strided((2, 1, SQ, D), (far, SQ * D, D, 1), dtype=torch.float16)
    q = storage.copy_(make((2, 1, SQ, D), torch.float16))
    k = v = make((2, 1, SK, D), torch.float16, 2)
    terms = Terms(scale=D**-0.5)
    out, lse = attention_calls.forward(q, k, v, terms)
    near, near_lse = attention_calls.forward(q.contiguous(), k, v, terms)
    assert torch.equal(out, near) and torch.equal(lse, near_lse)
