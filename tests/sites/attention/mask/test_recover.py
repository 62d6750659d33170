"""Masks in graphs: of Hugging Face's models, and written in every way that we know of; compared with the mask
itself at fresh inputs.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch
from attention_helpers import SideOperand, captured, operands
from torch import Tensor, nn

from effcompile.capture import capture
from effcompile.ir.program import Program
from effcompile.report.masks import mask_words
from effcompile.sites.attention.mask.evaluate import evaluate, placeholders
from effcompile.sites.attention.mask.graph_mask import GraphMask
from effcompile.sites.attention.mask.recover import recover_mask

LOWEST = torch.finfo(torch.float32).min


def recovered(program: Program, operand: SideOperand) -> GraphMask:
    return recover_mask(
        program,
        operand.node,
        sense=operand.sense,
        q_len=operand.q_len,
        k_len=operand.k_len,
        fill=operand.fill,
        dtype=torch.float32,
    )


def told(mask: GraphMask) -> str:
    return mask_words(mask.form)


def only(program: Program) -> tuple[GraphMask, SideOperand]:
    (operand,) = operands(program)
    return recovered(program, operand), operand


def agrees(program: Program, operand: SideOperand, mask: GraphMask, **inputs: Tensor) -> None:
    """The form at these inputs is what the graph computes there: `inputs` replace those of the example by
    name.
    """
    values = {node: inputs.get(node.name, value) for node, value in placeholders(program).items()}
    found = evaluate(program, [operand.node, *mask.sources], values)
    value = found[operand.node]
    seen = {"added": value > -1e8, "visible": value != 0, "hidden": value == 0}[operand.sense]
    form = mask.visibility(found, seen.shape[-2], seen.shape[-1]).dense(
        seen.shape[0], seen.shape[-2], seen.shape[-1]
    )
    assert torch.equal(*torch.broadcast_tensors(form, seen))


#: Tokens that the second row of the example does not have.
PADDED = {"llama": 64, "bert": 64}


@cache
def tiny(name: str, attention: str) -> Program:
    return captured(name, attention, seq=256, window=64, padded=PADDED.get(name, 0))


@cache
def masks_of(name: str, attention: str) -> list[tuple[SideOperand, GraphMask]]:
    """The side operands of a tiny model, and what was recovered of each, for all tests."""
    program = tiny(name, attention)
    return [(operand, recovered(program, operand)) for operand in operands(program)]


CASES = {
    ("llama", "eager"): ["causal ∧ padding (attention_mask)"],
    ("llama", "sdpa"): ["causal ∧ padding (attention_mask)"],
    ("mistral", "eager"): ["causal ∧ window 64 ∧ padding (attention_mask)"],
    ("mistral", "sdpa"): ["causal ∧ window 64 ∧ padding (attention_mask)"],
    ("gemma3", "eager"): [
        "causal ∧ window 64 ∧ padding (attention_mask)",
        "causal ∧ padding (attention_mask)",
    ],
    ("modernbert", "eager"): ["padding (attention_mask)", "two-sided window ±32 ∧ padding (attention_mask)"],
    ("modernbert", "sdpa"): ["padding (attention_mask)", "two-sided window ±32 ∧ padding (attention_mask)"],
    ("llama4", "eager"): [
        "causal ∧ documents (attention_mask) ∧ padding (attention_mask)",
        "causal ∧ padding (attention_mask)",
    ],
    ("bert", "eager"): ["padding (attention_mask)"],
    ("bert", "sdpa"): ["padding (attention_mask)"],
    ("gpt2", "eager"): ["causal ∧ padding (attention_mask)"],
    ("bloom", "eager"): ["causal ∧ padding (attention_mask)"],
    ("deberta", "eager"): ["padded queries and keys (attention_mask)"],
}


#: Where EFFCOMPILE_EVERY is set: what sdpa is given is seen of the others.
MORE = {("llama", "sdpa"), ("modernbert", "sdpa"), ("bloom", "eager")}


@pytest.mark.parametrize(
    ("name", "attention"), [case for case in CASES if os.environ.get("EFFCOMPILE_EVERY") or case not in MORE]
)
def test_forms_of_families_hold_at_other_inputs_and_sizes(name: str, attention: str) -> None:
    program = tiny(name, attention)
    masks = [(operand, mask) for operand, mask in masks_of(name, attention) if mask.hides]
    assert [text for _, mask in masks if (text := told(mask))] == CASES[name, attention] * (
        len(masks) // len(CASES[name, attention])
    )
    generator = torch.Generator().manual_seed(1)
    for operand, mask in masks:
        assert mask.left is None and not mask.guards and mask.uniform_empty is (attention == "eager")
        for batch, seq in ((1, 5), (3, 23), (2, 150)):
            padding = (torch.rand(batch, seq, generator=generator) < 0.7).long()
            agrees(
                program,
                operand,
                mask,
                input_ids=torch.ones(batch, seq, dtype=torch.long),
                attention_mask=padding,
            )


def test_biases_are_no_masks() -> None:
    """T5's bias is learnt; MPT's and Falcon's ALiBi come with a mask, Falcon's as one tensor."""
    t5 = [mask for _, mask in masks_of("t5", "eager")]
    assert sorted((told(m), len(m.biases)) for m in t5) == [("every key", 1), ("padding (attention_mask)", 0)]
    mpt = [mask for _, mask in masks_of("mpt", "eager")]
    assert sorted((told(m), len(m.biases)) for m in mpt) == [
        ("causal ∧ padding (attention_mask)", 0),
        ("every key", 1),
    ]
    falcon = [mask for _, mask in masks_of("falcon", "eager")]
    assert ("causal ∧ padding (attention_mask)", 1) in [(told(m), len(m.biases)) for m in falcon]


CAUSAL, WINDOW = (6, 6, 4), (9, 0, 7)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("llama", [(CAUSAL, (10, 3, 3))]),
        ("mistral", [(WINDOW, WINDOW)]),
        ("bert", [((0, 16, 0), (4, 12, 0))]),
        ("modernbert", [((0, 16, 0), (0, 16, 0)), ((6, 0, 10), (6, 0, 10))]),
        ("llama4", [((12, 0, 4), (12, 0, 4)), (CAUSAL, CAUSAL)]),
    ],
)
def test_tiles_of_the_facts(name: str, counts: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """shared/facts/kernels.md, 3b: empty, full, partial tiles of 64 at 256 tokens; here of two rows, the
    second padded on its left.
    """
    found = [mask.counts[64] for _, mask in masks_of(name, "eager")]
    assert found == [tuple(a + b for a, b in zip(first, second, strict=True)) for first, second in counts]


class Scored(nn.Module):
    """x attends to itself, with `mask(x, *given)` added to the scores, or written over them."""

    def __init__(self, mask: Any, *, how: str = "add") -> None:
        super().__init__()
        self.mask, self.how = mask, how
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("causal", torch.ones(64, 64, dtype=torch.bool).tril())
        slopes = torch.tensor([0.5, 0.25])[:, None, None] * torch.arange(16.0)
        self.register_buffer(
            "alibi", slopes.expand(2, 16, 16).masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)[None]
        )

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        scores, mask = torch.matmul(x * self.scale, x.transpose(-1, -2)), self.mask(self, x, given)
        scores = scores + mask if self.how == "add" else scores.masked_fill(mask, LOWEST)
        return torch.matmul(torch.softmax(scores, -1), x)


def program_of(
    mask: Any, given: Tensor | None = None, *, how: str = "add", seq: int = 16, dynamic: bool = True
) -> Program:
    torch.manual_seed(0)
    x = torch.randn(3, 2, seq, 4)
    axes: Any = {"x": {2: torch.export.Dim.AUTO}} if dynamic and given is None else False
    return capture(Scored(mask, how=how), (x,) if given is None else (x, given), dynamic=axes)


FLAGS = torch.ones(3, 16, dtype=torch.long)


def test_product_with_the_complement_of_a_mask_needs_zeros_and_ones() -> None:
    program = program_of(lambda m, x, given: (1.0 - given[:, None, None, :].float()) * LOWEST, FLAGS)
    mask, operand = only(program)
    assert told(mask) == "padding (given)" and [str(g.said) for g in mask.guards] == [
        "given holds only 0 and 1"
    ]
    agrees(program, operand, mask, given=torch.randint(0, 2, (3, 16)))
    assert mask.unmet([torch.randn(3, 2, 16, 4), FLAGS]) is None
    assert mask.unmet([torch.randn(3, 2, 16, 4), 2 * FLAGS]) is mask.guards[0]


def test_weak_fills_are_biases() -> None:
    """−10000 leaves a padded query what it had; only what no score outweighs is a mask."""
    mask, _ = only(program_of(lambda m, x, given: (1.0 - given[:, None, None, :].float()) * -10000.0, FLAGS))
    assert not mask.hides and len(mask.biases) == 1


def test_fills_other_than_the_lowest_number_promise_that_every_query_sees() -> None:
    program = program_of(lambda m, x, given: torch.where(given[:, None, None, :] > 0, 0.0, -1e9), FLAGS)
    mask, _ = only(program)
    assert not mask.uniform_empty and [str(g.said) for g in mask.guards] == ["every query sees a key"]
    x = torch.randn(3, 2, 16, 4)
    assert (
        mask.unmet([x, FLAGS]) is None
        and mask.unmet([x, FLAGS * torch.tensor([[0], [1], [1]])]) is mask.guards[0]
    )


@pytest.mark.parametrize("fill", [-torch.inf, LOWEST])
def test_triangles(fill: float) -> None:
    program = program_of(lambda m, x, _: torch.triu(torch.full((x.shape[2], x.shape[2]), fill), 1))
    mask, _ = only(program)
    assert told(mask) == "causal" and mask.static and not mask.guards


def test_a_buffer_cut_to_length_is_fitted_under_a_guard() -> None:
    program = program_of(lambda m, x, _: ~m.causal[: x.shape[2], : x.shape[2]], how="fill")
    mask, operand = only(program)
    assert told(mask) == "causal" and mask.static
    agrees(program, operand, mask, x=torch.randn(1, 2, 30, 4))
    assert any(
        guard.check([torch.randn(3, 2, 16, 4)]) and not guard.check([torch.randn(3, 2, 60, 4)])
        for guard in mask.guards
    )


def test_a_window_longer_than_the_example_is_seen() -> None:
    def window(m: Any, x: Tensor, _: Any) -> Tensor:
        i, j = torch.arange(x.shape[2])[:, None], torch.arange(x.shape[2])
        return torch.where((j <= i) & (j > i - 100), 0.0, LOWEST)

    program = program_of(window)
    mask, operand = only(program)
    assert (mask.lo.at(200, 200), mask.hi.at(200, 200)) == (-99, 0) if mask.lo and mask.hi else False
    agrees(program, operand, mask, x=torch.randn(1, 2, 150, 4))


def test_chunks_without_padding_are_a_closed_form() -> None:
    def chunks(m: Any, x: Tensor, _: Any) -> Tensor:
        i, j = torch.arange(x.shape[2])[:, None], torch.arange(x.shape[2])
        return torch.where((j // 5 == i // 5) & (j <= i), 0.0, LOWEST)

    mask, _ = only(program_of(chunks))
    assert told(mask) == "causal ∧ chunks of 5" and mask.static


def test_packed_documents() -> None:
    ids = torch.tensor([[0] * 5 + [1] * 11, [0] * 16, [3] * 2 + [1] * 14])

    def documents(m: Any, x: Tensor, given: Tensor) -> Tensor:
        causal = torch.arange(x.shape[2]) <= torch.arange(x.shape[2])[:, None]
        return torch.where((given[:, None, :, None] == given[:, None, None, :]) & causal, 0.0, -torch.inf)

    program = program_of(documents, ids)
    mask, operand = only(program)
    assert told(mask) == "causal ∧ documents (given)" and not mask.guards
    agrees(program, operand, mask, given=torch.randint(0, 3, (3, 16)))


def test_alibi_and_causal_in_one_buffer_are_a_mask_and_a_bias() -> None:
    program = program_of(lambda m, x, _: m.alibi, dynamic=False)
    mask, operand = only(program)
    assert told(mask) == "causal" and mask.biases == (operand.node,) and not mask.guards


def test_masks_without_a_form_stay_dense() -> None:
    given = torch.rand(3, 16, 16) < 0.5
    program = program_of(lambda m, x, given: torch.where(given[:, None], 0.0, LOWEST), given)
    mask, operand = only(program)
    assert told(mask) == "dense (given)" and mask.uniform_empty
    agrees(program, operand, mask, given=torch.rand(3, 16, 16) < 0.2)


def test_what_the_model_computes_is_left_alone() -> None:
    program = program_of(
        lambda m, x, _: torch.where(torch.matmul(x * m.scale, x.transpose(-1, -2)) > 0, 0.0, LOWEST)
    )
    mask, operand = only(program)
    assert (
        not mask.hides
        and mask.biases == (operand.node,)
        and "depends on what the model computes" in str(mask.left)
    )


def test_expressions_are_put_into_the_graph() -> None:
    program = tiny("llama", "eager").editable("test")
    operand = operands(program)[0]
    mask = recovered(program, operand)
    with program.graph.inserting_before(operand.node.next):
        node = mask.valid[0].emit(program.graph)
    values = evaluate(program, [node, *mask.sources], placeholders(program))
    assert torch.equal(values[node], mask.valid[0].of(values[mask.valid[0].node])) and tuple(
        node.meta["val"].shape
    ) == (2, 256)
