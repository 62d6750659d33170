"""A machine whose prices the test sets, and plans with given options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from form_names import form
from torch import nn

from effcompile.core.cost import Cost
from effcompile.core.goal import Goal
from effcompile.ir.figures import Certificate, Totals
from effcompile.ir.formats import LINEAR_FORMATS, Form
from effcompile.ir.plan import Decision, Plan
from effcompile.ir.program import Program
from effcompile.machine.target import KernelCall, Target
from effcompile.passes.base import Choice, Context, Declined

LOOSE = Goal(max_error=0.05)


class Block(nn.Module):
    """q, k, v from one input (k without a bias), and a second product of the result."""

    def __init__(self, k: int = 32, widths: tuple[int, ...] = (16, 32, 8)) -> None:
        super().__init__()
        self.q = nn.Linear(k, widths[0])
        self.k = nn.Linear(k, widths[1], bias=False)
        self.v = nn.Linear(k, widths[2])
        self.out = nn.Linear(sum(widths), 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [f(x) for f in (self.q, self.k, self.v)]
        return self.out(torch.cat([part.flatten(1).reshape(part.shape) for part in parts], dim=-1))


def machine(price: Callable[[KernelCall], float | None]) -> Target:
    return Target(
        name="test", description="test", device="cpu", cores=2, memory_bytes=2**33, memory_bandwidth=2e10,
        link_bandwidth=1e10, peak_flops={"fp32": 1e11}, probe=lambda backend, call: price(call),
    )  # fmt: skip


def by_work(call: KernelCall) -> float:
    """10 µs per kernel and its FLOPs at 10¹¹/s, 8-bit products at four times that."""
    rate = 4e11 if "int8" in call.kernel else 1e11
    return 1e-5 + (call.flops or call.bytes) / rate


def context(
    price: Callable[[KernelCall], float | None] = by_work,
    *,
    goal: Goal = LOOSE,
    backend: str = "onnxruntime",
    sensitivity: Any = None,
) -> Context:
    formats = tuple(LINEAR_FORMATS.values())
    known = Everything() if sensitivity is None else sensitivity
    return Context(
        goal=goal, target=machine(price), backend=backend, sensitivity=known,
        formats=formats[:1] if goal.exact else formats
    )  # fmt: skip


class Everything(dict[tuple[str, str], float]):
    """Every option at every site has been measured."""

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        return 1e-6


def split(items: Any) -> tuple[dict[str, Choice], list[Declined]]:
    items = list(items)
    return {i.site: i for i in items if isinstance(i, Choice)}, [i for i in items if isinstance(i, Declined)]


def plan_with(options: Mapping[str, str | Form]) -> Plan:
    blank = Decision(site="", kind="", option="", baseline="", by="", cost=Cost(), baseline_cost=Cost())
    chosen = {site: form(option) if isinstance(option, str) else option for site, option in options.items()}
    decisions = tuple(replace(blank, site=site, option=each.name, form=each) for site, each in chosen.items())
    certificate = Certificate(
        status="", objective=0, bound=0, gap=0, sites=0, alternatives=0, seconds=0, solver=""
    )
    return Plan(
        model="m", fingerprint="", parameters=0, goal=LOOSE, target="", target_line="", backend="onnxruntime",
        decisions=decisions, declined=(), certificate=certificate, baseline=Totals(), predicted=Totals(),
    )  # fmt: skip


def outputs(program: Program, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        found = program.module(*(args or program.args), **(kwargs or program.kwargs))
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
