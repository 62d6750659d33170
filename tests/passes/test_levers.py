"""Offload and compress: where they are proposed, with what costs, and not unless they are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from train_helpers import cut_model

from effcompile.core.errors import UnknownNameError, UsageError
from effcompile.estimate.roofline import moved_bytes
from effcompile.machine.machines import load_target
from effcompile.ops.compress import packed_bytes
from effcompile.passes import TRAINING_PASSES, TrainingPasses, load_training_passes
from effcompile.passes.training.bitmask import Bitmask
from effcompile.passes.training.checkpoint import Checkpoint, carried_out
from effcompile.passes.training.compress import Compress
from effcompile.passes.training.frozen import Frozen
from effcompile.passes.training.fused_attention import FusedAttention
from effcompile.passes.training.heads import LossHeads
from effcompile.passes.training.levers import Levers, Rates
from effcompile.passes.training.microbatch import Microbatch
from effcompile.passes.training.offload import Offload
from effcompile.passes.training.parts import Parts
from effcompile.passes.training.pipeline import Pipeline
from effcompile.passes.training.pointwise import Pointwise
from effcompile.passes.training.precision import Precision
from effcompile.passes.training.shard import Shard
from effcompile.passes.training.states import States
from effcompile.passes.training.tensor import TensorParallel
from effcompile.passes.training.tiled import TiledGradients
from effcompile.passes.training.wide import WideProducts
from effcompile.planner.remat import smallest_budget
from effcompile.schedules.blocks import Blocks

RATES = Rates(out=1e-9, back=2e-9, pack={"compress": 3e-10}, call=1e-6, host_bytes=1 << 40)
EVERY = Levers(values=(Offload(share=0.0), Compress(share=0.0)))


def proposed(levers: Levers, rates: Rates = RATES, name: str = "gpt2") -> Blocks:
    return levers.proposed(cut_model(name)[2], rates, moved_bytes)


def test_they_take_part_only_where_asked_for_and_leave_out_no_other() -> None:
    plain = TrainingPasses(
        step=(
            TensorParallel(),
            FusedAttention(),
            LossHeads(),
            Parts(),
            WideProducts(),
            TiledGradients(),
            Pointwise(),
            Shard(),
            Pipeline(),
            States(),
        ),
        checkpoint=Checkpoint(),
        levers=Levers(),
    )
    load = load_training_passes
    assert load(None) == plain
    assert load(["offload", "compress"]) == replace(plain, levers=Levers(values=(Offload(), Compress())))
    assert load(["offload.host=1GiB", "no-pointwise"]).step == (
        *plain.step[:6],
        Shard(),
        Pipeline(),
        States(),
    )
    assert load(["checkpoint", "offload"]) == replace(
        plain, step=(States(offload=False),), levers=Levers(values=(Offload(),))
    )
    assert load(["bitmask"]) == replace(plain, levers=Levers(values=(Bitmask(),)))
    assert (
        load(["checkpoint", "no-offload"]).levers
        == load(["compress.share=0.1", "no-compress"]).levers
        == Levers()
    )
    assert load(["offload.host=2GiB", "compress"]).levers == Levers(values=(Offload(host="2GiB"), Compress()))
    assert (
        load(None, linked=True).levers
        == load(["no-pointwise"], linked=True).levers
        == Levers(values=(Offload(),))
    )
    assert load(["no-offload"], linked=True).levers == load(["checkpoint"], linked=True).levers == Levers()
    assert load(["precision"]).step == (TensorParallel(), Precision(), *plain.step[1:])
    assert load(None, inexact=True).step == (
        TensorParallel(),
        Precision(),
        *plain.step[1:6],
        Frozen(),
        *plain.step[6:],
    )
    assert load(["no-precision", "no-frozen"], inexact=True).step == plain.step and load(
        ["microbatch"]
    ).late == (Microbatch(),)


def test_what_changes_numbers_is_left_out_of_an_exact_goal_by_name() -> None:
    exact, others = load_training_passes(["precision", "compress"]).exact
    assert exact == load_training_passes(None) and others == ["precision", "compress"]


def test_a_plans_own_passes_carry_it_out_also_where_they_were_left_out() -> None:
    left = load_training_passes(["no-pointwise", "no-attention"])
    assert left.carrying_out({"pointwise", "precision", "states"}).step == (
        TensorParallel(), Precision(), LossHeads(), Parts(), WideProducts(), TiledGradients(), Pointwise(),
        Shard(), Pipeline(), States(),
    )  # fmt: skip


def test_each_says_whether_it_changes_numbers() -> None:
    assert {name for name, cls in TRAINING_PASSES.items() if not cls.exact} == {
        "compress",
        "frozen",
        "int8",
        "precision",
    }


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("offload.host=much", r"offload\.host"),
        ("offload.bandwidth=0", r"offload\.bandwidth = '0' must be at least one byte"),
        ("offload.share=2", r"offload\.share"),
        ("compress.share=-1", r"compress\.share"),
        ("bitmask.share=1.5", r"bitmask\.share"),
        ("compress.bits=3", r"compress\.bits = 3: give some of 8, 4, 2"),
        ("compress.bits=few", r"a list of whole numbers like 8,4"),
        ("offload.disk=1GiB", r"offload\.folder"),
        ("ofload", "Did you mean 'offload'"),
    ],
)
def test_a_wrong_spec_says_what_is_allowed(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_training_passes([spec])


def test_nothing_asked_changes_nothing() -> None:
    cut = cut_model("gpt2")[2]
    assert proposed(Levers()) is cut
    assert all(not block.problem.forms for block in cut.blocks)


def test_forms_have_the_bytes_and_the_seconds_of_their_copies() -> None:
    cut = proposed(EVERY)
    block = cut.blocks[1]
    counted = 0
    for name, forms in block.problem.forms.items():
        size, value = block.problem.nbytes[name], cut.maker[block.values[name]].meta["val"]
        found = {f.name: f for f in forms}
        away = found["offload"]
        assert (away.host, away.held, away.staged, away.packed) == (size, 0, 0, 0)
        assert away.out == pytest.approx(size * 1e-9 + 1e-6)
        assert away.back == pytest.approx(size * 2e-9 + 1e-6)
        if "compress" in found:
            counted += 1
            assert value.dtype == torch.float32
            packed = packed_bytes(value.numel())
            assert found["compress"].held == found["compress+offload"].host == packed < size
            assert found["compress"].seconds == pytest.approx(2 * (value.numel() * 3e-10 + 1e-6))
            assert found["compress"].workspace > 0
    assert counted > 5
    assert not set(block.problem.forms) & set(block.problem.leaving)
    masks = [
        n
        for n, s in block.values.items()
        if cut.maker.get(s) is not None and cut.maker[s].meta["val"].dtype == torch.bool
    ]
    assert masks
    assert all([f.name for f in block.problem.forms[n]] == ["offload"] for n in masks)


def test_values_in_fewer_bits_are_forms_beside_those_in_8_on_the_device_and_on_the_host() -> None:
    cut = proposed(Levers(values=(Offload(share=0.0), Compress(share=0.0, bits=(2, 8, 4)))))
    block = cut.blocks[1]
    several = {
        name: {f.name: f for f in forms} for name, forms in block.problem.forms.items() if len(forms) > 1
    }
    assert several
    for name, found in several.items():
        assert list(found) == [
            "offload",
            *(f"compress{bits}{on}" for bits in ("", "4", "2") for on in ("", "+offload")),
        ]
        count = cut.maker[block.values[name]].meta["val"].numel()
        for bits in (8, 4, 2):
            form = found[f"compress{bits if bits < 8 else ''}"]
            assert form.held == form.packed == -(-count * bits // 8) + 8 * -(-count // 256)
            assert found[f"{form.name}+offload"].host == form.held


def test_masks_alone_are_held_as_bits_in_an_eighth_of_their_bytes() -> None:
    rates = replace(RATES, pack={"bitmask": 1e-10})
    cut = proposed(Levers(values=(Offload(share=0.0), Bitmask(share=0.0))), rates)
    block, found = cut.blocks[1], 0
    for name, forms in block.problem.forms.items():
        value, ways = cut.maker[block.values[name]].meta["val"], {f.name: f for f in forms}
        assert set(ways) == (
            {"offload", "bitmask", "bitmask+offload"} if value.dtype == torch.bool else {"offload"}
        )
        if form := ways.get("bitmask"):
            found += 1
            assert form.held == form.packed == ways["bitmask+offload"].host == -(-value.numel() // 8)
            assert form.seconds == pytest.approx(2 * (value.numel() * 1e-10 + 1e-6))
    assert found


def test_what_is_on_its_way_is_staged_where_copies_run_beside_the_compute() -> None:
    cut = proposed(EVERY, Rates(out=1e-9, back=1e-9, host_bytes=None, beside=True))
    block = cut.blocks[1]
    assert cut.host.beside
    assert block.problem.hidden is not None
    assert len(block.problem.hidden) == len(block.backward)
    assert sum(block.problem.hidden) > 0
    for name, forms in block.problem.forms.items():
        assert {f.staged for f in forms if f.name == "offload"} == {block.problem.nbytes[name]}


def test_equal_blocks_stay_of_one_kind_and_others_become_another() -> None:
    plain, cut = cut_model("gpt2")[2], proposed(EVERY)
    assert len({b.stage.kind for b in plain.blocks}) == len({b.stage.kind for b in cut.blocks})
    assert not {b.stage.kind for b in plain.blocks} & {b.stage.kind for b in cut.blocks}


def test_small_values_are_left_out_and_scarce_host_memory_counts() -> None:
    few = proposed(Levers(values=(Offload(share=0.1),)))
    many = proposed(EVERY)
    assert 0 < sum(len(b.problem.forms) for b in few.blocks) < sum(len(b.problem.forms) for b in many.blocks)
    assert not any(b.problem.scarce for b in many.blocks)
    least = Offload(host="10KB", share=0.0, bandwidth="1GB")
    tight = proposed(Levers(values=(least,)), RATES | least.rates(load_target("cpu-generic"), False))
    assert tight.host.limit == 10_000
    assert all(b.problem.scarce for b in tight.blocks if b.problem.forms)


def test_subsets_leave_the_others_out() -> None:
    assert EVERY.names == ("recompute", "offload", "compress")
    alone = EVERY.only(["offload"])
    assert alone.names == ("offload",)
    cut = proposed(alone)
    assert not any(op.repeatable for block in cut.blocks for op in block.problem.forward)
    assert all(
        [f.name for f in forms] == ["offload"] for b in cut.blocks for forms in b.problem.forms.values()
    )
    assert not any(block.problem.forms for block in proposed(EVERY.only(["recompute"])).blocks)
    with pytest.raises(UnknownNameError, match="Did you mean 'offload'"):
        EVERY.only(["ofload"])


def test_options_say_what_they_move_and_become_schedules_with_their_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("effcompile.passes.training.checkpoint.SECONDS_PER_BLOCK", 0.1)
    cut, checkpoint = proposed(EVERY), Checkpoint()
    fronts = {block.stage.kind: checkpoint.front(block) for block in cut.blocks}
    options = {kind: front.options for kind, front in fronts.items()}
    assert all(o.label for of in options.values() for o in of)
    assert any("offload" in o.label for of in options.values() for o in of)
    assert all(of[0].label == "keep everything" and not of[0].forms for of in options.values())
    chain = checkpoint.chain(cut, options, None)
    recompute = {block.stage.kind: checkpoint.options(block) for block in cut_model("gpt2")[2].blocks}
    assert smallest_budget(chain) < smallest_budget(checkpoint.chain(cut_model("gpt2")[2], recompute, None))
    for pick in (min, max):
        chosen = [pick(options[b.stage.kind], key=lambda o: o.host_bytes) for b in cut.blocks]
        emitted, trace = carried_out(cut, chosen, ())
        assert trace.host_bytes == sum(o.host_bytes for o in chosen)
        assert bool(emitted.moves) == any(o.forms for o in chosen)
