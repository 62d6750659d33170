"""A plan rehearsed in emulated arithmetic is as far from the model as the artifact that a backend makes of
it.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from form_names import form, forms
from torch import nn
from torch_formats import where_there

from effcompile.backends import load_backend
from effcompile.backends.base import Backend
from effcompile.capture import capture
from effcompile.estimate import fake_quant
from effcompile.estimate.rehearse import Rehearsal
from effcompile.ir.formats import LINEAR_FORMATS, Form
from effcompile.ir.program import Program
from effcompile.ops import bf16_linear
from effcompile.passes import load_passes
from effcompile.passes.merge import MERGED
from effcompile.search.pricing import measured_options, replaced_weights, summing
from effcompile.sites.parts import linears, merges


class Block(nn.Module):
    """Three products of one input, which can be merged, and two behind each other, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.up, self.down, self.norm = nn.Linear(64, 128), nn.Linear(128, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (2, 32)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) + x
        return self.norm(mixed + self.down(torch.relu(self.up(mixed))))


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    return capture(Block().eval(), (torch.randn(2, 16, 64),))


def plan_of(
    options: dict[str, str],
    *,
    error_squared: float = 1e-4,
    given: dict[str, Form] | None = None,
    peak_bytes: int = 0,
    backend: str = "torch-eager",
) -> Any:
    named = given or {}
    cost = SimpleNamespace(error_squared=error_squared)
    decisions = [
        SimpleNamespace(site=s, option=o, form=named.get(s, form(o)), cost=cost) for s, o in options.items()
    ]
    return SimpleNamespace(
        decisions=decisions, backend=backend, predicted=SimpleNamespace(peak_bytes=peak_bytes, weight_bytes=0)
    )


def rehearsal_of(program: Program, *backends: Backend) -> Rehearsal:
    passes = load_passes(("quantize", "merge"))
    return Rehearsal(
        program, measured_options(passes), replaced_weights(passes, program), [program.flat_inputs()],
        summing(backends),
    )  # fmt: skip


def distance(outputs: list[torch.Tensor], program: Program) -> float:
    with torch.no_grad():
        (exact,) = [program.module(*program.args)]
    return float((outputs[0] - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("backend", "option"),
    [
        *(
            where_there(name, name, value="torch-eager", id=f"torch-eager-{name}")
            for name in ("int8_channel", "w4", "bf16")
        ),
        ("onnxruntime", "int8_static"),
        ("onnxruntime", "w8"),
    ],
)
def test_as_far_off_as_the_artifact(program: Program, backend: str, option: str) -> None:
    options = {site.site: option for site in linears(program)}
    built = load_backend(backend)
    emulate = rehearsal_of(program, built).of(plan_of(options, backend=backend))
    assert emulate is not None
    inputs = program.flat_inputs()
    lowered = built.lower(program.tagged(forms(options), "test"), None, [inputs])  # type: ignore[arg-type]
    measured, rehearsed = distance(lowered(*inputs), program), distance(next(emulate([inputs])), program)
    assert measured > 1e-5 and rehearsed == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("merged", [False, True])
def test_columns_that_stand_out_are_scaled_as_in_the_artifact(merged: bool) -> None:
    """As codes of plain rows would be further off, and the error that a plan is chosen by is that of scaled
    ones, too.
    """
    torch.manual_seed(0)
    x = torch.randn(2, 16, 64)
    x[..., 5] *= 40
    model = Block().eval()
    with torch.no_grad():
        model.v.weight[:, 5] *= 0.01
    program = capture(model, (x,))
    options = {site.site: "int8_token" for site in linears(program)}
    (group,) = merges(program)
    given = {group.site: Form(word=MERGED, weights=LINEAR_FORMATS["int8_token"])} if merged else {}
    inputs, built = program.flat_inputs(), load_backend("torch-eager")
    emulate = rehearsal_of(program, built).of(plan_of(options))
    plain = Rehearsal(program, measured_options(load_passes(("quantize",))), {}, []).of(plan_of(options))
    assert emulate is not None and plain is not None
    tagged = program.tagged({**forms(options), **given}, "test")
    if merged:
        plan = SimpleNamespace(forms=lambda: {**forms(options), **given})
        tagged = load_passes(("merge",))[0].apply(program, plan)  # type: ignore[arg-type]
        tagged = replace(tagged, tags={**tagged.tags, **forms(options)})
    lowered = built.lower(tagged, None, [inputs])  # type: ignore[arg-type]
    measured, rehearsed = distance(lowered(*inputs), program), distance(next(emulate([inputs])), program)
    assert rehearsed == pytest.approx(measured, rel=0.2)
    assert measured < 0.6 * distance(next(plain([inputs])), program)


def test_products_of_bf16_are_rounded_where_the_backend_rounds_them(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, inputs = {site.site: "bf16" for site in linears(program)}, program.flat_inputs()
    eager = load_backend("torch-eager")
    found: list[float] = []
    for reason in (None, "no tiles"):
        monkeypatch.setattr(bf16_linear, "fallback_reason", lambda reason=reason: reason)
        for backend in ("torch-eager", "torch-inductor"):
            emulate = rehearsal_of(program, eager).of(plan_of(options, backend=backend))
            assert emulate is not None
            found.append(distance(next(emulate([inputs])), program))
    rounded = found[1]
    assert found[0] * 1.1 < rounded and found[1:] == [rounded] * 3


def test_members_of_a_merge_share_a_scale(program: Program) -> None:
    """The weights of a merge are rounded by the largest of them all: where one is a hundredth of another,
    that shows.
    """
    torch.manual_seed(0)
    model = Block().eval()
    with torch.no_grad():
        model.v.weight *= 0.01
        model.v.bias *= 0.01
        model.norm.bias.zero_()
    small = capture(model, (torch.randn(2, 16, 64),))
    (group,) = merges(small)
    options = {member.site: "int8_dynamic" for member in group.members}
    rehearsal = rehearsal_of(small)
    apart = rehearsal.of(
        plan_of({**options, group.site: "separate"}, given={group.site: Form(word="separate")})
    )
    together = rehearsal.of(plan_of({**options, group.site: MERGED}, given={group.site: Form(word=MERGED)}))
    assert apart is not None and together is not None
    inputs = small.flat_inputs()
    assert not torch.equal(next(apart([inputs]))[0], next(together([inputs]))[0])


def test_calls_that_go_together_come_out_as_by_themselves_and_round_each_weight_once(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(
        zip(
            [site.site for site in linears(program)],
            ["int8_static", "int8_dynamic", "w4", "bf16", "int8_channel"],
            strict=True,
        )
    )
    rounded: list[torch.Tensor] = []
    weight = fake_quant.weight
    monkeypatch.setattr(fake_quant, "weight", lambda w, *more: (rounded.append(w), weight(w, *more))[1])
    cases = [[torch.randn(batch, 16, 64)] for batch in (2, 1, 3)]
    rehearsal = rehearsal_of(program)
    together, alone = rehearsal.of(plan_of(options)), rehearsal.of(plan_of(options, peak_bytes=1 << 40))
    assert together is not None and alone is not None
    found = list(together(cases))
    assert len(rounded) == len(options) and [len(outputs[0]) for outputs in found] == [2, 1, 3]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(found, alone(cases), strict=True))
    assert len(rounded) == 4 * len(options)  # too large to go together, each has its weights rounded anew


def test_an_exact_plan_and_one_with_what_nobody_emulates_are_not_rehearsed(program: Program) -> None:
    sites = [site.site for site in linears(program)]
    assert rehearsal_of(program).of(plan_of(dict.fromkeys(sites, "fp32"), error_squared=0.0)) is None
    strange = plan_of({sites[0]: next(name for name in LINEAR_FORMATS if name != "fp32"), "elsewhere": "w4"})
    assert rehearsal_of(program).of(strange) is None
