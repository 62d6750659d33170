"""Emitted schedules: whatever is kept, the loss and gradients of eager, bit by bit, and the simulated bytes
are the allocator's.
"""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx
from train_helpers import MODELS, cut_model, differing, eager, everything, run_schedule

from effcompile.core.torch_compat_aot import is_random
from effcompile.ops.replay import replay
from effcompile.passes.training.checkpoint import Checkpoint
from effcompile.planner.remat import Group
from effcompile.schedules.blocks import Blocks
from effcompile.schedules.emit import emit
from effcompile.schedules.simulate import simulate

#: Bytes by which the simulation may be off: scalars that kernels wrap as tensors for a moment.
SLACK = 64
FEW = settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def check(name: str, kept: frozenset[int], groups: tuple[Group, ...] = ()) -> None:
    model, batch, cut = cut_model(name)
    found, peak = run_schedule(model, cut, batch, kept, groups)
    assert differing(found, eager(model, batch)) == []
    trace = simulate(cut, emit(cut, kept, groups))
    assert abs(trace.peak_bytes - peak) <= SLACK, (trace.peak, peak - trace.peak_bytes)


@st.composite
def kept_sets(draw: st.DrawFn, name: str) -> frozenset[int]:
    """Any storages, whole blocks more often than chance would have it."""
    blocks = cut_model(name)[2].blocks
    share = draw(
        st.lists(st.sampled_from(["all", "none", "some"]), min_size=len(blocks), max_size=len(blocks))
    )
    kept: set[int] = set()
    for block, how in zip(blocks, share, strict=True):
        own = sorted(block.values.values())
        kept |= set(
            own if how == "all" else draw(st.sets(st.sampled_from(own))) if how == "some" and own else ()
        )
    return frozenset(kept)


def groupable(cut: Blocks) -> tuple[tuple[int, int], ...]:
    options = {block.stage.kind: () for block in cut.blocks}
    return Checkpoint().chain(cut, options, None).groupable


def grouped(cut: Blocks, kept: frozenset[int], groups: tuple[Group, ...]) -> frozenset[int]:
    """What is kept when groups remake: not what enters their blocks, but all that enters their first."""
    dropped = {
        s
        for group in groups
        for block in cut.blocks[group.first + 1 : group.last + 1]
        for s in block.entering
    }
    return (kept | {s for group in groups for s in cut.blocks[group.first].entering}) - dropped


@FEW
@given(st.data(), st.sampled_from(sorted(MODELS)))
def test_any_kept_set_gives_eagers_numbers_within_the_simulated_bytes(data: st.DataObject, name: str) -> None:
    check(name, data.draw(kept_sets(name)))


def test_all_and_nothing_kept() -> None:
    for name in MODELS:
        kept = everything(cut_model(name)[2])
        check(name, kept)
        check(name, frozenset())


@FEW
@given(st.data(), st.sampled_from(["gpt2", "t5"]))
def test_groups_remake_what_enters_their_blocks(data: st.DataObject, name: str) -> None:
    cut = cut_model(name)[2]
    first, last = data.draw(st.sampled_from(groupable(cut)))
    begin = data.draw(st.integers(first, last - 1))
    groups = (Group(first=begin, last=data.draw(st.integers(begin + 1, last))),)
    check(name, grouped(cut, data.draw(kept_sets(name)), groups), groups)


@FEW
@given(st.data(), st.sampled_from(sorted(MODELS)))
def test_even_groups_that_no_planner_makes_give_eagers_numbers(data: st.DataObject, name: str) -> None:
    cut = cut_model(name)[2]
    pairs = st.lists(st.integers(0, len(cut.blocks) - 1), min_size=2, max_size=2, unique=True).map(sorted)
    groups = tuple(Group(first=a, last=b) for a, b in data.draw(st.lists(pairs, min_size=1, max_size=2)))
    check(name, data.draw(kept_sets(name)), groups)


def test_a_group_saves_the_entering_values_and_runs_the_forwards_once_more() -> None:
    cut = cut_model("gpt2")[2]
    run = groupable(cut)[-1]
    assert run[1] - run[0] >= 1
    group = Group(first=run[0], last=run[1])
    lone = frozenset(s for block in cut.blocks for s in block.entering)
    plain, remade = emit(cut, lone), emit(cut, grouped(cut, lone, (group,)), (group,))
    assert (
        simulate(cut, remade).saved_bytes < simulate(cut, plain).saved_bytes
        and remade.recomputed > plain.recomputed
    )


def test_keeping_everything_recomputes_nothing_and_keeping_only_the_stream_replays_every_dropout_once() -> (
    None
):
    cut = cut_model("gpt2")[2]
    whole = emit(cut, everything(cut))
    assert whole.recomputed == 0 and not calls(whole.backward, replay)
    stream = emit(cut, frozenset(s for block in cut.blocks for s in block.entering))
    random = [n for block in cut.blocks for n in block.forward if is_random(n.target)]
    replayed = calls(stream.backward, replay)
    assert (
        len(random) == 7
        and {stream.origin[n] for n in replayed} == set(random)
        and len(replayed) == len(random)
    )
    assert stream.recomputed > len(random) and len(stream.handed) < len(whole.handed)


def test_the_graphs_are_sound_and_name_where_they_come_from() -> None:
    cut = cut_model("t5")[2]
    emitted = emit(cut, frozenset(sorted(everything(cut))[::3]))
    for graph in (emitted.forward, emitted.backward):
        graph.lint()
        for node in graph.nodes:
            if node.op == "call_function":
                assert 0 <= emitted.stage[node] < len(cut.blocks)
                origin = emitted.origin.get(node)
                instead = {cut.written[origin].target} if origin in cut.written else set()
                assert origin is None or node.target in {origin.target, replay, *instead}
    results = emitted.forward.output_node().args[0]
    assert len(results) == len(cut.step.forward_results) + len(emitted.handed)
    assert len(emitted.backward.output_node().args[0]) == len(cut.step.gradients)


def calls(graph: fx.Graph, target: object) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def test_a_run_leaves_the_generator_where_eager_leaves_it() -> None:
    model, batch, cut = cut_model("gpt2")
    states = []
    for run in (lambda: eager(model, batch), lambda: run_schedule(model, cut, batch, frozenset())):
        run()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
