"""Operators run alone: time, workspace, what counts as the same one; and the roofline's flops and bytes."""

import dataclasses
import itertools
import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from effcompile.estimate import operators
from effcompile.estimate.operators import Measured, key, made_up, measure
from effcompile.estimate.roofline import flops, moved_bytes, roofline_seconds
from effcompile.machine import cold
from effcompile.machine.target import Target
from effcompile.ops import block_sparse, loss_head
from effcompile.ops.block_sparse_dense import dense_weight
from effcompile.sparse import BlockPattern

aten = torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node that calls `target`; tensors among its arguments become placeholders."""
    graph = fx.Graph()

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value.to("meta") if value.device.type == "meta" else value
        return node

    node = graph.call_function(
        target, fx.node.map_aggregate(args, given), fx.node.map_aggregate(kwargs, given)
    )
    with torch.no_grad():
        node.meta["val"] = target(*args, **kwargs)
    return node


def test_every_operator_is_run_once_and_kept() -> None:
    a, b = torch.randn(8, 4), torch.randn(4, 6)
    nodes = [
        call(aten.mm.default, a, b),
        call(aten.mm.default, a + 1, b),
        call(aten.mm.default, a, torch.randn(4, 5)),
    ]
    known: dict[str, Measured] = {}
    told: list[tuple[int, int]] = []
    measure(nodes, known, seconds_each=0.0, progress=lambda done, of: told.append((done, of)))
    assert len(known) == 2 and all(m.seconds > 0 for m in known.values()) and told == [(0, 2), (1, 2)]
    before = dict(known)
    measure(nodes, known, seconds_each=0.0)
    assert known == before


def test_keys_tell_apart_what_may_take_another_time() -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    nodes = [
        call(aten.mm.default, a, b), call(aten.mm.default, a.T, b),
        call(aten.mm.default, a.double(), b.double()), call(aten.mm.default, a[:4], b),
        call(aten.add.Tensor, a, b), call(aten.add.Tensor, a, b, alpha=2), call(aten.softmax.int, a, 0),
        call(aten.softmax.int, a, 1), call(aten.mm.default, a.to("meta"), b.to("meta")),
    ]  # fmt: skip
    assert len({key(node) for node in nodes}) == len(nodes)
    assert key(call(aten.mm.default, a, b)) == key(call(aten.mm.default, a + 1, b))
    listed = [call(aten.cat.default, [a, b]), call(aten.cat.default, [a[:4], b])]
    assert key(listed[0]) != key(listed[1])


def test_the_workspace_is_what_the_kernel_allocates_beyond_its_result() -> None:
    def widened(x: torch.Tensor) -> torch.Tensor:
        # two of (64, 8) fp64 at once, before there is the result of 8 × 8 bytes
        return x.double().exp().sum(0)

    x = torch.randn(64, 8)
    known: dict[str, Measured] = {}
    measure([call(widened, x), call(aten.mul.Tensor, x, x)], known, seconds_each=0.0)
    assert [m.workspace for m in known.values()] == [2 * x.numel() * 8 - 8 * 8, 0]


def test_operands_that_overlap_themselves_are_run_too() -> None:
    """The gradient of a sum is one number, expanded."""
    expanded = torch.ones(()).expand(64, 8)
    known: dict[str, Measured] = {}
    measure([call(aten.mul.Tensor, expanded, torch.randn(64, 8))], known, seconds_each=0.0)
    assert len(known) == 1


def test_measuring_leaves_the_random_generator_alone() -> None:
    known: dict[str, Measured] = {}
    nodes = [
        call(aten.native_dropout.default, torch.ones(8), 0.5, True),
        call(aten.exp.default, torch.ones(8)),
    ]
    before = torch.get_rng_state()
    measure(nodes, known, seconds_each=0.0)
    assert len(known) == 2 and torch.equal(torch.get_rng_state(), before)


def test_a_view_and_an_operator_in_place_make_nothing_and_need_nothing() -> None:
    known: dict[str, Measured] = {}
    x = torch.randn(16, 4)
    measure([call(aten.t.default, x), call(aten.add_.Tensor, x.clone(), x)], known, seconds_each=0.0)
    assert [m.workspace for m in known.values()] == [0, 0]


def test_a_recurrent_layers_workspace_is_made_by_the_layer() -> None:
    """oneDNN reads it as its own, so that made-up bytes end the process."""
    x, state, weight, bias = (
        torch.randn(5, 4, 16),
        torch.randn(1, 4, 16),
        torch.randn(64, 16),
        torch.randn(64),
    )
    forward = call(
        aten.mkldnn_rnn_layer.default,
        x,
        weight,
        weight,
        bias,
        bias,
        state,
        state,
        False,
        [],
        2,
        16,
        1,
        True,
        False,
        False,
        True,
    )
    graph, results = forward.graph, forward.meta["val"]
    parts = [graph.call_function(operator.getitem, (forward, i)) for i in range(4)]
    for part, value in zip(parts, results, strict=True):
        # as torch's own fake kernel says
        part.meta["val"] = torch.empty(0, dtype=torch.uint8) if part is parts[3] else value
    given = forward.args[:7]
    backward = graph.call_function(
        aten.mkldnn_rnn_layer_backward.default,
        (
            *given,
            *parts[:3],
            parts[0],
            parts[1],
            parts[2],
            False,
            2,
            16,
            1,
            True,
            True,
            False,
            [],
            False,
            parts[3],
        ),
    )
    backward.meta["val"] = results[:3]
    known: dict[str, Measured] = {}
    measure([backward, call(aten.exp.default, x)], known, seconds_each=0.0)
    # torch hands on an undefined tensor where oneDNN needs none
    assert len(known) == 1 + (results[3] is not None)


def test_an_operator_that_cannot_run_alone_is_left_out() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if not bool((x == 7).all()):
            raise ValueError("only sevens")
        return x + 1

    known: dict[str, Measured] = {}
    measure(
        [call(picky, torch.full((3,), 7.0)), call(aten.exp.default, torch.ones(3))], known, seconds_each=0.0
    )
    assert len(known) == 1


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_made_up_operands_have_the_shape_dtype_and_strides(dtype: torch.dtype) -> None:
    for like in (
        torch.ones(3, 5).to(dtype),
        torch.ones(5, 3).to(dtype).T,
        torch.ones(1, 4).to(dtype).expand(3, 4),
    ):
        found = made_up(like)
        assert (found.shape, found.dtype, found.stride()) == (like.shape, like.dtype, like.stride())
        assert dtype.is_floating_point or not bool(found.any())
    assert made_up(3) == 3 and made_up(None) is None


def test_indices_that_are_made_up_are_valid() -> None:
    table, ids, labels = torch.randn(10, 4), torch.randint(0, 10, (3,)), torch.tensor([1, 2])
    losses = torch.log_softmax(torch.randn(2, 5), 1)
    known: dict[str, Measured] = {}
    nodes = [
        call(aten.embedding.default, table, ids),
        call(aten.nll_loss_forward.default, losses, labels, None, 1, -100),
    ]
    measure(nodes, known, seconds_each=0.0)
    assert len(known) == 2


def test_the_random_state_of_attentions_backward_lies_where_its_kernel_reads_it() -> None:
    """CUDA's memory-efficient kernel reads it on the host: on the device, as its fake values say, the process
    would end.
    """
    target = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    names = [argument.name for argument in target._schema.arguments if not argument.kwarg_only]
    with FakeTensorMode(allow_non_fake_inputs=True):
        args = tuple(
            torch.empty(2, device="cuda") if "Tensor" in str(a.type) else 0 for a in target._schema.arguments
        )[: len(names)]
        placed = operators._with_seeds_on_host(target, args)
        devices = {
            name: value.device.type
            for name, value in zip(names, placed, strict=True)
            if isinstance(value, torch.Tensor)
        }
        assert {name for name, device in devices.items() if device == "cpu"} == {
            "philox_seed",
            "philox_offset",
        }
        assert operators._with_seeds_on_host(torch.ops.aten.add.Tensor, args) is args


def test_seconds_of_a_long_call_are_the_faster_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is watched for its bytes is one of the two: an operator of seconds is run twice."""
    clock = iter([0.0, 5.0, 5.0, 8.0, 8.0, 12.0])
    monkeypatch.setattr(operators, "perf_counter", lambda: next(clock))
    calls: list[torch.Tensor] = []
    monkeypatch.setattr(operators, "_operands", lambda node: ((torch.ones(4),), {}))
    node = fx.Graph().call_function(lambda x: calls.append(x) or x + 1, ())
    assert operators._measure(node, 0.05).seconds == 3.0 and len(calls) == 2
    assert operators._seconds(lambda: None, 0.05, 3.5, 0, None) == 3.5


@pytest.mark.parametrize(("even", "calls"), [((True, True), 1), ((True, False), 2), ((False, True), 2)])
def test_a_long_call_between_two_looks_at_a_machine_that_runs_as_it_can_is_enough(
    even: tuple[bool, bool], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looks, made = iter([0.0, 5.0, 5.0, 8.0]), iter(even), list[None]()
    monkeypatch.setattr(operators, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(operators, "_even", lambda: next(looks))
    monkeypatch.setattr(operators, "_operands", lambda node: ((torch.ones(4),), {}))
    node = fx.Graph().call_function(lambda x: made.append(None) or x + 1, ())
    assert operators._measure(node, 0.05).seconds == (5.0 if calls == 1 else 3.0) and len(made) == calls


# ------------------------------------------------------------------ the roofline


def target(**changes: Any) -> Target:
    plain = Target(
        name="made-up", description="", device="cpu", cores=1, memory_bytes=1 << 30, memory_bandwidth=1e9,
        link_bandwidth=1e9, peak_flops={"fp32": 1e12},
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def test_flops_of_products_are_2mnk() -> None:
    a, b, c = torch.randn(7, 5), torch.randn(5, 3), torch.randn(3)
    assert flops(call(aten.mm.default, a, b)) == 2 * 7 * 5 * 3
    assert flops(call(aten.addmm.default, c, a, b)) == 2 * 7 * 5 * 3
    assert flops(call(aten.bmm.default, torch.randn(4, 7, 5), torch.randn(4, 5, 3))) == 4 * 2 * 7 * 5 * 3
    assert flops(call(aten.exp.default, a)) == 0


def test_flops_of_attention_grow_with_the_square_of_the_length() -> None:
    def attention(length: int) -> float:
        q = torch.randn(1, 2, length, 8)
        return flops(call(aten.scaled_dot_product_attention.default, q, q, q))

    assert attention(32) == 4 * attention(16) == 2 * (2 * 2 * 32 * 32 * 8)


def test_flops_of_the_cpus_attention_and_of_our_loss_heads_are_counted() -> None:
    q = torch.randn(1, 2, 16, 8)
    forward = call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q, 0.0, True)
    out, sums = forward.meta["val"]
    backward = call(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, out, q, q, q, out, sums, 0.0, True
    )
    assert flops(forward) == 2 * (2 * 2 * 16 * 16 * 8) and flops(backward) == 2.5 * flops(forward)

    x, weight, labels = torch.randn(6, 4), torch.randn(10, 4), torch.zeros(6, dtype=torch.long)
    common = (1, -100, 1.0, 1.0, False, 2)
    once = 2 * 6 * 10 * 4
    head = call(loss_head.loss_head_forward._opoverload, x, weight, None, labels, *common)
    assert flops(head) == once
    assert (
        flops(
            call(
                loss_head.loss_head_gradients._opoverload,
                x,
                weight,
                None,
                labels,
                *common,
                [True, True, False],
            )
        )
        == 3 * once
    )
    grad, sums = torch.ones(()), head.meta["val"][1]
    again = (grad, x, weight, None, labels, sums, *common, [True, False, False])
    assert flops(call(loss_head.loss_head_backward._opoverload, *again)) == 2 * once


def test_moved_bytes_count_operands_and_results_once() -> None:
    a = torch.randn(8, 4)
    assert moved_bytes(call(aten.exp.default, a)) == 2 * a.numel() * 4
    assert moved_bytes(call(aten.mm.default, a, torch.randn(4, 2))) == 4 * (32 + 8 + 16)
    assert moved_bytes(call(aten.cat.default, [a, a.double().float()])) == 4 * (32 + 32 + 64)
    assert moved_bytes(call(aten.max.dim, a, 0)) == 4 * (32 + 4) + 8 * 4


def test_seconds_are_the_larger_of_both_laws_plus_the_launch() -> None:
    machine = target(peak_flops={"fp32": 1e12}, memory_bandwidth=1e9, efficiency=0.5, launch_seconds=1e-6)
    small, wide = call(aten.exp.default, torch.ones(1000)), torch.randn(64, 64)
    assert roofline_seconds(small, machine) == pytest.approx(8000 / 1e9 / 0.5 + 1e-6)
    slow = dataclasses.replace(machine, peak_flops={"fp32": 1e6})
    assert roofline_seconds(call(aten.mm.default, wide, wide), slow) == pytest.approx(
        2 * 64**3 / 1e6 / 0.5 + 1e-6
    )


def test_each_dtype_has_its_peak_and_a_missing_one_is_counted_as_fp32() -> None:
    machine = target(
        peak_flops={"fp32": 1e6, "bf16": 2e6}, memory_bandwidth=1e15, efficiency=1.0, launch_seconds=0.0
    )
    wide = torch.randn(64, 64)
    seconds = {
        d: roofline_seconds(call(aten.mm.default, wide.to(d), wide.to(d)), machine)
        for d in (torch.float32, torch.bfloat16)
    }
    assert seconds[torch.float32] == pytest.approx(2 * seconds[torch.bfloat16])
    half = call(aten.mm.default, wide.half().to("meta"), wide.half().to("meta"))
    assert roofline_seconds(half, machine) == pytest.approx(seconds[torch.float32])


def test_a_machine_without_any_peak_is_bound_by_bytes() -> None:
    machine = target(peak_flops={}, memory_bandwidth=1e9, efficiency=1.0, launch_seconds=0.0)
    wide = torch.randn(8, 8)
    assert roofline_seconds(call(aten.mm.default, wide, wide), machine) == pytest.approx(3 * 256 / 1e9)


def test_an_unknown_operator_goes_by_its_bytes() -> None:
    def custom(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    machine = target(memory_bandwidth=1e9, efficiency=1.0, launch_seconds=0.0)
    assert roofline_seconds(call(custom, torch.ones(10)), machine) == pytest.approx(80 / 1e9)


def test_block_sparse_products_are_timed_with_all_their_blocks_and_counted() -> None:
    pattern = BlockPattern.random(24, 40, 8, 0.5)
    x, grad, values = torch.randn(6, 40), torch.randn(6, 24), torch.ones(pattern.nnz, 8, 8)
    ours = torch.ops.effcompile
    calls: list[tuple[Any, list[Any]]] = [
        (ours.block_sparse_linear.default, [x, values, *pattern.indices, None]),
        (ours.block_sparse_grad_input.default, [grad, values, *pattern.indices]),
        (ours.block_sparse_grad_values.default, [grad, x, pattern.crow, pattern.col]),
    ]
    for target, args in calls:
        assert flops(call(target, *args)) == 2 * 6 * values.numel()
        made = block_sparse.with_indices(target, [made_up(value) for value in args])
        assert [getattr(a, "shape", a) for a in made] == [getattr(a, "shape", a) for a in args] and int(
            made[2][-1]
        ) == pattern.nnz
        target(*made)  # in range: the kernels check
        known: dict[str, Measured] = {}
        measure([call(target, *args)], known)
        assert len(known) == 1
    assert (
        float(dense_weight(values, *block_sparse.with_indices(calls[0][0], calls[0][1])[2:4], 40).sum())
        == values.numel()
    )
    other = [x, x.T]
    assert block_sparse.with_indices(aten.mm.default, other) is other


@pytest.mark.parametrize(
    ("operator_", "read"),
    [(aten.add.Tensor, True), (aten.mm.default, False)],
)
def test_only_one_bound_by_memory_is_timed_on_values_that_others_pushed_out(
    operator_: Any, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(cold, "evict", lambda nbytes: order.append(f"{nbytes} read"))
    monkeypatch.setattr(cold, "perf_counter", itertools.count(step=(1 << 20) / 1e9).__next__)  # 1 GB/s
    monkeypatch.setattr(operators, "perf_counter", itertools.count(step=0.01).__next__)  # each call 10 ms
    side = 1 << (11 if read else 6)
    node = call(operator_, torch.randn(side, side), torch.randn(side, side))
    target = node.target
    node.target = lambda *args: (order.append("call"), target(*args))[1]
    known: dict[str, Measured] = {}
    measure([node], known, cold=1 << 20)
    (found,) = known.values()
    assert found.cold == 1 << 20
    asked, timed = order[:4], order[4:]
    assert asked == ["call", "call", "1048576 read", "1048576 read"]
    if read:
        assert len(timed) >= 4 and set(timed[::2]) == {"1048576 read"} and set(timed[1::2]) == {"call"}
    else:
        assert set(timed) == {"call"}


def test_in_a_step_that_the_caches_hold_nothing_is_pushed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "evict", lambda nbytes: pytest.fail("others were read"))
    known: dict[str, Measured] = {}
    measure([call(aten.add.Tensor, torch.randn(64), torch.randn(64))], known, seconds_each=0.0)
    assert [found.cold for found in known.values()] == [0]
