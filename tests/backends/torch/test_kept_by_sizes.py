"""What follows from the sizes of a call alone is computed once for them, and nothing else is."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import effcompile
from effcompile.backends.torch.called import Called
from effcompile.backends.torch.kept_by_sizes import KeptBySizes, kept_by_sizes
from effcompile.backends.torch.tidy import without_asserts
from effcompile.ir.of_sizes import OfSizes, of_sizes

aten = torch.ops.aten


class Biased(nn.Module):
    """Attention-like scores with a learned bias of distances, and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(64, 1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1])
        bias = self.table((at[:, None] - at).abs().clamp(max=63)).squeeze(-1)
        scores = (self.linear(x) @ x.mT + bias).masked_fill(at[:, None] < at, -1e4)
        return scores.softmax(-1) @ x


def exported(model: nn.Module, *args: torch.Tensor, free: bool = True) -> torch.fx.GraphModule:
    shapes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} if free else None
    program = torch.export.export(model.eval(), args, dynamic_shapes=[shapes for _ in args])
    module = program.module(check_guards=False)
    assert isinstance(module, torch.fx.GraphModule)
    without_asserts(module.graph)
    return module


def kept_of(executable: Any) -> KeptBySizes | None:
    called = executable._lowered._called
    assert isinstance(called, Called)
    return called._kept


def test_positions_and_masks_follow_from_sizes_and_the_rest_does_not() -> None:
    graph = exported(Biased(), torch.randn(2, 12, 8)).graph
    found = of_sizes(graph)
    assert {node.target for node in found.sizes} == {aten.sym_size.int}
    names = {str(node.target) for node in found.nodes}
    assert any("arange" in name for name in names) and any("embedding" in name for name in names)
    assert not any("linear" in name or "softmax" in name or "matmul" in name for name in names)
    assert len(found.results) == 2 and found.nbytes() == 12 * 12 * (4 + 1)


def test_operators_are_those_that_nothing_else_needs() -> None:
    graph = exported(Biased(), torch.randn(2, 12, 8)).graph
    found = of_sizes(graph)
    alone = found.operators()
    assert set(found.results) <= alone <= set(found.nodes)
    assert all(user in alone for node in alone - set(found.results) for user in node.users)


class Odd(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.weight = way, nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> Any:
        at = torch.arange(x.shape[1]).float() * 2
        if self.way == "random":
            return x + torch.rand(x.shape[1]).mul(2).exp()
        if self.way == "weights":
            return x @ (self.weight.abs() * 2).exp()
        if self.way == "written":
            return x.clone().add_(at.sin().cos().exp())
        if self.way == "returned":
            return x + at, at.sin().exp().view(-1, 1)
        assert self.way == "unset"
        return x + torch.empty(x.shape[1]).mul(0).exp()


@pytest.mark.parametrize("way", ["random", "weights", "written", "unset"])
def test_nothing_is_kept_of(way: str) -> None:
    assert of_sizes(exported(Odd(way), torch.randn(4, 16)).graph) == OfSizes()


def test_what_a_caller_receives_is_its_own() -> None:
    model = Odd("returned")
    module = exported(model, torch.randn(4, 16))
    kept = kept_by_sizes(module, 1 << 20)
    assert kept is not None and [tuple(value.shape) for value in kept(16)] == [(16,)], "what is added to x"
    x = torch.randn(4, 16)
    for _ in range(3):
        sums, shown = module(x)
        torch.testing.assert_close((sums, shown), model(x), rtol=0, atol=0)
        sums.zero_()
        shown.zero_()


@pytest.mark.parametrize("free", [True, False])
def test_kept_values_are_the_models_at_all_sizes(free: bool) -> None:
    model = Biased()
    module = exported(model, torch.randn(2, 12, 8), free=free)
    kept = kept_by_sizes(module, 1 << 20)
    assert kept is not None and not any("embedding" in str(n.target) for n in module.graph.nodes)
    for rows, length in [(2, 12)] if not free else [(2, 12), (3, 7), (2, 12), (5, 30), (2, 12)]:
        x = torch.randn(rows, length, 8)
        torch.testing.assert_close(module(x), model(x), rtol=0, atol=0)
    assert len(kept._kept) == (3 if free else 1)
    assert kept.nbytes == sum(n * n * 5 for n in ((12, 7, 30) if free else (12,)))


def test_no_more_is_kept_than_may_be_the_newest_first() -> None:
    module = exported(Biased(), torch.randn(2, 12, 8))
    kept = kept_by_sizes(module, 1000)
    assert kept is not None
    for length in (10, 8, 6, 20, 4):  # 500, 320, 180, 2000, 80 bytes
        module(torch.randn(2, length, 8))
        assert kept.nbytes <= 1000
    assert [sizes[-1] for sizes in kept._kept] == [8, 6, 4]
    for length in range(2, 12):
        module(torch.randn(2, length, 8))
    many = kept_by_sizes(exported(Biased(), torch.randn(2, 12, 8)), 1 << 30)
    assert many is not None
    for length in range(1, 30):
        many(length)
    assert len(many._kept) == 8


MODELS: dict[str, Any] = {
    "t5": lambda: transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    ),
    "gpt2": lambda: transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, use_cache=False)
    ),
    "llama": lambda: transformers.LlamaModel(
        transformers.LlamaConfig(
            vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, use_cache=False,
        )
    ),
    "bert": lambda: transformers.BertModel(
        transformers.BertConfig(
            vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def planned() -> Any:
    found = dict[str, Any]()

    def of(name: str, **goal: Any) -> tuple[nn.Module, Any]:
        key = f"{name} {goal}"
        if key not in found:
            torch.manual_seed(0)
            model = MODELS[name]().eval()
            ids = torch.randint(0, 99, (2, 12))
            found[key] = (
                model,
                effcompile.optimize(model, (ids,), backend="torch-eager", **{"max_error": 0.05, **goal}),
            )
        return found[key]

    return of


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output.last_hidden_state


@pytest.mark.parametrize("name", MODELS)
def test_a_planned_model_gives_the_same_at_each_call(name: str, planned: Any) -> None:
    """Nothing that a call writes into is what another finds, and results are the caller's to write into."""
    model, executable = planned(name)
    calls = [torch.randint(0, 99, shape) for shape in ((2, 12), (1, 5), (2, 12), (3, 20), (2, 12), (1, 5))]
    wanted = [first(model(ids)).detach() for ids in calls]
    kept = kept_of(executable)
    seen = {}
    for _ in range(2):
        for ids, right in zip(calls, wanted, strict=True):
            result = first(executable(ids))
            assert (result - right).norm() / right.norm() < 0.1
            key = ids.numpy().tobytes()
            assert torch.equal(result, seen.setdefault(key, result.clone()))
            with torch.no_grad():
                result.zero_()
    if name != "bert":  # whose positions are one lookup
        assert kept is not None and kept._kept


def test_values_that_are_kept_are_not_written(planned: Any) -> None:
    for name in MODELS:
        _, executable = planned(name)
        ids, kept = torch.randint(0, 99, (2, 12)), kept_of(executable)
        executable(ids)
        if kept is not None:
            before = copy.deepcopy(kept._kept)
            for _ in range(3):
                executable(torch.randint(0, 99, (2, 12)))
            for sizes, values in before.items():
                torch.testing.assert_close(kept._kept[sizes], values, rtol=0, atol=0)


def test_threads_and_a_limit_of_memory(planned: Any) -> None:
    model, executable = planned("t5")
    calls = [torch.randint(0, 99, (1, n)) for n in range(3, 27)] * 2
    wanted = [first(model(ids)).detach() for ids in calls]
    with ThreadPoolExecutor(8) as pool:
        for result, right in zip(pool.map(lambda ids: first(executable(ids)), calls), wanted, strict=True):
            assert (result - right).norm() / right.norm() < 0.1
    _, limited = planned("t5", memory="1GiB")
    limited(calls[0])
    assert kept_of(limited) is None


def test_what_is_kept_counts_and_is_kept_where_the_plan_is_loaded(planned: Any, tmp_path: Path) -> None:
    _, executable = planned("llama")
    ids = torch.randint(0, 99, (2, 12))
    lowered, kept = executable._lowered, kept_of(executable)
    assert kept is not None
    kept._most, kept._kept = 1 << 20, {}
    peak, held = lowered.peak_bytes([ids]), kept.nbytes
    kept._kept = {(0, number): (torch.empty(250),) for number in range(4)}
    assert lowered.peak_bytes([ids]) == peak + 4000, "four other sizes"
    assert held > 0 and kept.nbytes == held + 4000
    executable.save(tmp_path)
    loaded = effcompile.load(tmp_path)
    for _ in range(2):
        torch.testing.assert_close(first(loaded(ids)), first(executable(ids)), rtol=0, atol=0)
    pickled = copy.deepcopy(executable)
    torch.testing.assert_close(first(pickled(ids)), first(executable(ids)), rtol=0, atol=0)


def test_a_watched_call_sees_all_operators(planned: Any) -> None:
    _, executable = planned("t5")
    seen = set[str]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        executable(torch.randint(0, 99, (2, 12)))
    assert any("arange" in name for name in seen)
