"""A backend whose linears alone take longer than another's plan is not priced further; a bound is never above
the best plan.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_formats import lacking

from effcompile.backends import load_backend
from effcompile.capture import capture
from effcompile.core.findings import Failed
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because, Unsupported
from effcompile.ir.figures import Candidate
from effcompile.ir.formats import LINEAR_FORMATS
from effcompile.ir.plan import Plan
from effcompile.machine.calibration import Calibration
from effcompile.machine.hardware import this_hardware
from effcompile.machine.machines import load_target
from effcompile.machine.target import KernelCall
from effcompile.passes import load_passes
from effcompile.search import bound, pricing
from effcompile.search.machine import Machine
from effcompile.search.progress import QUIET
from effcompile.search.search import Search
from effcompile.sites.attention.normalise import normalised


class Heads(nn.Module):
    """Three linears that read the same, one behind them, and one twice as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.up = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.o(self.q(x) + self.k(x) * self.v(x)))


@pytest.fixture(scope="module")
def searching() -> Callable[[Mapping[str, float]], Search]:
    """A search of that model where a kernel call takes what it is said to take."""
    torch.manual_seed(0)
    program = capture(Heads().eval(), (torch.randn(64, 32),))
    target = replace(load_target("cpu-generic"), peak_flops={})
    calibrated = Calibration(machine=this_hardware(), date="today", memory_bandwidth=1e10, peak_flops={})
    machine = Machine(target=target, calibration=calibrated)
    search = pricing.search_for(
        program, Goal(max_error=0.9), machine, load_passes(("quantize", "merge")), QUIET
    )

    def made(seconds: Mapping[str, float]) -> Search:
        def probe(backend: str, call: KernelCall) -> float | None:
            return seconds.get(f"{call.kernel} {call.dims}", seconds.get("else", 1e-6))

        priced = replace(machine, target=replace(target, probe=probe))
        return replace(search, machine=priced, _proposals={})

    return made


CALLS = [
    f"linear/{family} {(64, k, n)}"
    for family, (k, n) in itertools.product(
        ("fp32", "int8_token", "int8_dynamic"), ((32, 32), (32, 96), (32, 64))
    )
]


@settings(max_examples=8, deadline=None)
@given(drawn=st.lists(st.floats(1e-4, 1.0), min_size=len(CALLS), max_size=len(CALLS)))
def test_no_plan_takes_less_than_the_bound(
    searching: Callable[[Mapping[str, float]], Search], drawn: list[float]
) -> None:
    prices = dict(zip(CALLS, drawn, strict=True))
    search, backend = searching(prices), load_backend("torch-eager")
    program = search.regimes.each[0].program
    counted = bound.groups(program)
    found = bound.least(counted, search.context(backend), math.inf)
    assert found <= search.plan_for(backend).certificate.objective * (1 + 1e-9)
    stopped = bound.least(counted, search.context(backend), found / 2)
    assert found / 2 <= stopped <= found + 1e-12  # what is left out is none less


class Block(nn.Module):
    """An attention, residual norms and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).view(2, 16, 2, 16).transpose(1, 2) for each in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        x = self.first(x + self.o(found.transpose(1, 2).reshape(2, 16, 32)))
        return self.second(x + self.down(nn.functional.gelu(self.up(x))))


#: Kernels of the block that is bounded, and where Inductor's take long to make.
KERNELS_BETWEEN = (
    "attention/sdpa", "attention/sdpa_fp32", "attention/sdpa_bf16", "attention/math", "add_norm/split",
    "add_norm/fused", "gelu/erf", "gelu/tanh",
)  # fmt: skip
COMPILED = ("linear/int8_dynamic", "linear/int8_channel", "linear/int8_static")


@pytest.fixture(scope="module")
def of_block() -> Callable[[Mapping[str, float], list[str]], Search]:
    """A search of the block where a kernel takes what it is said to take, and says that it was asked for."""
    torch.manual_seed(0)
    program = normalised(capture(Block().eval(), (torch.randn(2, 16, 32),), dynamic=False))
    target = replace(load_target("cpu-generic"), peak_flops={})
    calibrated = Calibration(machine=this_hardware(), date="today", memory_bandwidth=1e10, peak_flops={})
    machine = Machine(target=target, calibration=calibrated)
    passes = load_passes(("quantize", "merge", "attention", "fuse"))
    search = pricing.search_for(program, Goal(max_error=0.9), machine, passes, QUIET)

    def made(seconds: Mapping[str, float], asked: list[str]) -> Search:
        def probe(backend: str, call: KernelCall) -> float | None:
            asked.append(call.kernel)
            return seconds.get(call.kernel, 1e-6)

        priced = replace(machine, target=replace(target, probe=probe))
        return replace(search, machine=priced, _proposals={})

    return made


@settings(max_examples=8, deadline=None)
@given(drawn=st.lists(st.floats(1e-4, 1.0), min_size=12, max_size=12))
def test_no_plan_takes_less_than_the_bound_with_what_lies_between(
    of_block: Callable[[Mapping[str, float], list[str]], Search], drawn: list[float]
) -> None:
    names = (*KERNELS_BETWEEN, "linear/fp32", "linear/int8_token", "linear/bf16", "linear/int8_groups")
    search = of_block(dict(zip(names, drawn, strict=True)), [])
    program, backend = search.regimes.each[0].program, load_backend("torch-eager")
    context = search.context(backend)
    others = bound.of_others(search.passes, program, context)
    of = dict(zip(names, drawn, strict=True))
    norms = 2 * min(of["add_norm/split"], of["add_norm/fused"])
    assert others > norms + min(of["gelu/erf"], of["gelu/tanh"])  # and an attention
    found = others + bound.least(bound.groups(program), context, math.inf)
    assert found <= search.plan_for(backend).certificate.objective * (1 + 1e-9)


@pytest.mark.skipif(lacking("int8_dynamic") is not None, reason=lacking("int8_dynamic") or "")
def test_what_takes_long_to_make_is_not_made_where_what_it_contains_is_beyond(
    of_block: Callable[[Mapping[str, float], list[str]], Search],
) -> None:
    asked: list[str] = []
    prices = dict.fromkeys(COMPILED, 2.0) | {"product/int8": 1.0} | dict.fromkeys(KERNELS_BETWEEN, 1e-3)
    prices |= {f"linear/{family}": 3.0 for family in LINEAR_FORMATS if f"linear/{family}" not in COMPILED}
    search = of_block(prices, asked)
    plan = search.plan_for(load_backend("torch-eager"))
    for best, made in (
        (0.1, False),
        (5.0, True),
    ):  # four products, three of them merged, of 1 s or in all of 2
        asked.clear()
        plans = [(load_backend("torch-eager"), _taking(plan, best))]
        said = bound.beyond(search, load_backend("torch-inductor"), plans)
        assert isinstance(said, Because) and float(said.figures[0]) > best  # type: ignore[arg-type]
        assert "product/int8" in asked and bool(set(COMPILED) & set(asked)) == made
    assert bound.beyond(search, load_backend("torch-inductor"), [(plans[0][0], _taking(plan, 100.0))]) is None


def test_groups_are_merges_and_what_is_alone(searching: Callable[[Mapping[str, float]], Search]) -> None:
    program = searching({}).regimes.each[0].program
    one = (64, 32, 32)
    assert bound.groups(program) == Counter({(one, one, one): 1, (one,): 1, ((64, 32, 64),): 1})


def _taking(plan: Plan, seconds: float) -> Plan:
    return replace(plan, certificate=replace(plan.certificate, objective=seconds))


def _told(search: Search, plan: Plan, seconds: float) -> object:
    backend = load_backend("onnxruntime")
    return bound.beyond(search, backend, [(load_backend("torch-eager"), _taking(plan, seconds))])


def test_it_is_left_out_only_where_its_linears_are_beyond(
    searching: Callable[[Mapping[str, float]], Search],
) -> None:
    search = searching({"else": 1.0})
    plan = search.plan_for(load_backend("torch-eager"))
    said = _told(search, plan, 0.1)
    assert isinstance(said, Because) and "not priced further" in str(said)
    assert _told(search, plan, 100.0) is None
    assert _told(replace(search, goal=replace(search.goal, minimize="memory")), plan, 0.1) is None
    assert _told(replace(search, machine=Machine(target=load_target("h100-sxm"))), plan, 0.1) is None


def test_it_is_priced_once_the_best_is_measured_to_take_longer(
    searching: Callable[[Mapping[str, float]], Search],
) -> None:
    search = searching({"else": 1.0})
    said = _told(search, search.plan_for(load_backend("torch-eager")), 0.1)
    assert isinstance(said, Because)
    told = [Candidate(backend="onnxruntime", note=said), Candidate(backend="torch-inductor", note=None)]
    backends = [load_backend(each.backend) for each in told]
    seconds = float(said.figures[0])
    assert not bound.overtaken(search, backends, told, seconds)
    (late,) = bound.overtaken(search, backends, told, 2 * seconds)
    assert late[0].name == "onnxruntime" and late[1].backend == "onnxruntime"


def test_what_was_not_priced_beside_a_plan_is_priced_where_that_cannot_be_built(
    searching: Callable[[Mapping[str, float]], Search],
) -> None:
    search, backends = searching({"else": 1.0}), [load_backend("torch-inductor")]
    left = Candidate(backend="torch-inductor", note=Unsupported("not priced"))
    eager = Candidate(backend="torch-eager", predicted_seconds=1.0)
    failed = replace(eager, note=Failed(message="it cannot be"))
    assert not bound.overtaken(search, backends, [eager, left], 5.0)
    for told, seconds in (([failed, left], 5.0), ([eager, left], math.inf)):
        ((backend, plan),) = bound.overtaken(search, backends, told, seconds)
        assert backend.name == plan.backend == "torch-inductor"
    gone = replace(left, note=Failed(message="it was tried"))
    assert not bound.overtaken(search, backends, [failed, gone], math.inf)
