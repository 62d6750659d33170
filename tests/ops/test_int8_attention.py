"""Attention by products of bytes: the kernel against its definition, and that against SDPA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional as F  # noqa: N812

from effcompile.core import torch_compat_memory
from effcompile.ops import int8_attention as module
from effcompile.ops.int8_attention import (
    HeldBytes,
    by_torch,
    fallback_reason,
    int8_attention,
    workspace_bytes,
)
from effcompile.ops.tape import Tape, TapeStep

needs_kernel = pytest.mark.skipif(fallback_reason() is not None, reason=str(fallback_reason()))
KINDS = ("none", "bools", "numbers", "causal", "same", "left")


def drawn(kind: str, seed: int, rows: int, keys: int, width: int, wide: int) -> tuple[Tensor, ...]:
    """q, k, v and a mask of 4 heads in groups of 2; the numbers are 0 where there is none."""
    torch.manual_seed(seed)
    q, k = torch.randn(2, 4, rows, width), torch.randn(2, 2, keys, width)
    masks = {
        "bools": torch.rand(2, 1, rows, keys) < 0.6,
        "numbers": torch.randn(1, 4, rows, keys),
        "same": (torch.rand(2, 1, rows, 1) < 0.6).expand(2, 1, rows, keys),
        "left": (torch.arange(keys) >= keys // 2).expand(2, 1, rows, keys),
    }
    return q, k, torch.randn(2, 2, keys, wide), masks.get(kind)  # type: ignore[return-value]


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_is_its_definition_to_the_code(kind: str) -> None:
    """But for weights half way between two codes, which sums in another order move: of one in thousands."""
    differing = 0
    for at in range(1, 40):
        q, k, v, mask = drawn(kind, at, at, 3 * at % 71 + 1, at + 1, 41 - at)
        found, right = (run(q, k, v, mask, kind == "causal", 0.3) for run in (int8_attention, by_torch))
        torch.testing.assert_close(found, right, rtol=0, atol=2e-2)  # some weights by one code each
        differing += int((found - right).abs().gt(1e-5).any(-1).sum())
        assert found.transpose(1, 2).is_contiguous()
    assert differing < 8 * 20 * 39 / 100


@pytest.mark.parametrize("kind", KINDS)
def test_is_near_to_torchs(kind: str) -> None:
    q, k, v, mask = drawn(kind, 0, 33, 70, 32, 24)
    causal = kind == "causal"
    right = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
    for found in (int8_attention(q, k, v, mask, causal), by_torch(q, k, v, mask, causal, None)):
        assert float((found - right).norm() / right.norm()) < 2e-2


@needs_kernel
def test_keys_of_all_batches_with_values_of_each() -> None:
    """And the other way round: what was laid for one batch's head is not taken for the next one's."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 9, 24), torch.randn(3, 1, 17, 24), torch.randn(3, 1, 17, 20)
    for keys, values in ((k[:1].expand(3, -1, -1, -1), v), (k, v[:1].expand(3, -1, -1, -1))):
        found, right = int8_attention(q, keys, values), by_torch(q, keys, values, None, False, None)
        torch.testing.assert_close(found, right, rtol=0, atol=2e-2)


def test_all_threads_give_the_same() -> None:
    q, k, v, _ = drawn("none", 0, 400, 90, 64, 64)
    wanted, before = int8_attention(q, k, v), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(int8_attention(q, k, v), wanted)
    finally:
        torch.set_num_threads(before)


def test_what_is_seen_alike_is_the_mean() -> None:
    q, k, v, _ = drawn("none", 0, 5, 9, 8, 16)
    for found in (int8_attention(0 * q, k, v), int8_attention(q, 0 * k, v)):
        torch.testing.assert_close(
            found, v.mean(2).repeat_interleave(2, 1)[:, :, None].expand(found.shape), rtol=0, atol=2e-2
        )


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    q, k, v, mask = drawn("bools", 0, 7, 40, 16, 16)
    mask[:, :, 3] = False
    hidden = torch.zeros(7, 40).masked_fill(~mask[0, 0], -torch.inf)
    for given in (mask, hidden):
        found = int8_attention(q, k, v, given)
        assert not found[:, :, 3].any()
        assert found[:, :, 2].all()
        assert torch.allclose(found, by_torch(q, k, v, given, False, None), rtol=0, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_least_number_hides_is_seen_alike(dtype: torch.dtype) -> None:
    q, k, v, _ = drawn("none", 0, 7, 40, 16, 16)
    least = torch.zeros(7, 40).masked_fill(torch.rand(7, 40) < 0.5, torch.finfo(dtype).min)
    least[3] = torch.finfo(dtype).min
    right = F.scaled_dot_product_attention(q, k, v, least, enable_gqa=True)
    for found in (int8_attention(q, k, v, least), by_torch(q, k, v, least, False, None)):
        assert float((found - right).norm() / right.norm()) < 2e-2
        torch.testing.assert_close(found[:, :, 3], right[:, :, 3], rtol=0, atol=2e-2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["none", "bools", "numbers"])
def test_what_is_no_number_gives_none(value: float, kind: str) -> None:
    for at in range(3):
        q, k, v, mask = drawn(kind, 1, 9, 20, 16, 16)
        (q, k, v)[at][0, 1, 5, 2] = value
        found, right = int8_attention(q, k, v, mask), by_torch(q, k, v, mask, False, None)
        torch.testing.assert_close(found, right, rtol=0, atol=2e-2, equal_nan=True)
        assert found[0].isnan().any() and not found[1].isnan().any()


def test_other_dtypes_and_layouts() -> None:
    q, k, v, _ = drawn("none", 0, 9, 20, 16, 16)
    wanted = int8_attention(q, k, v)
    found = int8_attention(q.double(), k.double(), v.double())
    assert found.dtype is torch.float64
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=2e-2)
    apart = [torch.empty(*each.shape[:3], 32)[..., ::2].copy_(each) for each in (q, k, v)]
    torch.testing.assert_close(int8_attention(*apart), wanted, rtol=0, atol=2e-2)
    assert int8_attention(q[:, :, :0], k, v).shape == (2, 4, 0, 16)


def test_operator() -> None:
    q, k, v, _ = drawn("none", 0, 8, 8, 16, 16)
    opcheck(int8_attention.default, (q, k, v), test_utils=("test_schema", "test_faketensor"))


@needs_kernel
@pytest.mark.parametrize("keys", [20, 900])
def test_workspace_is_what_the_allocator_hands_out(keys: int) -> None:
    q, k, v, _ = drawn("none", 0, 65, keys, 40, 24)
    with torch_compat_memory.watched_memory("cpu") as peak:
        made = int8_attention(q, k, v)
    assert peak() - made.nbytes == workspace_bytes("effcompile::int8_attention", (q, k, v))


def test_workspace_by_torch_is_no_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernels", lambda: "none here")
    q, k, v, _ = drawn("none", 0, 65, 300, 40, 24)
    slowly = pytest.warns(RuntimeWarning, match="by torch, slowly: none here")
    with slowly, torch_compat_memory.watched_memory("cpu") as peak:
        made = int8_attention(q, k, v)
    beside = workspace_bytes("effcompile::int8_attention", (q, k, v))
    assert beside is not None and peak() - made.nbytes <= beside


@needs_kernel
def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda self, q, k, v, *_: q[..., :1] + v[:1, :1, :1]  # noqa: E731
    monkeypatch.setattr(module.AttentionBytes, "attention", wrong)
    assert "wrong attention" in str(module.kernels.__wrapped__())
    monkeypatch.setattr(module, "integer_isas", lambda: ("avx2",))
    assert module.kernels.__wrapped__() == "this processor has no AVX512-VNNI"


def test_a_step_of_a_tape() -> None:
    held, x = HeldBytes(4, 2, 16, 8, False, 0.3), torch.randn(2, 9, 120)
    parts = x[..., :64], x[..., 64:96], x[..., 100:116]
    heads = [
        part.unflatten(2, (-1, width)).transpose(1, 2) for part, width in zip(parts, (16, 16, 8), strict=True)
    ]
    wanted = int8_attention(*heads, None, False, 0.3).transpose(1, 2).flatten(2)
    for _ in range(2):
        assert torch.equal(Tape([TapeStep(held, (0, 1, 2))], 3, [3])(*parts)[0], wanted)
