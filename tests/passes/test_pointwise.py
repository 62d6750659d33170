"""Element-wise fusion: what is fused, what the backward makes again, and that the step's numbers stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from generation_models import more
from step_helpers import assert_equal, eager, joint_step, run
from torch import fx, nn
from train_helpers import context

from effcompile.backends.torch.training import StepRunner
from effcompile.capture import capture_training
from effcompile.core.cost import Cost
from effcompile.estimate.storages import graph_storages
from effcompile.ir.footprint import Footprint
from effcompile.ir.roles import Entering, Enters, Leaves, Leaving, Roles
from effcompile.ir.step import Step
from effcompile.ops.fused import Fused
from effcompile.passes.training import pointwise
from effcompile.passes.training.accumulate import accumulate_embeddings
from effcompile.passes.training.base import Case, StepOutcome
from effcompile.passes.training.forms import forms, reapplied, told
from effcompile.passes.training.pointwise import Fusion, Pointwise, fuse
from effcompile.schedules.blocks import Blocks, split
from effcompile.schedules.emit import emit
from effcompile.schedules.into_blocks import cut_into_blocks
from effcompile.schedules.simulate import simulate
from effcompile.search.training.operator_costs import OperatorCosts

aten = torch.ops.aten
TOLERANCE = 1e-6


def model_of(name: str, dropout: float = 0.0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Two layers whose activations have more elements than the smallest kernel."""
    import transformers as hf

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    gpt2 = {
        "vocab_size": 97,
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 64,
        "n_positions": 256,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if name == "gpt2":
        model: nn.Module = hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2))
    elif name == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(**common, **drops))
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**common, num_key_value_heads=2, use_cache=False))
    ids = torch.randint(1, 97, (2, 160))
    return model.train(), {"input_ids": ids, "labels": ids}


def kernels(step: Step) -> list[fx.Node]:
    return [node for node in step.graph.nodes if isinstance(node.target, Fused)]


def crossing(step: Step) -> int:
    """Bytes of storages that the forward makes and the backward reads."""
    held = graph_storages(step.graph, lambda node: node.meta["val"])
    forward, backward = split(step)
    made = {s for node in forward for s in held.made[node]}
    return sum(
        held.nbytes[s]
        for s in made & {s for node in backward for arg in node.all_input_nodes for s in held.of[arg]}
    )


def cut(step: Step) -> Blocks:
    return cut_into_blocks(step, graph_storages(step.graph, lambda node: node.meta["val"]), lambda node: 1.0)


def trained(
    runner: StepRunner, model: nn.Module, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = runner.loss((), batch)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "dropout"), [*more(("gpt2", 0.0)), ("gpt2", 0.1), ("bert", 0.0), ("llama", 0.0)]
)
def test_numbers_stay_with_everything_kept_and_with_little(name: str, dropout: float) -> None:
    model, batch = model_of(name, dropout)
    step = fuse(capture_training(model, (), batch))[0]
    assert kernels(step) or name == "bert"  # from torch 2.14 on a dropout of 0 leaves nothing to fuse there
    torch.manual_seed(1)
    wanted = eager(model, batch)
    blocks = cut(step)
    everything = frozenset(blocks.held.nbytes) - blocks.held.fixed
    entering = frozenset(s for block in blocks.blocks for s in block.entering)
    for kept in (everything, entering):
        assert_equal(trained(StepRunner(model, step, emit(blocks, kept)), model, batch), wanted, TOLERANCE)
    assert all(node.target.fallback_reason is None for node in kernels(step))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_numbers_stay_node_by_node(name: str) -> None:
    model, batch = model_of(name)
    step = accumulate_embeddings(joint_step(model, batch))
    assert_equal(run(fuse(step)[0], model, batch), eager(model, batch), TOLERANCE)


def test_new_gelu_is_one_kernel_each_way_and_keeps_its_input_alone() -> None:
    model, batch = model_of("gpt2")
    step = capture_training(model, (), batch)
    changed, fusions = fuse(step)
    names = [str(node.target) for node in kernels(changed) if ".mlp.act" in str(node.meta)]
    assert len(names) == 4 and len(set(names)) == 2  # forward and backward of two equal blocks
    forward, backward = split(changed)
    later = [node for node in backward if isinstance(node.target, Fused) and "tanh" in str(node.target)]
    assert [len(node.args) for node in later] == [2, 2]  # the gradient, and GELU's input
    width = 2 * 160 * 256 * 4
    assert crossing(step) - crossing(changed) >= 2 * 3 * width
    assert all(
        aten.tanh.default is not node.target and aten.pow.Tensor_Scalar is not node.target
        for node in (*forward, *backward)
    )
    assert sum(len(f.members) for f in fusions) > 30


def test_storages_of_a_kernel_are_its_results() -> None:
    step = fuse(capture_training(*_asked("gpt2", 0.1)))[0]
    held = graph_storages(step.graph, lambda node: node.meta["val"])
    for node in kernels(step):
        assert sum(held.nbytes[s] for s in held.made[node]) == sum(_bytes(v) for v in _values(node))
        assert held.workspace[node] == 0


def test_every_value_has_the_layout_that_it_had() -> None:
    step = capture_training(*_asked("llama", 0.0))
    changed, _ = fuse(step)
    for old, new in zip(step.results, changed.results, strict=True):
        assert (old is None) == (new is None)
        if old is not None and new is not None:
            assert (
                old.meta["val"].stride() == new.meta["val"].stride()
                and old.meta["val"].shape == new.meta["val"].shape
            )


def test_random_operators_stay_and_keep_their_order() -> None:
    step = capture_training(*_asked("gpt2", 0.1))
    changed = fuse(step)[0]
    draws = [
        [n.name for n in s.graph.nodes if n.target is aten.native_dropout.default] for s in (step, changed)
    ]
    assert draws[0] == draws[1] and len(draws[0]) == 7


def test_writes_in_place_keep_their_readers() -> None:
    """relu(x)·2 read before and after x is doubled in place: the readers are not fused over the write."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.mul.Tensor, (x, 1.0))
    before = graph.call_function(aten.relu.default, (y,))
    write = graph.call_function(aten.mul_.Tensor, (y, 2.0))
    after = graph.call_function(aten.neg.default, (y,))
    total = graph.call_function(aten.add.Tensor, (before, after))
    end = graph.call_function(aten.sub.Tensor, (total, x))
    graph.output((end,))
    step = _step(graph, x, [y, before, write, after, total, end], torch.randn(200, 100))
    changed = fuse(step)[0]
    value = torch.randn(200, 100)
    torch.testing.assert_close(fx.Interpreter(changed.module).run(value)[0], value.relu() - 2 * value - value)
    assert [len(n.target.operators) for n in kernels(changed)] == [2]  # add and sub alone


def test_groups_do_not_wait_for_themselves() -> None:
    """a → sum → b with a → b: a and b may not be one kernel, for the sum stands between."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.exp.default, (x,))
    total = graph.call_function(aten.sum.dim_IntList, (a, [1], True))
    b = graph.call_function(aten.div.Tensor, (a, total))
    end = graph.call_function(aten.neg.default, (b,))
    graph.output((end,))
    step = _step(graph, x, [a, total, b, end], torch.randn(200, 100))
    changed = fuse(step)[0]
    value = torch.randn(200, 100)
    torch.testing.assert_close(fx.Interpreter(changed.module).run(value)[0], -value.softmax(1))
    assert [len(n.target.operators) for n in kernels(changed)] == [2]


def test_small_tensors_and_single_operators_are_left() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.exp.default, (x,))
    b = graph.call_function(aten.neg.default, (a,))
    graph.output((b,))
    assert not kernels(fuse(_step(graph, x, [a, b], torch.randn(16, 100)))[0])


def test_what_is_not_faster_is_left_out() -> None:
    step = capture_training(*_asked("gpt2", 0.0))

    class Prices(OperatorCosts):
        def priced(self, nodes: Sequence[fx.Node]) -> list[float]:
            return [9.0 if "tanh" in str(n.target) and isinstance(n.target, Fused) else 1.0 for n in nodes]

    here = replace(context(here=True), prices=Prices(target=context().target, here=True))
    (form,) = forms([Pointwise()], Case(step=step), here).cases
    left = [str(node.target) for node in kernels(form.step)]
    assert left and not any("tanh" in name for name in left)
    outcome = StepOutcome(
        case=form,
        cut=cut(form.step),
        seconds=1.0,
        unplanned_seconds=1.0,
        unplanned=Footprint,
        captured=Cost(),
    )
    decisions = told(form.taken[0], outcome, Cost(), Cost(), None)
    assert [len(d.settings) > 0 for d in decisions if d.option.endswith("one by one")] == [True]
    again = reapplied([Pointwise()], Case(step=step), decisions)
    assert [str(node.target) for node in kernels(again.step)] == left
    assert forms([Pointwise(enabled=False)], Case(step=step), here).cases == [Case(step=step)]


def _asked(name: str, dropout: float) -> tuple[Any, ...]:
    model, batch = model_of(name, dropout)
    return model, (), batch


def _values(node: fx.Node) -> tuple[torch.Tensor, ...]:
    value = node.meta["val"]
    return value if isinstance(value, tuple) else (value,)


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def _step(graph: fx.Graph, given: fx.Node, calls: Sequence[fx.Node], value: torch.Tensor) -> Step:
    """A step of one input without a backward, its values computed."""
    values = {given: value}
    for node in calls:
        values[node] = node.target(*fx.map_arg(node.args, values.__getitem__))  # type: ignore[operator]
    for node, made in values.items():
        node.meta["val"] = made
    return Step(
        name="step", module=fx.GraphModule(nn.Module(), graph), leaves=lambda args, kwargs: list(args),
        rebuild=lambda loss, shown: loss,
        roles=Roles({given: Enters(Entering.INPUT, "x")}, (Leaves(Leaving.LOSS),)),
    )  # fmt: skip


class Recurrence(nn.Module):
    """A state carried along a sequence whose tokens are looked up one by one, as state-space models do
    without their own kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 64 * 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decay, given = self.inner(x).unflatten(-1, (64, 16)).sigmoid(), x[..., None, :].tanh()
        state = torch.zeros(x.shape[0], 64, 16)
        for t in range(x.shape[1]):
            state = decay[:, t] * state + given[:, t]
        return state.square().mean()


def test_gradients_of_a_sequences_steps_are_added_up_one_after_the_other() -> None:
    torch.manual_seed(0)
    step = capture_training(Recurrence(), (), {"x": torch.randn(4, 12, 16)})
    fused, fusions = fuse(step)
    assert not [f for f in fusions if all(member.target is aten.add.Tensor for member in f.members)]

    def peak(step: Step) -> int:
        blocks = cut(step)
        return simulate(blocks, emit(blocks, blocks.decidable)).footprint.peak_bytes

    assert peak(fused) <= peak(step)


def test_all_prices_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after each measurement it is asked what else the machine does; that of a kernel is weighed
    against those of its own members.
    """
    monkeypatch.setattr(pointwise, "compile_together", lambda kernels: None)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first, second = ([graph.call_function(torch.relu, (x,)) for _ in range(n)] for n in (2, 3))
    fusions = [Fusion(node=graph.call_function(torch.exp, (x,)), members=tuple(g)) for g in (first, second)]
    seconds = {**dict.fromkeys(first, 1.0), **dict.fromkeys(second, 2.0)}
    seconds |= {fusions[0].node: 2.0, fusions[1].node: 5.9}
    asked: list[list[torch.fx.Node]] = []

    def price(nodes: Sequence[torch.fx.Node]) -> list[float]:
        asked.append(list(nodes))
        return [seconds[node] for node in nodes]

    assert pointwise._slow(fusions, price) == fusions[:1] and len(asked) == 1
    assert pointwise._slow([], price) == []
