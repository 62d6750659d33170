"""Values held elsewhere: the gradients of eager bit by bit, the allocator's bytes as simulated, the pool's
exactly.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from train_helpers import MODELS, Batch, cut_model, differing, eager, everything, measured

from effcompile.backends.torch.training import StepRunner
from effcompile.ops.offload import host_pool
from effcompile.passes import ways
from effcompile.planner.remat import Group
from effcompile.schedules.away import movable
from effcompile.schedules.blocks import Blocks, Host
from effcompile.schedules.emit import emit
from effcompile.schedules.simulate import simulate
from effcompile.schedules.ways import Way

OFFLOAD, COMPRESS, BOTH = (ways()[name] for name in ("offload", "compress", "compress+offload"))
SLACK = 64  # as in test_emit
FEW = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
Away = dict[int, dict[int, Way]]


def run(
    model: torch.nn.Module,
    batch: Batch,
    cut: Blocks,
    kept: frozenset[int],
    away: Away,
    groups: tuple[Group, ...] = (),
) -> tuple:
    """(results, allocator's peak, pool's peak, trace) of one step."""
    emitted = emit(cut, kept, groups, away)
    emitted.forward.lint()
    emitted.backward.lint()
    pool = host_pool()
    before = pool.in_use
    pool.reset_peak()
    runner = StepRunner(model, cut.step, emitted)
    results, peak = measured(lambda: runner.loss((), batch), model, cut.given_bytes)
    assert pool.in_use == before, "the step gives back what it takes"
    return results, peak, pool.peak - before, simulate(cut, emitted)


def all_in(cut: Blocks, form: Way) -> Away:
    return {
        i: {block.values[name]: form for name in movable(cut, block)} for i, block in enumerate(cut.blocks)
    }


@st.composite
def schedules(draw: st.DrawFn, cut: Blocks, forms: list[Way]) -> tuple[frozenset[int], Away]:
    """Every value kept, recomputed or in one of the forms."""
    kept, away = set(), {}
    for i, block in enumerate(cut.blocks):
        able = movable(cut, block)
        for name, s in block.values.items():
            how = draw(st.sampled_from(["kept", "again", *(forms * 2 if name in able else [])]))
            if how == "kept":
                kept.add(s)
            elif how != "again":
                away.setdefault(i, {})[s] = how
    return frozenset(kept), away


def check(
    name: str, kept: frozenset[int], away: Away, *, beside: bool, groups: tuple[Group, ...] = ()
) -> None:
    model, batch, cut = cut_model(name)
    cut = replace(cut, host=Host(beside=beside))
    results, peak, hosted, trace = run(model, batch, cut, kept, away, groups)
    assert differing(results, eager(model, batch)) == []
    assert abs(trace.peak_bytes - peak) <= SLACK, (trace.peak, peak - trace.peak_bytes)
    assert trace.host_bytes == hosted
    assert sum(trace.parts.values()) == trace.peak_bytes


@pytest.mark.parametrize("beside", [False, True])
def test_everything_offloaded(beside: bool) -> None:
    for name in MODELS:
        cut = cut_model(name)[2]
        away = all_in(cut, OFFLOAD)
        assert sum(map(len, away.values())) > 0.8 * len(cut.decidable)
        check(name, everything(cut) - {s for of in away.values() for s in of}, away, beside=beside)


@FEW
@given(st.data(), st.sampled_from(sorted(MODELS)), st.booleans())
def test_any_values_offloaded(data: st.DataObject, name: str, beside: bool) -> None:
    kept, away = data.draw(schedules(cut_model(name)[2], [OFFLOAD]))
    check(name, kept, away, beside=beside)


@FEW
@given(st.data(), st.booleans())
def test_groups_beside_offloaded_values(data: st.DataObject, beside: bool) -> None:
    cut = cut_model("gpt2")[2]
    kept, away = data.draw(schedules(cut, [OFFLOAD]))
    first = data.draw(st.integers(0, len(cut.blocks) - 2))
    check(
        "gpt2",
        kept,
        away,
        beside=beside,
        groups=(Group(first=first, last=data.draw(st.integers(first + 1, len(cut.blocks) - 1))),),
    )


@FEW
@given(st.data(), st.sampled_from(sorted(MODELS)), st.booleans())
def test_compressed_values_take_the_bytes_that_are_simulated(
    data: st.DataObject, name: str, beside: bool
) -> None:
    model, batch, cut = cut_model(name)
    cut = replace(cut, host=Host(beside=beside))
    kept, away = data.draw(schedules(cut, [OFFLOAD, COMPRESS, BOTH]))
    floats = {
        i: {s: f for s, f in of.items() if f == OFFLOAD or cut.maker[s].meta["val"].dtype == torch.float32}
        for i, of in away.items()
    }
    results, peak, hosted, trace = run(model, batch, cut, kept, floats)
    assert abs(trace.peak_bytes - peak) <= SLACK, (trace.peak, peak - trace.peak_bytes)
    assert trace.host_bytes == hosted
    wanted = eager(model, batch)
    assert set(results[1]) == set(wanted[1])
    assert torch.equal(results[0], wanted[0]), "the forward is the model's own"


def test_the_device_holds_nothing_of_what_is_offloaded_and_a_quarter_of_what_is_compressed() -> None:
    cut = cut_model("gpt2")[2]
    names = [
        (i, s)
        for i, of in all_in(cut, OFFLOAD).items()
        for s in of
        if cut.maker[s].meta["val"].dtype == torch.float32
    ]

    def trace(form: Way | None) -> object:
        away: Away = {}
        for i, s in names if form else []:
            away.setdefault(i, {})[s] = form
        return simulate(
            cut,
            emit(cut, everything(cut) - (frozenset(s for _, s in names) if form else frozenset()), (), away),
        )

    kept, gone, packed, both = (trace(form).saved_bytes for form in (None, OFFLOAD, COMPRESS, BOTH))
    size = trace(OFFLOAD).host_bytes
    assert kept - gone == size
    assert both == gone
    assert size / 4 < packed - gone < size / 3
    assert packed - gone == trace(BOTH).host_bytes


def test_a_loss_without_a_backward_gives_the_pool_back() -> None:
    model, batch, cut = cut_model("skips")
    pool = host_pool()
    before = pool.in_use
    runner = StepRunner(model, cut.step, emit(cut, frozenset(), (), all_in(cut, OFFLOAD)))
    loss = runner.loss((), batch)
    assert pool.in_use > before
    del loss
    assert pool.in_use == before
