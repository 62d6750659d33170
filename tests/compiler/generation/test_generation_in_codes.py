"""Generation with weights of 4 and 8 bits by our kernels, what lies between attentions in one call each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from generation_models import captured, ids, tiny
from torch import fx, nn

import effcompile
from effcompile.backends import load_backend
from effcompile.backends.torch import regions
from effcompile.capture.generation import capture_step
from effcompile.compiler.generation.lower import lower_step
from effcompile.core.cost import Cost
from effcompile.core.goal import Goal
from effcompile.estimate import fake_quant
from effcompile.ir.figures import Certificate, Totals
from effcompile.ir.formats import LINEAR_FORMATS, Form
from effcompile.ir.plan import Decision, Plan
from effcompile.ops import row_program
from effcompile.passes.norm_gate_rotary import Rows
from effcompile.runtime.generation.executable import GenerationExecutable
from effcompile.runtime.generation.steps import CacheRoom
from effcompile.sites.parts import linears
from effcompile.sites.rows import row_sites

CONTEXT = 64
pytestmark = pytest.mark.skipif(not row_program.available(), reason="no kernels are compiled here")


def planned(family: str, model: nn.Module, step: Any) -> GenerationExecutable:
    """All linears in that format and all norms, gates and rotations fused: nothing is priced."""
    program = step.program
    forms = {site.site: Form(word="fused") for site in row_sites(program)}
    forms |= {site.site: Form(weights=LINEAR_FORMATS[family]) for site in linears(program)}
    decisions = tuple(
        Decision(
            site=site,
            kind="",
            option=form.name,
            baseline="",
            form=form,
            by="",
            cost=Cost(),
            baseline_cost=Cost(),
        )
        for site, form in forms.items()
    )
    nothing = Totals()
    proof = Certificate(
        status="", objective=0.0, bound=0.0, gap=0.0, sites=0, alternatives=0, seconds=0.0, solver=""
    )
    plan = Plan(
        model="", fingerprint="", parameters=0, goal=Goal.of(mode="generation", context=CONTEXT), target="",
        target_line="", backend="torch-eager", decisions=decisions, declined=(), certificate=proof,
        baseline=nothing, predicted=nothing,
    )  # fmt: skip
    program = (
        Rows()
        .apply(program, plan)
        .tagged({site: form for site, form in forms.items() if form.weights}, "quantize")
    )
    lowered, parts = lower_step(
        step, program, load_backend("torch-eager"), plan, CacheRoom(context=CONTEXT, chunk=32)
    )
    assert {site: parts["step"].applied[site].name for site in forms} == {
        site: form.name for site, form in forms.items()
    }
    return GenerationExecutable(
        model, step, lowered, replace(plan, settings=dict(parts["step"].settings)), parts
    )


def rounded(model: nn.Module, family: str) -> nn.Module:
    """A copy whose weights are those that codes stand for: the oracle, but for the rounding of
    activations.
    """
    held = LINEAR_FORMATS[family]
    copy = tiny("llama", num_hidden_layers=2)
    copy.load_state_dict(model.state_dict())
    for module in copy.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(fake_quant.weight(module.weight.detach(), held))
    return copy


@pytest.fixture(scope="module", params=["int4_groups", "int8_groups", "int8_token"])
def coded(request: pytest.FixtureRequest) -> tuple[str, nn.Module, GenerationExecutable]:
    model, step = captured("llama")
    return request.param, model, planned(request.param, model, step)


def logits(executable: Any, text: torch.Tensor, sizes: list[int], **more: Any) -> torch.Tensor:
    cache, at, parts = transformers.DynamicCache(config=executable.config), 0, []
    for size in sizes:
        parts.append(executable(text[:, at : at + size], past_key_values=cache, **more).logits)
        at += size
    return torch.cat(parts, 1)


def test_token_by_token_is_the_prompt_at_once(coded: tuple[str, nn.Module, GenerationExecutable]) -> None:
    family, model, executable = coded
    text = ids(2, 20)
    whole = logits(executable, text, [20])
    torch.testing.assert_close(logits(executable, text, [9, *[1] * 7, 3, 1]), whole, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        told = rounded(model, family)(text).logits
        exact = model(text).logits
    error = lambda a, b: float((a - b).norm() / b.norm())  # noqa: E731
    assert 1e-5 < error(whole, told) < 0.05 and (
        family != "int4_groups" or error(whole, told) < 0.5 * error(whole, exact)
    )


def test_but_for_attention_a_prompt_is_its_tokens_to_the_bit(
    coded: tuple[str, nn.Module, GenerationExecutable],
) -> None:
    """Linears (in AMX tiles from 9 rows on), norms, gates and rotations give a row what it has alone. So does
    an attention that takes one query after the other, which torch's over many does not.
    """
    executable = coded[2]
    graph, text = executable.lowered.many, ids(2, 40)
    assert isinstance(graph, fx.GraphModule)
    named = [n for n in graph.graph.nodes if getattr(n.target, "__name__", "") == "cached_attention"]
    at_once = named[0].target

    def one_by_one(query: torch.Tensor, keys: Any, values: Any, mask: torch.Tensor, *more: Any) -> Any:
        parts = zip(query.split(1, 2), mask.split(1, 2), strict=True)
        made = [at_once(q.contiguous(), keys, values, m.contiguous(), *more) for q, m in parts]
        return torch.cat(made, 2)

    try:
        for node in named:
            node.target = one_by_one
        graph.recompile()
        assert torch.equal(logits(executable, text, [40]), logits(executable, text, [1] * 40))
    finally:
        for node in named:
            node.target = at_once
        graph.recompile()


def test_all_layers_are_one_call(coded: tuple[str, nn.Module, GenerationExecutable]) -> None:
    graph = coded[2].lowered.run.graph  # type: ignore[attr-defined]
    kinds = Counter(type(node.target).__name__ for node in graph.nodes)
    names = Counter(getattr(node.target, "__name__", "") for node in graph.nodes)
    assert kinds["Region"] == 1 and names["append"] == names["cached_attention"] == 0
    assert names["rotary"] == names["swiglu"] == names["rms_norm"] == 0


def test_a_left_padded_row_is_the_row_alone(coded: tuple[str, nn.Module, GenerationExecutable]) -> None:
    row, mask = ids(1, 5), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    padded = torch.cat([torch.cat([torch.zeros(1, 4, dtype=torch.int64), row], 1), ids(1, 9, seed=3)])
    how: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    both = coded[2].generate(padded, attention_mask=mask, **how)
    assert torch.equal(both[:1, 4:], coded[2].generate(row, **how))
    assert torch.equal(both[1:], coded[2].generate(padded[1:], **how))


def test_many_rows_run_one_by_one(
    coded: tuple[str, nn.Module, GenerationExecutable], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ids(3, 12)
    few = logits(coded[2], text, [10, 1, 1])
    monkeypatch.setattr(regions, "FEW", 0)
    assert torch.equal(few, logits(coded[2], text, [10, 1, 1]))


def test_saved_and_opened_again(coded: tuple[str, nn.Module, GenerationExecutable], tmp_path: Path) -> None:
    coded[2].save(tmp_path / "out")
    opened = effcompile.load(tmp_path / "out")
    how: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    assert torch.equal(opened.generate(ids(2, 9), **how), coded[2].generate(ids(2, 9), **how))


def test_keys_are_read_once_for_a_group() -> None:
    """No value as large as keys repeated for each query's head is made: the step's graph has none."""
    model = tiny("llama", num_hidden_layers=1, num_attention_heads=8)
    executable = planned("int8_groups", model, capture_step(model))
    graph = executable.lowered.run.graph  # type: ignore[attr-defined]
    assert not [
        node
        for node in graph.nodes
        if node.target is torch.ops.aten.expand.default and len(node.args[1]) == 5
    ]
    text = ids(1, 14)
    with torch.no_grad():
        wanted = model(text).logits
    found = logits(executable, text, [6, *[1] * 8])
    assert float((found - wanted).norm() / wanted.norm()) < 0.03
