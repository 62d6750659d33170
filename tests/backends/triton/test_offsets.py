"""No offset leaves its 32 or 64 bits in the largest launches: intervals through every kernel, at shapes that
no GPU has memory for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from offsets import Analysis, ir_of
from triton.runtime.jit import JITFunction

from effcompile.backends.triton import (
    attention_calls,
    block_sparse,
    cached_attention,
    compress,
    group_linear,
    group_quant,
    loss_head,
    rows,
    states8,
)
from effcompile.backends.triton.configs import TABLE, LaunchConfig, interpreting, using
from effcompile.backends.triton.layout import WIDEST
from effcompile.ops.attention_terms import Terms
from effcompile.ops.group_codes import _LANES, _SCALES, GROUP
from effcompile.ops.loss_head import MEAN

pytestmark = pytest.mark.skipif(interpreting(), reason="kernels are launched by the interpreter here")
BF16, I32, FP32 = torch.bfloat16, torch.int32, torch.float32
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def made(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def apart(*shape: int) -> Tensor:
    """Rows as far apart as they may be, of heads and batches that are as far again."""
    _, h, s, _ = shape
    return torch.empty_strided(shape, (h * s * WIDEST, s * WIDEST, WIDEST, 1), dtype=BF16, device="meta")


def attend(tensors: Callable[..., Tensor], *, lists: bool) -> None:
    """Forward and backward with every term, 131,072 tokens of 16 × 64 heads."""
    b, h, s, d = 16, 64, 1 << 17, 128
    q, k, v, grad = (
        tensors(b, h, s, d),
        tensors(b, h // 4, s, d),
        tensors(b, h // 4, s, d),
        tensors(b, h, s, d),
    )
    form: dict[str, Any] = {"scale": 0.1, "lo": 1 - s, "hi": 0, "chunk": 4096, "softcap": 30.0}
    ids = made(b, s, dtype=torch.int64)
    terms = Terms(
        **form, bias=made(b, h, s, s), mask=made(b, 1, s, s, dtype=torch.bool),
        valid=made(b, s, dtype=torch.bool), q_ids=ids, k_ids=ids,
        **({"block_q": 64, "block_k": 64} if lists else {}),
    )  # fmt: skip
    tiles = [made(b, h, s // 64, *more, dtype=I32) for more in ((), (s // 64,)) * 4] if lists else []
    tile = LaunchConfig(block_m=64, block_n=64, warps=4, stages=2)
    with using(forward=tile, dq=tile, dkdv=tile):
        out, lse = attention_calls.forward(q, k, v, terms, tiles)
        attention_calls.backward(attention_calls.AttentionCall.of(q, k, v, terms, tiles), grad, out, lse)


def head() -> None:
    """16 million tokens, a million words."""
    x, weight, target, form = (
        made(1 << 24, 8192),
        made(1 << 20, 8192),
        made(1 << 24, dtype=torch.int64),
        (MEAN, -100, 1.0, 30.0, True, 2),
    )
    _, lse = loss_head.forward(x, weight, made(1 << 20), target, *form)
    loss_head.backward(made(dtype=FP32), x, weight, made(1 << 20), target, lse, *form, [True, True, False])
    loss_head.gradients(x, weight, None, target, *form, [True, True, False])


def blocks() -> None:
    """A weight of 65,536 × 65,536 in blocks of 32, half of them kept."""
    side, kept = 1 << 11, 1 << 21
    x, values, ptr, index = (
        made(1 << 22, 1 << 16),
        made(kept, 32, 32),
        made(side + 1, dtype=I32),
        made(kept, dtype=I32),
    )
    kernels = block_sparse.BlockSparseKernels()
    kernels.linear(x, values, ptr, index, made(1 << 16))
    kernels.grad_input(x, values, ptr, index, made(kept, dtype=I32))
    kernels.grad_values(x, x, ptr, index)


def codes() -> None:
    """4 million rows by a weight of 262,144 × 131,072."""
    m, n, k = 1 << 22, 1 << 18, 1 << 17
    for weight in (made(n, k // 2, dtype=torch.uint8), made(n, k, dtype=torch.int8)):
        group_quant.linear(
            made(m, k), weight, made(n, k // 128, dtype=FP32), None, made(n), made(m, n), "gelu", BF16
        )
    group_quant.dequantize(*group_quant.quantize(made(m, k), 128, torch.int8), BF16)


def plain() -> None:
    """Rows and elements by the tens of billions."""
    x = made(1 << 22, 1 << 14)
    rows.norm(x, x, made(1 << 14), 1e-5)
    rows.norm_backward(x, x, x, made(1 << 14), made(1 << 22, 1, dtype=FP32))
    both = made(1 << 20, 1 << 18)
    rows.swiglu(both[:, : 1 << 17], both[:, 1 << 17 :])
    rows.swiglu_backward(both, both, both)
    rows.rotary(
        made(64, 1 << 20, 64, 256).transpose(1, 2), made(64, 1 << 20, 256), made(64, 1 << 20, 256), False
    )
    compress.decompress(compress.compress(made(1 << 36), [1]), [1 << 36], [1], BF16)
    p, state, table, scale = (
        made(1 << 36),
        made(1 << 36, dtype=torch.uint8),
        made(256, dtype=FP32),
        made(1 << 28, dtype=FP32),
    )
    states8.adam(p, p, state, scale, state, scale, table, table, 1e-3, 0.9, 0.99, 0.1, 1e-8, 3, True)
    states8.lion(p, p, state, scale, table, 1e-3, 0.9, 0.99, 0.1)


def generated() -> None:
    """A token of 64 rows over caches of 131,072 tokens in each form, and linears of as many codes as fit."""
    query = apart(64, 64, 1, 128)
    for dtype, width in ((BF16, 128), (torch.int8, 132)):
        cache = made(64, 16, 1 << 17, width, dtype=dtype)
        mask = made(64, 1, 1, 1 << 17, dtype=torch.bool)
        assert cached_attention.attend(query, cache, cache, mask, 0.1) is not None
        assert cached_attention.write(cache, made(64, 16, 1, 128), made(1, dtype=torch.int64))
    one = made(1, 16, 1 << 17, 128)
    assert cached_attention.attend(made(1, 64, 1, 128), one, one, None, 0.1) is not None
    for bits in (4, 8):
        panels = made((1 << 18) // _LANES, (1 << 15) // GROUP, _SCALES + 64 * bits, dtype=torch.uint8)
        group_linear.linear(made(16, 1 << 15), panels, 1 << 18, None, "none")


CASES: dict[str, Callable[[], None]] = {
    "attention": lambda: attend(made, lists=False),
    "attention, rows apart": lambda: attend(apart, lists=True), "loss head": head, "block-sparse": blocks,
    "codes": codes, "a step of generation": generated, "the others": plain,
}  # fmt: skip


def read_by(arguments: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Where what kernels read lies: lists name tiles, patterns blocks."""
    found: dict[str, tuple[int, int]] = {}
    for kind in ("partial", "full"):
        if isinstance(index := arguments.get(f"{kind}_index"), Tensor):
            found |= {f"{kind}_index": (0, index.shape[-1] - 1), f"{kind}_count": (0, index.shape[-1])}
    if isinstance(arguments.get("place"), Tensor):
        found["place"] = (0, (1 << 17) - 1)
    if "values" in arguments or "found" in arguments:
        kept = arguments.get("values", arguments.get("found")).shape[0]
        side = 1 << 11
        found |= dict.fromkeys(("index", "col", "block_row"), (0, side - 1)) | dict.fromkeys(
            ("ptr", "perm", "used"), (0, kept)
        )
    return found


def launched(
    run: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Any, dict[str, Any], dict[str, Any], Sequence[int]]]:
    found: list[tuple[Any, dict[str, Any], dict[str, Any], Sequence[int]]] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        options = {name: given.pop(name) for name in OPTIONS if name in given}
        found.append((self, dict(zip(self.arg_names, args, strict=False)) | given, options, grid))

    monkeypatch.setattr(JITFunction, "run", record)
    with monkeypatch.context() as patched:
        patched.setattr(JITFunction, "run", record)
        run()
    return found


#: Kernels that were looked at.
SEEN: set[str] = set()


@pytest.mark.parametrize("case", CASES)
def test_no_offset_leaves_its_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = launched(CASES[case], monkeypatch)
    assert launches
    for kernel, arguments, options, grid in launches:
        assert all(side < 2**31 for side in grid[:1]) and all(side < 2**16 for side in grid[1:]), (
            kernel.__name__,
            grid,
        )
        looked = Analysis(*ir_of(kernel, arguments, options), grid, read_by(arguments))
        assert not looked.found, (kernel.__name__, list(looked.found.values()))
        assert looked.checked > 1, kernel.__name__
        SEEN.add(kernel.__name__)


def test_every_kernel_was_looked_at() -> None:
    if len(SEEN) < 2:
        pytest.skip("the cases were not run in this process")
    files = (TABLE.parent / "kernels").glob("*.py")
    kernels = {
        name
        for file in files
        for name in re.findall(
            r"@triton.jit(?:\([^\n]*\))?\ndef ([a-z]\w+)\(\s*\w+,", file.read_text(encoding="utf-8")
        )
    }
    launched = {
        name
        for file in TABLE.parent.glob("*.py")
        for name in re.findall(r"\b\w+(?=\[[^\n]*\]\()|(?<=\": \()attention_\w+", file.read_text("utf-8"))
    }
    assert kernels & launched == SEEN


@triton.jit
def _careless(x, y, rows, width, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    d = tl.arange(0, BLOCK)
    row = tl.program_id(0) * 4 + tl.arange(0, 4)[:, None]
    if WIDE:
        row = row.to(tl.int64)
    for start in range(0, width, BLOCK):
        at = row * width + start + d
        tl.store(y + at, tl.load(x + at, mask=start + d < width), mask=start + d < width)


@pytest.mark.parametrize(
    ("rows_", "width", "wide", "right"),
    [
        (1 << 17, 1 << 14, False, True),
        ((1 << 17) + 4, 1 << 14, False, False),
        (1 << 30, 8, False, False),
        (1 << 30, 8, True, True),
    ],
)
def test_a_careless_kernel_is_found(
    rows_: int, width: int, wide: bool, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last row of 2³¹ elements ends below 2³¹; of one program more it does not."""
    x = made(rows_, width)
    (launch,) = launched(lambda: _careless[(rows_ // 4,)](x, x, rows_, width, wide, 8), monkeypatch)
    kernel, arguments, options, grid = launch
    looked = Analysis(*ir_of(kernel, arguments, options), grid, {})
    assert bool(looked.found) is not right, looked.found
    assert right or any("tensor<" in line for line in looked.found)
