"""An artifact whose values are right and whose dtype or shape is another's is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import effcompile
from effcompile.backends.torch import TorchEager
from effcompile.capture import capture
from effcompile.core.errors import VerificationError
from effcompile.core.goal import Goal
from effcompile.ir.program import Program
from effcompile.proof.verify import references, verify


class Alike(nn.Module):
    """Rows that are all the same, so that one of them broadcasts to them all; beside what is
    chosen of them.
    """

    def forward(self, x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        h = (x * 0 + 2.5) * attention_mask.unsqueeze(-1)
        return h, h.argmax(-1)


def inputs() -> dict[str, Tensor]:
    return {"x": torch.ones(2, 4, 3), "attention_mask": torch.ones(2, 4, dtype=torch.long)}


#: What an artifact may do to its first result without changing a value.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": Tensor.double, "bfloat16": Tensor.bfloat16, "int": Tensor.int, "one row": lambda t: t[:1],
    "one token": lambda t: t[:, :1], "an axis more": lambda t: t.unsqueeze(0),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_result_of_another_kind_fails(kind: str) -> None:
    program = capture(model := Alike().eval(), (), inputs())

    def lowered(x: Tensor, attention_mask: Tensor) -> list[Tensor]:
        h, chosen = program.module(x=x, attention_mask=attention_mask)
        return [h, chosen.int()] if kind == "int" else [KINDS[kind](h), chosen]

    cases = references(program, model, Goal(max_error=0.5))
    if kind == "one token":  # texts of one have that one
        cases = [case for case in cases if not case.name.startswith("short texts")]
    checks = verify(lowered, program, cases, Goal(max_error=0.5))
    assert not any(check.passed for check in checks)
    which = "output 1 is int32 " if kind == "int" else "output 0 is "
    assert all(str(check.note).startswith(which) and " instead of " in str(check.note) for check in checks)


def test_what_writes_into_its_inputs_fails() -> None:
    program = capture(model := Alike().eval(), (), inputs())
    goal = Goal(max_error=0.5)

    def lowered(x: Tensor, attention_mask: Tensor) -> list[Tensor]:
        found = list(program.module(x=x, attention_mask=attention_mask))
        x[0, 0] += 1
        return found

    checks = verify(lowered, program, references(program, model, goal), goal)
    assert {str(check.note) for check in checks} == {"it writes into its input x"}


def test_what_the_goal_does_not_read_may_be_left_out() -> None:
    program = capture(model := Alike().eval(), (), inputs())
    goal = Goal(reads="last")

    def lowered(x: Tensor, attention_mask: Tensor) -> list[Tensor]:
        h, chosen = program.module(x=x, attention_mask=attention_mask)
        return [h[:, -1:], chosen]

    assert all(check.passed for check in verify(lowered, program, references(program, model, goal), goal))


@pytest.mark.parametrize("kind", ["float64", "one row"])
def test_optimize_refuses_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lower = TorchEager.lower

    def other(self: TorchEager, program: Program, *rest: Any) -> Any:
        lowered = lower(self, program, *rest)
        return replace(
            lowered, run=lambda *tensors: [KINDS[kind](lowered.run(*tensors)[0]), *lowered.run(*tensors)[1:]]
        )

    monkeypatch.setattr(TorchEager, "lower", other)
    with pytest.raises(VerificationError, match=r"output 0 is .* instead of float32"):
        effcompile.optimize(Alike().eval(), inputs=inputs(), backend="torch-eager")
