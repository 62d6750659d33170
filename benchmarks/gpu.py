"""The Triton kernels on a GPU, in one call: ceilings, correctness, then ratios against what else there is. One JSON line per figure.

    python benchmarks/gpu.py [--only ceilings correctness step gemm loss_head states block_sparse attention] [--seconds 540] [--out F.jsonl]
    python benchmarks/gpu.py --dry        # tiny shapes in triton's interpreter, no GPU: does the script run

Needs torch ≥ 2.11, triton ≥ 3.6 and numpy; `--dry` ml_dtypes, too. What else a section can use and does not find is named in the first
line, and in a line of that section, which then times the other contestants: z3 and msgspec plan (`step`), torchao is a peer (`gemm`,
`states`). Figures are written as they come, to --out or $OUT/gpu.jsonl, so that a run that is cut short loses none. benchmarks/README.md
has the commands for a machine that reaches no registry and takes ten minutes a command. Times
are medians of CUDA events, every contestant of a case in one process, the whole round twice; `spread` is how far the rounds lie
apart. `predicted…` is the ratio that the visited tiles allow: it is printed beside what was measured. What fails is a line with its
error, and the rest goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from _gpu_common import (
    DEVICE,
    DRY,
    DTYPE,
    END,
    OUT,
    Timed,
    close,
    compare,
    late,
    make,
    missing,
    say,
    seconds,
)
from _gpu_products import products, states
from _gpu_step import step
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from effcompile.backends import triton as ours
from effcompile.ops.attention import attention
from effcompile.ops.attention_terms import Terms, visible_pairs
from effcompile.ops.block_sparse import block_sparse_linear
from effcompile.ops.loss_head import MEAN, loss_head_backward, loss_head_forward, loss_head_gradients
from effcompile.ops.visibility import Visibility
from effcompile.sparse.pattern import BlockPattern

# ------------------------------------------------------------------ sections


def ceilings() -> None:
    """What this machine can do at all: every other figure is to be divided by these."""
    n, size = (64, 1 << 12) if DRY else (8192, 1 << 31)
    a, b = make(n, n), make(n, n)
    took = seconds(lambda: a @ b)
    say(case="ceiling: matmul", n=n, tflops=2 * n**3 / took / 1e12, dtype=str(DTYPE))
    data = torch.empty(size, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(data)
    took = seconds(lambda: target.copy_(data))
    say(case="ceiling: copy", gbytes_per_s=4 * size / took / 1e9)


#: name → (terms of the operator, sliding or not, what the tiles are of).
def forms(s: int) -> dict[str, dict[str, Any]]:
    window = max(4, min(1024, s // 2))
    ids = torch.arange(s, device=DEVICE)[None] * 8 // s
    return {
        "causal": {"hi": 0},
        "full": {},
        "window": {"lo": 1 - window, "hi": 0},
        "documents": {"hi": 0, "q_ids": ids, "k_ids": ids},
        "softcap": {"hi": 0, "softcap": 30.0},
        "bias": {"hi": 0, "bias": make(1, 1, s, s)},
    }


def correctness() -> None:
    """Every form at a real length, on the first head, against fp64 math on the whole score matrix."""
    s, d = (64, 16) if DRY else (2048, 128)
    for name, form in forms(s).items():
        for dv in (d, d // 2):
            q, k, v = make(1, 2, s, d, grad=True), make(1, 1, s, d, grad=True), make(1, 1, s, dv, grad=True)
            grad = make(1, 2, s, dv)
            out = call(q, k, v, d**-0.5, form)[0]
            out.backward(grad)
            wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
            expected = dense(wide[0], wide[1], wide[2], d**-0.5, form)
            close(f"{name} d{d} dv{dv} out", out.detach(), expected.detach(), 6e-3)
            expected.backward(grad.double())
            for letter, one, other in zip("qkv", (q, k, v), wide, strict=True):
                assert one.grad is not None and other.grad is not None
                close(f"{name} d{d} dv{dv} d{letter}", one.grad, other.grad, 6e-3)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, form: dict[str, Any]) -> Tensor:
    """The definition."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if form.get("softcap"):
        scores = form["softcap"] * torch.tanh(scores / form["softcap"])
    if form.get("bias") is not None:
        scores = scores + form["bias"].to(scores.dtype)
    seen = visibility(form).dense(q.shape[0], q.shape[2], k.shape[2]).to(q.device)
    return scores.masked_fill(~seen, float("-inf")).softmax(3) @ v.repeat_interleave(group, 1)


def visibility(form: dict[str, Any]) -> Visibility:
    return Visibility(**{name: value for name, value in form.items() if name in ("lo", "hi", "q_ids", "k_ids")})


def call(q: Tensor, k: Tensor, v: Tensor, scale: float, form: dict[str, Any], lists: Any = None, block: int = 0) -> tuple[Tensor, Tensor]:
    tensors = [form.get(name) for name in ("bias", "sink", "mask", "q_ids", "k_ids", "valid")]
    numbers = {name: form[name] for name in ("lo", "hi", "softcap") if name in form}
    return attention(q, k, v, *tensors, lists, scale=scale, block_q=block, block_k=block, **numbers)


def attention_cases() -> None:
    """Forward, and forward with backward: 16k tokens, 2048 wide, against each SDPA backend and FlexAttention, both pinned."""
    lengths, tokens = ((64,), 64) if DRY else ((4096, 16384, 1024), 16384)  # by what matters: the time may end
    for s in lengths:
        for d in (16,) if DRY else (64, 128):
            equal = (2, 2) if DRY else (2048 // d, 2048 // d)
            for name, form in forms(s).items():
                for heads in (equal, (equal[0], max(1, equal[1] // 8))) if name == "causal" else (equal,):
                    if not late():
                        one_case(name, form, tokens // s, heads, s, d)


def one_case(name: str, form: dict[str, Any], b: int, heads: tuple[int, int], s: int, d: int) -> None:
    """All contestants of one form and shape."""
    if form.get("bias") is not None and s > 4096:
        return
    q, k, v = make(b, heads[0], s, d, grad=True), make(b, heads[1], s, d, grad=True), make(b, heads[1], s, d, grad=True)
    grad, scale, block = make(b, heads[0], s, d), d**-0.5, 32 if DRY else 128
    tiles = visibility(form).tiles(block, block, q_len=s, k_len=s)
    lists = [t.to(DEVICE) for t in tiles.tensors()] if "q_ids" in form else None
    runs: dict[str, Callable[[], Tensor]] = {"ours": lambda: call(q, k, v, scale, form, lists, block if lists else 0)[0]}
    runs |= sdpa(q, k, v, name, scale) if name in ("causal", "full") else {}
    runs |= {"causal flash": sdpa(q, k, v, "causal", scale)["FLASH_ATTENTION"]} if name in ("window", "documents") and not DRY else {}
    if not DRY:
        runs["flex"] = flex(q, k, v, form, scale, s)
    flops = 4.0 * d * pairs(q, k, form)
    label = f"{name} d{d} s{s} h{heads[0]}:{heads[1]}"
    notes = {"tiles": tiles.density, "predicted_over_causal": 0.5 * (1 + block / s) / max(tiles.density, 1e-9)}
    compare(f"forward {label}", flops, {n: no_grad(run) for n, run in runs.items()}, **notes)
    compare(f"forward+backward {label}", 3.5 * flops, {n: with_backward(run, grad, (q, k, v)) for n, run in runs.items()}, **notes)


def pairs(q: Tensor, k: Tensor, form: dict[str, Any]) -> int:
    """Visible pairs of query and key, over batch and heads; documents are causal here."""
    if "q_ids" not in form:
        return visible_pairs(q, k, Terms(scale=1.0, lo=form.get("lo"), hi=form.get("hi")))
    sizes = form["q_ids"][0].bincount()
    return int((sizes * (sizes + 1) // 2).sum()) * q.shape[0] * q.shape[1]


def sdpa(q: Tensor, k: Tensor, v: Tensor, name: str, scale: float) -> dict[str, Callable[[], Tensor]]:
    """Each backend of torch's SDPA, pinned."""

    def run(backend: SDPBackend) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=name == "causal", scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    kinds = (SDPBackend.MATH,) if DRY else (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    return {kind.name: (lambda kind=kind: run(kind)) for kind in kinds}


_flex = torch.compile(flex_attention, dynamic=False)


def flex(q: Tensor, k: Tensor, v: Tensor, form: dict[str, Any], scale: float, s: int) -> Callable[[], Tensor]:
    """FlexAttention, compiled, with the same mask and score change."""
    lo, hi, ids, cap, bias = (form.get(name) for name in ("lo", "hi", "q_ids", "softcap", "bias"))

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = i >= 0
        found = found if hi is None else found & (j - i <= hi)
        found = found if lo is None else found & (j - i >= lo)
        return found if ids is None else found & (ids[0, i] == ids[0, j])

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = cap * torch.tanh(score / cap) if cap else score
        return score if bias is None else score + bias[0, 0, i, j]

    mask = None if hi is None and lo is None and ids is None else create_block_mask(seen, None, None, s, s, device=DEVICE)
    mod = change if cap or bias is not None else None
    return lambda: _flex(q, k, v, score_mod=mod, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def no_grad(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        with torch.no_grad():
            return run()

    return forward


def with_backward(run: Callable[[], Tensor], grad: Tensor, leaves: tuple[Tensor, ...]) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(run(), leaves, grad)


def loss_head() -> None:
    """Linear and cross entropy, forward and backward: time, and the peak of memory beyond inputs and gradients."""
    n, d, words = (40, 32, 100) if DRY else (8192, 2304, 256000)
    x, weight = make(n, d), make(words, d)
    weight.mul_(d**-0.5)
    target = torch.randint(words, (n,), device=DEVICE)
    form = (MEAN, -100, 1.0, 1.0, False, 2 if DRY else 16)

    def mine() -> Any:
        loss, lse = loss_head_forward(x, weight, None, target, *form)
        return loss, loss_head_backward(torch.ones_like(loss), x, weight, None, target, lse, *form, [True, True, False])

    def eager(a: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy((a @ w.T).float(), target)

    compiled = torch.compile(eager)
    leaves = (x.detach().requires_grad_(), weight.detach().requires_grad_())
    once = lambda: loss_head_gradients(x, weight, None, target, *form, [True, True, False])  # noqa: E731
    theirs: Timed = {"ours": mine, "ours in one pass": once, "eager": lambda: torch.autograd.grad(eager(*leaves), leaves)}
    if not DRY:
        theirs["torch.compile"] = lambda: torch.autograd.grad(compiled(*leaves), leaves)
    _, gradients = mine()
    wanted = torch.autograd.grad(eager(*leaves), leaves)
    for name, found in (("loss head", gradients), ("loss head in one pass", once()[1:])):
        close(f"{name} dx", found[0], wanted[0], 6e-3)
        close(f"{name} dW", found[1], wanted[1], 6e-3)
    del wanted, found, gradients
    compare(f"loss head N{n} D{d} V{words}", 6.0 * n * d * words, theirs)
    if not DRY:
        for name, run in theirs.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            result = run()
            say(case="loss head memory", name=name, mbytes=(torch.cuda.max_memory_allocated() - before) / 1e6)
            del result


def block_sparse() -> None:
    """y = x Wᵀ with half and nine of ten blocks left out, against the dense product."""
    for b in (32,) if DRY else (32, 64, 128):
        for sparsity in (0.5, 0.9):
            one_sparsity(b, sparsity, *((40, 128) if DRY else (16384, 8192)))


def one_sparsity(b: int, sparsity: float, rows: int, n: int) -> None:
    """rows × n times n × n."""
    pattern = BlockPattern.random(n, n, b, sparsity, torch.Generator().manual_seed(0))
    structure = [t.to(DEVICE) for t in (pattern.crow, pattern.col, pattern.ccol, pattern.row, pattern.perm)]
    values, x, weight = make(len(pattern.col), b, b), make(rows, n), make(n, n)
    runs: Timed = {"ours": lambda: block_sparse_linear(x, values, *structure), "dense": lambda: F.linear(x, weight)}
    compare(f"block-sparse {sparsity} b{b}", 2.0 * rows * values.numel(), runs, predicted=1 / (1 - sparsity))


SECTIONS: dict[str, Callable[[], None]] = {
    "ceilings": ceilings, "correctness": correctness, "step": step, "gemm": products, "loss_head": loss_head, "states": states,
    "block_sparse": block_sparse, "attention": attention_cases,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--seconds", type=float, default=540.0, help="start nothing further after this time")
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"], "gpu.jsonl") if "OUT" in os.environ else None)
    options = parser.parse_args()
    END[0] = time.monotonic() + options.seconds
    if options.out:
        OUT.append(options.out.open("a"))
    torch.manual_seed(0)
    lacking = missing("triton", "msgspec", "z3", "torchao", *["ml_dtypes"] * DRY)
    reason = "--dry needs ml_dtypes: pip install ml_dtypes" if "ml_dtypes" in lacking else ours.register(DEVICE)
    name = "interpreter" if DRY else torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    say(device=name, torch=torch.__version__, triton=version("triton"), missing=lacking, declined=reason)
    if reason is not None:
        sys.exit(reason)
    failed = False
    for section in options.only:
        try:
            SECTIONS[section]()
        except Exception:  # one section's failure must not cost the others their time on the machine
            failed = True
            say(section=section, error=traceback.format_exc(limit=-3))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
