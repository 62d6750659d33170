import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from effcompile.capture import capture, variants, verify_capture
from effcompile.capture.verify import relative_error


class Masked(nn.Module):
    """Mean over unmasked tokens; `bake` ignores the mask as a graph would that was traced with it as a
    constant.
    """

    def __init__(self, *, bake: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 4)
        self.bake = bake

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        weight = torch.ones_like(attention_mask) if self.bake else attention_mask
        x = self.table(input_ids) * weight.unsqueeze(-1)
        return x.sum(1) / weight.sum(1, keepdim=True)


def inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 16, (2, 8)), "attention_mask": torch.ones(2, 8, dtype=torch.long)}


def test_a_good_capture_passes_and_says_what_the_mask_does() -> None:
    model = Masked()
    checks = verify_capture(capture(model, (), inputs()), model)
    assert [check.name for check in checks] == ["example", "second shape 3×12", "padded mask 3×12"]
    assert all(check.passed for check in checks)
    assert str(checks[-1].note).startswith("padding changes the output by ")


def test_a_baked_mask_passes_at_the_example_and_fails_when_padded() -> None:
    model, baked = Masked(), Masked(bake=True)
    checks = {check.name.split()[0]: check for check in verify_capture(capture(baked, (), inputs()), model)}
    assert checks["example"].passed
    assert checks["second"].passed
    assert not checks["padded"].passed


def test_a_model_that_ignores_its_mask_is_said_to() -> None:
    model = Masked(bake=True)
    checks = verify_capture(capture(model, (), inputs()), model)
    assert str(checks[-1].note) == "the model itself ignores this mask"


def test_a_graph_that_holds_a_constant_of_the_examples_size_fails_at_the_second_shape() -> None:
    model = Masked()
    program = capture(model, (), inputs())
    node = next(n for n in program.calls() if n.target is torch.ops.aten.embedding.default)
    program.module.register_buffer("baked", torch.zeros(8, 4))
    with program.graph.inserting_after(node):
        constant = program.graph.get_attr("baked")
        added = program.graph.call_function(torch.ops.aten.add.Tensor, (node, constant))
    node.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)
    constant.append(added)
    program.module.recompile()
    checks = {check.name.split()[0]: check for check in verify_capture(program, model)}
    assert checks["example"].passed
    assert checks["second"].error == math.inf
    assert "captured graph raises" in str(checks["second"].note)


def test_a_model_that_draws_random_numbers_is_said_to() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    model = Noisy()
    check = verify_capture(capture(model, (torch.ones(2, 4),)), model)[0]
    assert not check.passed
    assert "something else at each call: aten.rand_like.default draws random numbers" in str(check.note)
    assert "return x + torch.rand_like(x)" in str(check.note)


def test_a_model_that_counts_its_calls_is_said_to() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.calls

    model = Counting()
    check = verify_capture(capture(model, (torch.ones(2, 4),)), model)[0]
    assert not check.passed
    assert "its forward writes calls, in evaluation mode, too" in str(check.note)


def test_nothing_is_run_twice_with_the_same_inputs() -> None:
    model = Masked()
    program = capture(model, (), inputs())
    ran = {"model": 0, "graph": 0}

    def count(name: str) -> None:
        ran[name] += 1

    model.register_forward_pre_hook(lambda *_: count("model"))
    program.module.register_forward_pre_hook(lambda *_: count("graph"))
    checks = verify_capture(program, model)
    assert len(checks) == 3 and str(checks[-1].note).startswith("padding changes the output by ")
    # and once to see whether the model takes the second shape
    assert ran == {"model": 4, "graph": 3}
    assert len(variants(program)) == 3 and ran["graph"] == 3  # the graph ran at these sizes
    shorter = {name: value[:, :6] for name, value in program.kwargs.items()}
    assert len(variants(replace(program, kwargs=shorter))) == 3 and ran["graph"] == 4  # and not at those


def test_variants_need_no_model() -> None:
    found = variants(capture(Masked(), (), inputs()))
    assert [name for name, _, _ in found] == ["example", "second shape 3×12", "padded mask 3×12"]
    padded = found[2][2]["attention_mask"]
    assert padded.shape == (3, 12)
    assert padded[0].tolist() == [0] * 3 + [1] * 9
    assert padded[1].tolist() == [0] * 11 + [1]  # a short text beside longer ones
    assert padded[2].tolist() == [1] * 12


@pytest.mark.parametrize(("lengths", "kept"), [([3, 2], [2, 1]), ([1, 2], [1, 1]), ([8, 1], [6, 1])])
def test_a_mask_that_is_padded_already_loses_tokens_and_never_all(
    lengths: list[int], kept: list[int]
) -> None:
    """Also where most are pads, so that the most frequent value is no token's."""
    mask = (torch.arange(8) < torch.tensor(lengths)[:, None]).long()
    model, given = Masked(), {"input_ids": torch.randint(0, 16, (2, 8)), "attention_mask": mask}
    program = capture(model, (), given, dynamic=False)
    name, _, kwargs = variants(program)[-1]
    assert name == "padded mask 2×8"
    assert kwargs["attention_mask"].sum(1).tolist() == kept
    assert ((kwargs["attention_mask"] - mask) <= 0).all()
    assert verify_capture(program, model)[-1].passed


def test_a_mask_that_marks_the_pads_gains_some() -> None:
    class Marked(Masked):
        def forward(self, input_ids: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(input_ids, (~padding_mask).long())

    pads = torch.zeros(2, 8, dtype=torch.bool)
    pads[:, 6:] = True
    program = capture(
        Marked(), (), {"input_ids": torch.randint(0, 16, (2, 8)), "padding_mask": pads}, dynamic=False
    )
    padded = variants(program)[-1][2]["padding_mask"]
    assert padded[0].tolist() == [True] + [False] * 5 + [True] * 2
    assert padded[1].tolist() == [True] * 5 + [False] + [True] * 2


@pytest.mark.parametrize(
    ("found", "wanted", "error"),
    [
        (torch.ones(4), torch.ones(4), 0.0),
        (torch.full((4,), 1.1), torch.ones(4), 0.1),
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]), 0.0),
        (torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0]), math.inf),
        (torch.tensor([-math.inf, 1.0]), torch.tensor([-math.inf, 1.0]), 0.0),
        (torch.ones(4), torch.ones(2, 2), math.inf),
        (torch.ones(1), torch.ones(4), math.inf),
        (torch.ones(4).double(), torch.ones(4), math.inf),
        (torch.ones(4).int(), torch.ones(4), math.inf),
        (torch.ones(4), torch.zeros(4), math.inf),
        ((torch.ones(4),), (torch.ones(4), torch.ones(4)), math.inf),
    ],
)
def test_relative_error(found: object, wanted: object, error: float) -> None:
    assert relative_error(found, wanted) == pytest.approx(error, rel=1e-6)
