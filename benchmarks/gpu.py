"""The Triton kernels on a GPU, in one call: ceilings, correctness, then ratios against what else there is.

One JSON line per figure.

    python benchmarks/gpu.py [--only correctness attention …] [--seconds 540] [--out F.jsonl]
    python benchmarks/gpu.py --dry        # tiny shapes in triton's interpreter, no GPU: does the script run

The sections stand in the order of what matters, and --seconds is kept: what comes late is left out, and says
so. Before the first of them --processes others compile the cases' kernels (ours, FlexAttention's), each a
share, so that waiting for compilers is not what the time goes to. Needs torch ≥ 2.11, triton ≥ 3.6 and numpy;
`--dry` ml_dtypes, too. What else a section can use and does not find is named in the first line, and in a
line of that section, which then times the other contestants: z3 and msgspec plan (`step`), torchao is a peer
(`gemm`, `states`). Figures are written as they come, to --out or $OUT/gpu.jsonl, so that a run that is cut
short loses none. benchmarks/README.md has the commands for a machine that reaches no registry and takes ten
minutes a command. Times are medians of CUDA events, every contestant of a case in one process, the whole
round twice; `spread` is how far the rounds lie apart. `predicted…` is the ratio that the visited tiles allow:
it is printed beside what was measured. What fails is a line with its error, and the rest goes on; after a
fault of the GPU in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from _gpu_blocks import block_sparse
from _gpu_common import (
    DEVICE,
    DRY,
    DTYPE,
    END,
    OUT,
    SHARE,
    Timed,
    attempt,
    broken,
    close,
    compare,
    make,
    mine,
    missing,
    say,
    seconds,
)
from _gpu_memory import copies, memory, reserved
from _gpu_products import products, states
from _gpu_rows import rows
from _gpu_step import step
from _gpu_tiles import tiles
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from effcompile.backends import triton as ours
from effcompile.core.building import building
from effcompile.ops.attention import attention
from effcompile.ops.attention_terms import Terms, visible_pairs
from effcompile.ops.loss_head import MEAN, loss_head_backward, loss_head_forward, loss_head_gradients
from effcompile.ops.visibility import Visibility

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


def candidates() -> None:
    """What the tuner will time before the first call of a head size: compiled beside, found in the cache
    then.
    """
    from effcompile.backends.triton import attention_calls, attention_tiles
    from effcompile.backends.triton.configs import KERNELS

    small = {"length": 64, "heads": (2, 1)} if DRY else {}
    for d in (16,) if DRY else (128, 64):
        for kernel in KERNELS:
            for option in attention_tiles.options(kernel, torch.device(DEVICE), DTYPE, d, d):
                if mine():
                    with attempt(f"{kernel} {option}"):
                        attention_calls.trial(kernel, option, torch.device(DEVICE), DTYPE, d, **small)()


FORMS = ("causal", "window", "documents", "softcap", "full", "bias")


def form_of(name: str, s: int) -> dict[str, Any]:
    """The operator's terms."""
    if name == "window":
        return {"lo": 1 - max(4, min(1024, s // 2)), "hi": 0}
    if name == "documents":
        ids = torch.arange(s, device=DEVICE)[None] * 8 // s
        return {"hi": 0, "q_ids": ids, "k_ids": ids}
    if name == "bias":
        return {"hi": 0, "bias": make(1, 1, s, s)}
    return {"causal": {"hi": 0}, "softcap": {"hi": 0, "softcap": 30.0}, "full": {}}[name]


def correctness() -> None:
    """Every form at a real length against fp64 math on the whole score matrix."""
    s = 64 if DRY else 2048
    for d, dv in ((16, 16), (16, 8)) if DRY else ((128, 128), (64, 64), (128, 64)):
        for name in FORMS if d == dv else ("causal", "softcap"):
            if mine():
                with attempt(f"correct: {name} d{d} dv{dv}"):
                    one_form(f"{name} d{d} dv{dv}", form_of(name, s), s, d, dv)


def one_form(case: str, form: dict[str, Any], s: int, d: int, dv: int) -> None:
    """Output and gradients (of a bias, too) of two heads that share one key head."""
    q, k, v = make(1, 2, s, d, grad=True), make(1, 1, s, d, grad=True), make(1, 1, s, dv, grad=True)
    grad, leaves = make(1, 2, s, dv), {"q": q, "k": k, "v": v}
    if "bias" in form:
        leaves["bias"] = form["bias"].requires_grad_()
    out = call(q, k, v, d**-0.5, form)[0]
    out.backward(grad)
    wide = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    near = form | ({"bias": wide["bias"]} if "bias" in wide else {})
    expected = dense(wide["q"], wide["k"], wide["v"], d**-0.5, near)
    close(f"{case} out", out.detach(), expected.detach(), 6e-3)
    expected.backward(grad.double())
    for name, one in leaves.items():
        assert one.grad is not None
        close(f"{case} d{name}", one.grad, wide[name].grad, 6e-3)


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
    return Visibility(
        **{name: value for name, value in form.items() if name in ("lo", "hi", "q_ids", "k_ids")}
    )


def call(
    q: Tensor, k: Tensor, v: Tensor, scale: float, form: dict[str, Any], lists: Any = None, block: int = 0
) -> tuple[Tensor, Tensor]:
    tensors = [form.get(name) for name in ("bias", "sink", "mask", "q_ids", "k_ids", "valid")]
    numbers = {name: form[name] for name in ("lo", "hi", "softcap") if name in form}
    return attention(q, k, v, *tensors, lists, scale=scale, block_q=block, block_k=block, **numbers)


def attention_cases() -> None:
    """Forward, and forward with backward: 16k tokens, 2048 wide, against each SDPA backend and FlexAttention,
    both pinned.
    """
    s = 64 if DRY else 16384
    for name in ("causal", "window", "documents", "softcap", "full"):
        for d in (16,) if DRY else (128, 64):
            one_case(name, 1, s, d)
    one_case("causal", 1, s, 16 if DRY else 128, group=2 if DRY else 8)


def lengths() -> None:
    """The same for shorter sequences, as many tokens."""
    for s in (64,) if DRY else (4096, 1024):
        for d in (16,) if DRY else (128, 64):
            for name in ("causal", "bias", "window", "documents"):
                one_case(name, 1 if DRY else 16384 // s, s, d)


def one_case(name: str, b: int, s: int, d: int, *, group: int = 1) -> None:
    """All contestants of one form and shape, if there is time."""
    if not mine():
        return
    heads = 2 if DRY else 2048 // d
    label = f"{name} d{d} s{s} h{heads}:{heads // group}"
    with attempt(label):
        form = form_of(name, s)
        q, k, v = (
            make(b, heads, s, d, grad=True),
            make(b, heads // group, s, d, grad=True),
            make(b, heads // group, s, d, grad=True),
        )
        grad, scale, block = make(b, heads, s, d), d**-0.5, 32 if DRY else 128
        tiles = visibility(form).tiles(block, block, q_len=s, k_len=s)
        lists = [t.to(DEVICE) for t in tiles.tensors()] if "q_ids" in form else None
        runs: dict[str, Callable[[], Tensor]] = {
            "ours": lambda: call(q, k, v, scale, form, lists, block if lists else 0)[0]
        }
        runs |= sdpa(q, k, v, name, scale) if name in ("causal", "full") else {}
        runs |= (
            {"causal flash": next(iter(sdpa(q, k, v, "causal", scale).values()))}
            if name in ("window", "documents")
            else {}
        )
        with attempt(label, name="flex"):
            runs["flex"] = flex(q, k, v, form, scale, s)
        flops = 4.0 * d * pairs(q, k, form)
        notes = {
            "tiles": tiles.density,
            "predicted_over_causal": 0.5 * (1 + block / s) / max(tiles.density, 1e-9),
        }
        compare(f"forward {label}", flops, {n: no_grad(run) for n, run in runs.items()}, **notes)
        compare(
            f"forward+backward {label}",
            3.5 * flops,
            {n: with_backward(run, grad, (q, k, v)) for n, run in runs.items()},
            **notes,
        )
        agree(label, runs, grad, (q, k, v))


def agree(
    label: str, runs: dict[str, Callable[[], Tensor]], grad: Tensor, leaves: tuple[Tensor, ...]
) -> None:
    """Say how far ours and a peer that computes the same lie apart; what was timed is what is compared."""
    peer = next((name for name in ("flex", "FLASH_ATTENTION", "MATH") if name in runs), None)
    if peer is None:
        return
    with attempt(f"correct: {label} against {peer}"):
        found = [
            (out.detach(), *torch.autograd.grad(out, leaves, grad)) for out in (runs["ours"](), runs[peer]())
        ]
        for what, one, other in zip(("out", "dq", "dk", "dv"), *found, strict=True):
            close(f"{label} {what} against {peer}", one, other, 1e-2)


def pairs(q: Tensor, k: Tensor, form: dict[str, Any]) -> int:
    """Visible pairs of query and key, over batch and heads; documents are causal here."""
    if "q_ids" not in form:
        return visible_pairs(q, k, Terms(scale=1.0, lo=form.get("lo"), hi=form.get("hi")))
    sizes = form["q_ids"][0].bincount()
    return int((sizes * (sizes + 1) // 2).sum()) * q.shape[0] * q.shape[1]


#: The backends of torch's SDPA that ours is timed beside.
PINNED = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def sdpa(q: Tensor, k: Tensor, v: Tensor, name: str, scale: float) -> dict[str, Callable[[], Tensor]]:
    """Each backend of torch's SDPA, pinned."""

    def run(backend: SDPBackend) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=name == "causal", scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )

    kinds = (SDPBackend.MATH,) if DRY else PINNED
    return {kind.name: (lambda kind=kind: run(kind)) for kind in kinds}


def flex(q: Tensor, k: Tensor, v: Tensor, form: dict[str, Any], scale: float, s: int) -> Callable[[], Tensor]:
    """FlexAttention, compiled, with the same mask and score change.

    Each case is compiled afresh: after eight variants of one function dynamo runs it unfused. `fullgraph`
    makes that an error.
    """
    lo, hi, ids, cap, bias = (form.get(name) for name in ("lo", "hi", "q_ids", "softcap", "bias"))

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = i >= 0
        found = found if hi is None else found & (j - i <= hi)
        found = found if lo is None else found & (j - i >= lo)
        return found if ids is None else found & (ids[0, i] == ids[0, j])

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = cap * torch.tanh(score / cap) if cap else score
        return score if bias is None else score + bias[0, 0, i, j]

    mask = (
        None
        if hi is None and lo is None and ids is None
        else create_block_mask(seen, None, None, s, s, device=DEVICE)
    )
    mod = change if cap or bias is not None else None
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda: compiled(
        q, k, v, score_mod=mod, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def no_grad(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        with torch.no_grad():
            return run()

    return forward


def with_backward(run: Callable[[], Tensor], grad: Tensor, leaves: tuple[Tensor, ...]) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(run(), leaves, grad)


def loss_head() -> None:
    """Linear and cross entropy, forward and backward: time, and the peak of memory beyond what is given and
    what comes out.
    """
    if not mine():
        return
    n, d, words = (40, 32, 100) if DRY else (8192, 2304, 256000)
    x, weight = make(n, d), make(words, d)
    weight.mul_(d**-0.5)
    target = torch.randint(words, (n,), device=DEVICE)
    form = (MEAN, -100, 1.0, 1.0, False, 2 if DRY else 16)

    def mine_in_two() -> Any:
        loss, lse = loss_head_forward(x, weight, None, target, *form)
        return loss, loss_head_backward(
            torch.ones_like(loss), x, weight, None, target, lse, *form, [True, True, False]
        )

    def eager(a: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy((a @ w.T).float(), target)

    leaves = (x.detach().requires_grad_(), weight.detach().requires_grad_())
    once = lambda: loss_head_gradients(x, weight, None, target, *form, [True, True, False])  # noqa: E731
    runs: Timed = {
        "ours": mine_in_two,
        "ours in one pass": once,
        "eager": lambda: torch.autograd.grad(eager(*leaves), leaves),
    }
    torch._dynamo.reset()
    compiled = torch.compile(eager, dynamic=False)
    runs["torch.compile"] = lambda: torch.autograd.grad(compiled(*leaves), leaves)
    with attempt("correct: loss head"):
        wanted = torch.autograd.grad(eager(*leaves), leaves)
        for name, made in (
            ("loss head", lambda: mine_in_two()[1]),
            ("loss head in one pass", lambda: once()[1:]),
        ):
            found = made()
            close(f"{name} dx", found[0], wanted[0], 6e-3)
            close(f"{name} dW", found[1], wanted[1], 6e-3)
            del found
        del wanted
    compare(f"loss head N{n} D{d} V{words}", 6.0 * n * d * words, runs)
    for name, run in {} if SHARE else runs.items():
        with attempt("loss head memory", name=name):
            say(case="loss head memory", name=name, mbytes=working_bytes(run) / 1e6)


def working_bytes(run: Callable[[], Any]) -> int:
    """The allocator's peak in one call, beyond what there was before and what the call returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    kept = torch.cuda.memory_allocated() - before
    del result
    return peak - before - kept


#: In the order of what matters: the time may end.
SECTIONS: dict[str, Callable[[], None]] = {
    "ceilings": ceilings, "correctness": correctness, "tiles": tiles, "attention": attention_cases,
    "block_sparse": block_sparse, "loss_head": loss_head, "step": step, "memory": memory, "copies": copies,
    "rows": rows, "states": states, "gemm": products, "lengths": lengths, "reserved": reserved,
}  # fmt: skip
#: Those whose kernels are compiled beside, before the first is run.
COMPILED = ("correctness", "tiles", "attention", "block_sparse", "loss_head", "rows", "gemm", "lengths")


def compile_beside(sections: list[str], processes: int, patience: float) -> None:
    """Have other processes run each case once, none twice, for the compilers' caches; those that take longer
    than `patience` are ended.
    """
    chosen = [name for name in sections if name in COMPILED]
    if not chosen or processes < 1:
        return
    environment = {
        **os.environ,
        "EFFCOMPILE_TUNE": "off",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        __file__,
        *["--dry"] * DRY,
        "--seconds",
        str(patience),
        "--only",
        *chosen,
        "--share",
    ]
    start = time.monotonic()
    started = [
        subprocess.Popen(
            [*command, str(i), str(processes)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for i in range(processes)
    ]
    for one in started:
        try:
            one.wait(max(0.0, start + patience - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()
    say(
        case="compiled beside",
        seconds=time.monotonic() - start,
        processes=processes,
        failed=sum(one.returncode != 0 for one in started),
    )


def run_sections(options: argparse.Namespace) -> bool:
    """Each in turn; whether all of them ran."""
    whole = True
    for index, section in enumerate(options.only):
        try:
            SECTIONS[section]()
        except Exception as error:  # one section's failure must not cost the others their time on the machine
            whole = False
            say(section=section, error=traceback.format_exc(limit=-3))
            if broken(error) and not SHARE:
                return elsewhere(options.only[index + 1 :]) and whole
        torch.cuda.empty_cache()
    return whole


def elsewhere(sections: list[str]) -> bool:
    """The rest in a new process, where this one's context of the GPU is lost; False, since
    something failed.
    """
    if sections:
        left = max(1.0, END[0] - time.monotonic())
        out = ["--out", OUT[0].name] if OUT else []
        subprocess.run(
            [
                sys.executable,
                __file__,
                *["--dry"] * DRY,
                "--processes",
                "0",
                "--seconds",
                str(left),
                *out,
                "--only",
                *sections,
            ],
            check=False,
        )
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument(
        "--only", nargs="*", choices=list(SECTIONS), default=[s for s in SECTIONS if s != "reserved"]
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="start nothing further after this time")
    parser.add_argument(
        "--processes",
        type=int,
        default=min(12, (os.cpu_count() or 1) - 2),
        help="that compile before anything is timed",
    )
    parser.add_argument("--share", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ["OUT"], "gpu.jsonl") if "OUT" in os.environ else None
    )
    options = parser.parse_args()
    END[0] = time.monotonic() + options.seconds
    if options.share:
        SHARE.extend([*options.share, -1])
    elif options.out:
        OUT.append(options.out.open("a"))
    torch.manual_seed(0)
    lacking = missing("triton", "msgspec", "z3", "torchao", *["ml_dtypes"] * DRY)
    reason = (
        "--dry needs ml_dtypes: pip install ml_dtypes" if "ml_dtypes" in lacking else ours.register(DEVICE)
    )
    name = "interpreter" if DRY else torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    say(device=name, torch=torch.__version__, triton=version("triton"), missing=lacking, declined=reason)
    if reason is not None:
        sys.exit(reason)
    if SHARE and {"attention", "lengths", "correctness"} & set(options.only):
        candidates()
    elif not SHARE:
        compile_beside(options.only, options.processes, min(120.0, options.seconds / 3))
    with building():  # tiles are tuned at a head size's first call
        sys.exit(0 if run_sections(options) else 1)


if __name__ == "__main__":
    main()
