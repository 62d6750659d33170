"""Keep or recompute: options with labels in the user's words, and what they become when emitted."""

from dataclasses import replace

import pytest
import torch
from train_helpers import MODELS, cut_model, differing, eager, everything, run_schedule

from effcompile.passes.training.checkpoint import Checkpoint, kept_storages, label
from effcompile.planner.remat import BlockOption
from effcompile.schedules.blocks import Block, Blocks
from effcompile.schedules.emit import emit
from effcompile.schedules.simulate import simulate


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effcompile.passes.training.checkpoint.SECONDS_PER_BLOCK", 0.05)


def options(cut: Blocks, **settings: int) -> dict[str, tuple[BlockOption, ...]]:
    checkpoint = Checkpoint(**settings)
    return {
        block.stage.kind: checkpoint.options(block)
        for block in {b.stage.kind: b for b in cut.blocks}.values()
    }


def test_options_go_from_everything_kept_to_the_least_bytes_and_each_runs_right() -> None:
    model, batch, cut = cut_model("skips")
    found = options(cut, points=4)
    wanted = eager(model, batch)
    for at, block in enumerate(cut.blocks):
        front = found[block.stage.kind]
        assert (
            1 <= len(front) <= 4
            and front[0].seconds == 0
            and not front[0].recomputed
            and front[0].label == "keep everything"
        )
        assert [o.seconds for o in front] == sorted(o.seconds for o in front)
        assert min(o.kept_bytes for o in front) < front[0].kept_bytes or len(front) == 1
        assert all(o.label.startswith("recompute") for o in front[1:])
        chosen = [found[b.stage.kind][0] for b in cut.blocks]
        saved = []
        for option in front:
            kept = kept_storages(cut, [*chosen[:at], option, *chosen[at + 1 :]])
            assert differing(run_schedule(model, cut, batch, kept)[0], wanted) == []
            trace = simulate(cut, emit(cut, kept))
            saved.append(trace.saved_bytes)
            again = [i for i in trace.instants if i.again]
            assert len(again) >= len(option.recomputed)
        assert min(saved) <= saved[0]


@pytest.mark.parametrize("name", MODELS)
def test_what_an_option_keeps_is_what_is_emitted(name: str) -> None:
    """Bytes kept by the block's options are bytes saved by the schedule, over what a schedule that keeps
    nothing saves.
    """
    cut = cut_model(name)[2]
    chosen = [
        BlockOption(
            kept=frozenset(list(b.problem.nbytes)[::2]),
            recomputed=(),
            kept_bytes=0,
            forward_peak=0,
            backward_peak=0,
            seconds=0.0,
        )
        for b in cut.blocks
    ]
    kept = kept_storages(cut, chosen)
    assert sum(cut.held.nbytes[s] for s in kept) <= sum(
        b.problem.nbytes[v] for b, o in zip(cut.blocks, chosen, strict=True) for v in o.kept
    )
    last = len(cut.blocks) - 1
    assert kept_storages(cut, chosen, range(1, last + 1)) == kept - {
        s for b in cut.blocks[1:] for s in b.entering
    }


def test_the_chain_names_the_stages_their_options_and_the_budget() -> None:
    cut = cut_model("gpt2")[2]
    found = options(cut, points=3)
    problem = Checkpoint().chain(cut, found, 500_000)
    assert problem.base == cut.base_bytes and problem.budget == 500_000 and problem.options == found
    assert [stage.name for stage in problem.stages] == [block.name for block in cut.blocks]
    assert problem.groupable == ((0, len(cut.blocks) - 1),)
    assert Checkpoint(groups=False).chain(cut, found, None).groupable == ()


def test_runs_of_blocks_that_can_be_grouped_end_where_more_than_the_stream_crosses() -> None:
    cut = cut_model("t5")[2]
    empty = {block.stage.kind: () for block in cut.blocks}
    for first, last in Checkpoint().chain(cut, empty, None).groupable:
        for before, after in zip(cut.blocks[first:last], cut.blocks[first + 1 : last + 1], strict=True):
            assert set(after.entering) == set(before.leaving) - cut.shared


def test_equal_blocks_have_equal_options() -> None:
    blocks = cut_model("gpt2")[2].blocks
    assert blocks[1].problem == blocks[2].problem and blocks[1].stage.kind == blocks[2].stage.kind


def option_of(block: Block, again: tuple[str, ...], kept: frozenset[str]) -> BlockOption:
    return BlockOption(
        kept=kept, recomputed=again, kept_bytes=0, forward_peak=0, backward_peak=0, seconds=1.0
    )


def test_labels_name_the_costly_operators_in_the_users_words() -> None:
    block = cut_model("skips")[2].blocks[1]
    by_word = {name.partition(":")[2].split(".")[0]: name for name in block.operators}
    kept = frozenset(block.problem.nbytes)
    assert label(block, option_of(block, (), kept)) == "keep everything"
    gelu = by_word["gelu"]
    assert label(block, option_of(block, (gelu,), kept)) == "recompute gelu"
    assert label(block, option_of(block, tuple(block.operators), frozenset())) == "recompute all"
    norm = by_word["native_layer_norm"]
    shown = label(block, option_of(block, (gelu, norm), kept))
    assert shown == "recompute gelu, layer_norm", "the costlier one first, words without aten's prefixes"
    some = tuple(block.operators)[: len(block.operators) - 1]
    words = {name.partition(":")[2].split(".")[0] for name in some}
    assert label(block, option_of(block, some, kept)).endswith(f"+{len(words) - 3}")


def test_attention_is_called_attention() -> None:
    block = cut_model("gpt2")[2].blocks[1]
    attention = [name for name in block.operators if "scaled_dot_product" in name]
    if attention:
        assert (
            label(block, option_of(block, tuple(attention), frozenset(block.problem.nbytes)))
            == "recompute attention"
        )
    else:  # with dropout CPU's attention is products and a softmax
        assert any("softmax" in name for name in block.operators)


def test_keeping_everything_is_the_chains_fastest_choice() -> None:
    cut = cut_model("skips")[2]
    found = options(cut, points=3)
    first = [found[block.stage.kind][0] for block in cut.blocks]
    trace = simulate(cut, emit(cut, kept_storages(cut, first)))
    assert trace.saved_bytes <= simulate(cut, emit(cut, everything(cut))).saved_bytes
    assert not emit(cut, kept_storages(cut, first)).recomputed


def test_replacing_a_block_does_not_change_the_steps_results() -> None:
    """A choice is bytes and time only: dropout's numbers stay, whichever blocks recompute."""
    model, batch, cut = cut_model("skips")
    found = options(cut, points=4)
    least = [replace(found[block.stage.kind][-1]) for block in cut.blocks]
    (loss, _), _ = run_schedule(model, cut, batch, kept_storages(cut, least))
    assert torch.equal(loss, eager(model, batch)[0])
