"""A size of 1 is taken where the graph is the model there, and refused where the model raises or goes another
way.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from vision_language_models import gemma

import effcompile
from effcompile.capture.inference import capture
from effcompile.capture.ones import without_needless_guards, without_unproven_ones
from effcompile.core.errors import GuardError
from effcompile.ir.export import allowed, domain_of, sizes_of
from effcompile.loader.derive import derive
from effcompile.loader.source import Reading
from effcompile.machine.machines import load_target


class Normed(nn.Module):
    """Raises at one token: a mean over one value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.InstanceNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.linear(x).transpose(1, 2))
        return out


class OtherWay(nn.Module):
    """Decodes one token otherwise than many, and one of one otherwise again."""

    def __init__(self, *, together: bool = False) -> None:
        super().__init__()
        self.linear, self.together = nn.Linear(8, 8), together

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1 and (x.shape[0] == 1 or not self.together):
            return 2 * self.linear(x)
        out: Tensor = self.linear(x)
        return out


def admitted(model: nn.Module, batch: int = 3) -> dict[tuple[int, int], bool]:
    program = without_unproven_ones(capture(model.eval(), (torch.randn(batch, 6, 8),)), model)
    return {(b, s): allowed(program, {"batch": b, "seq": s}) for b in (1, 4) for s in (1, 9)}


def test_what_equals_the_model_is_taken() -> None:
    assert all(admitted(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))).values())


@pytest.mark.parametrize("model", [Normed(), OtherWay()])
@pytest.mark.parametrize("batch", [1, 3])
def test_one_token_is_refused(model: nn.Module, batch: int) -> None:
    assert admitted(model, batch) == {(1, 1): False, (1, 9): True, (4, 1): False, (4, 9): True}


def test_only_both_together_are_refused() -> None:
    assert admitted(OtherWay(together=True)) == {(1, 1): False, (1, 9): True, (4, 1): True, (4, 9): True}


def test_the_plan_says_it_and_the_call_refuses_it() -> None:
    run = effcompile.optimize(
        Normed().eval(),
        inputs=(torch.randn(2, 6, 8),),
        backend="torch-eager",
        target=load_target("cpu-generic"),
    )
    assert any("seq of 1 is not taken: the model itself raises" in str(note) for note in run.plan.notes)
    with pytest.raises(GuardError, match="seq=1"):
        run(torch.randn(2, 1, 8))
    assert run(torch.randn(1, 2, 8)).shape == (1, 8, 2)


def test_a_text_cut_short_of_its_image_is_no_reason_to_refuse_one_row() -> None:
    """At few tokens the model raises, for its image is not among them; at the example's it takes one row."""
    model = gemma().eval()
    given = derive(model, Reading(shape=(2, 0)), "model.py")
    program = without_unproven_ones(capture(model, given.args, given.kwargs), model)
    sizes = sizes_of(program)
    assert sizes["batch"] == 2
    assert allowed(program, sizes) and allowed(program, {**sizes, "batch": 1})
    assert not allowed(program, {**sizes, "seq": 1})


class Trigrams(nn.Module):
    """Reads what lies beside each token (MobileBERT): of two tokens it takes one from either side."""

    def __init__(self, *, other_way: bool = False) -> None:
        super().__init__()
        self.linear, self.other_way = nn.Linear(24, 8), other_way

    def forward(self, x: Tensor) -> Tensor:
        after, before = nn.functional.pad(x[:, 1:], (0, 0, 0, 1)), nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
        beside = x[:, 1:] * (2 if self.other_way and x.shape[1] == 2 else 1)
        out: Tensor = self.linear(torch.cat([after, x, before], dim=2))[:, 1:] + beside
        return out


def test_a_size_at_which_a_part_is_1_long_is_taken_where_the_graph_is_the_model() -> None:
    x = torch.randn(3, 6, 8)
    model = Trigrams().eval()
    program = capture(model, (x,))
    assert any(guard.endswith("!= 1") for guard in domain_of(program).guards)
    assert allowed(without_needless_guards(program, model), {"batch": 3, "seq": 2})
    run = effcompile.optimize(model, inputs=(x,), backend="torch-eager", target=load_target("cpu-generic"))
    torch.testing.assert_close(run(x[:, :2]), model(x[:, :2]), rtol=1e-5, atol=1e-6)
    another = Trigrams(other_way=True).eval()
    kept = without_needless_guards(capture(another, (x,)), another)
    assert not allowed(kept, {"batch": 3, "seq": 2}) and allowed(kept, {"batch": 3, "seq": 3})
