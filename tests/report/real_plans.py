"""Tiny models planned in the session, once each: what the golden reports print is what the product says of
them.

Targets are files, so nothing is timed to decide; the clock that solvers and measurements read is ours.
`settled` fixes what else depends on the machine or on versions: what was measured, who proved it and how long
that took, how many guards there are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import effcompile
from effcompile.core.errors import InfeasibleError
from effcompile.ir.figures import Check, Totals
from effcompile.ir.plan import Plan
from effcompile.machine.machines import load_target

KIB = 1024


class Block(nn.Module):
    """Attention with a causal mask and an MLP, before each a norm."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(b, s, d))
        return x + self.down(nn.functional.gelu(self.up(self.ln_2(x))))


class TinyGPT(nn.Module):
    """A language model; its loss in training, its logits otherwise."""

    def __init__(self, layers: int = 3, width: int = 64, words: int = 512) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(words, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return (
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            if self.training
            else logits
        )


class Nothing(nn.Module):
    """A model in which there is nothing to decide."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() + 1


class Ticking:
    """A clock that every look moves on by the same."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


@contextmanager
def ticking() -> Iterator[None]:
    """No solver gives up because this machine is slow, and kernels need no more for themselves because it has
    more cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", Ticking())
            yield
    finally:
        torch.set_num_threads(threads)


def settled(plan: Plan) -> Plan:
    """The plan with everything fixed that another machine or another version would change."""
    predicted, baseline = plan.predicted, plan.baseline
    measured = None if plan.measured is None else Totals(
        seconds=1.04 * (predicted.seconds or 0.0), weight_bytes=predicted.weight_bytes,
        peak_bytes=predicted.peak_bytes, error=predicted.error,
    )  # fmt: skip
    before = (
        None if plan.measured_baseline is None else replace(baseline, seconds=1.1 * (baseline.seconds or 0.0))
    )
    return replace(
        plan,
        certificate=replace(plan.certificate, seconds=0.1, solver="z3"),
        versions={},
        # whose kernels multiply differs from machine to machine
        settings=dict.fromkeys((name for name in plan.settings if not name.endswith("linears")), 2),
        measured=measured,
        measured_baseline=before,
        guards=tuple(guard for guard in plan.guards if guard.kind == "input"),
        checks=tuple(map(_passed, plan.checks)),
        stress=tuple(map(_passed, plan.stress)),
        candidates=tuple(
            c
            if c.measured_seconds is None
            else replace(c, measured_seconds=1.04 * (c.predicted_seconds or 0.0), error=predicted.error)
            for c in plan.candidates
        ),
    )


def _passed(check: Check) -> Check:
    return replace(check, error=check.limit / 4 if check.passed else 4 * check.limit)


# ------------------------------------------------------------------ inference


@cache
def network() -> TinyGPT:
    return TinyGPT().eval()


def ids(batch: int = 1, length: int = 32) -> Tensor:
    return torch.arange(batch * length).reshape(batch, length) * 7 % 512


def infer(**goal: Any) -> Plan:
    with ticking():
        return settled(effcompile.plan(network(), ids(), target="cpu-generic", backend="onnxruntime", **goal))


@cache
def quantised() -> Plan:
    return infer(max_error=0.05, memory="560KiB")


@cache
def exact() -> Plan:
    return infer()


@cache
def smallest() -> Plan:
    return infer(max_error=0.1, minimize="memory", reads="last")


@cache
def front() -> tuple[Plan, ...]:
    with ticking():
        found = effcompile.frontier(
            network(), ids(), points=4, target="cpu-generic", backend="onnxruntime", max_error=0.1
        )
    return tuple(map(settled, found))


@cache
def run() -> Plan:
    """Lowered, run and verified here, in formats that have the same error on every processor: products of
    int8 saturate on some.
    """
    passes = ["quantize.options=bf16,w8_channel"]
    with ticking():
        made = effcompile.optimize(
            network(),
            inputs=ids(),
            target=load_target("cpu-generic"),
            backend="torch-eager",
            max_error=0.05,
            passes=passes,
        )
    return settled(made.plan)


@cache
def nothing() -> Plan:
    with ticking():
        return settled(
            effcompile.plan(Nothing(), torch.ones(2, 8), target="cpu-generic", backend="onnxruntime")
        )


@cache
def too_small() -> InfeasibleError:
    return refused(lambda: infer(max_error=1e-4, memory="100KiB"))


# ------------------------------------------------------------------ training


def train(
    *, optimizer: bool = False, target: str = "cpu-generic", passes: tuple[str, ...] = (), **goal: Any
) -> Plan:
    model = TinyGPT().train()
    states = torch.optim.AdamW(model.parameters()) if optimizer else None
    with ticking():
        plan = effcompile.plan(
            model, {"ids": ids(4, 128)}, mode="training", target=target, optimizer=states,
            passes=["no-pointwise", *passes], **goal
        )  # fmt: skip
    return settled(plan)


def refused(request: Any) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        request()
    return caught.value


@cache
def step() -> Plan:
    return train(memory=BUDGET)


@cache
def step_with_states() -> Plan:
    return train(memory=BUDGET, optimizer=True)


@cache
def elsewhere() -> Plan:
    return train(target="h100-sxm")


@cache
def step_too_large() -> InfeasibleError:
    return refused(lambda: train(memory="2MiB"))


@cache
def states_too_large() -> InfeasibleError:
    return refused(lambda: train(memory=LITTLE, optimizer=True, passes=("states.offload=false",)))


@cache
def step_front() -> tuple[Plan, ...]:
    with ticking():
        model, passes = TinyGPT().train(), ["no-pointwise"]
        found = effcompile.frontier(
            model, {"ids": ids(4, 128)}, points=5, mode="training", target="cpu-generic", passes=passes
        )
    return tuple(map(settled, found))


def site_of(plan: Plan, kind: str) -> str:
    """The first site at which something of a kind was decided."""
    return next(decision.site for decision in plan.decisions if decision.kind == kind)


#: Between the least that this step needs and what it takes unplanned.
BUDGET = "6MiB"
#: What optimizer states leave nothing of.
LITTLE = "2500KiB"
