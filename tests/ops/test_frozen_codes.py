"""Codes of frozen weights against the definition, and a weight held as codes where a model reads, copies,
saves and writes it.
"""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from effcompile.core import torch_compat_memory
from effcompile.core.errors import GuardError
from effcompile.ops.frozen_codes import (
    FORMS,
    GROUP,
    CodedWeight,
    encode,
    expand_codes,
    hold,
    packed_bytes,
    rounding_of,
    workspace_bytes,
)

SHAPE = (48, 80)


def levels_of_a_normal() -> torch.Tensor:
    """NF4 as Dettmers et al. 2023 define it: quantiles of N(0, 1), 8 above and 7 below zero, zero itself, by
    the largest.
    """
    ends = torch.tensor(0.9677083, dtype=torch.float64)
    above = torch.special.ndtri(torch.linspace(float(ends), 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(float(ends), 0.5, 8, dtype=torch.float64)[:-1])
    found = torch.cat([above, torch.zeros(1, dtype=torch.float64), below]).sort().values
    return (found / found.max()).float()


def weight(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    made.view(-1)[:GROUP] = 0.0
    return made.to(dtype)


def test_nf4_is_the_nearest_quantile_of_its_group() -> None:
    given = weight()
    found = expand_codes(encode(given, "nf4"), SHAPE, "nf4", torch.float32)
    levels = levels_of_a_normal()
    for group, decoded in zip(given.view(-1, GROUP), found.view(-1, GROUP), strict=True):
        scale = group.abs().max().to(torch.bfloat16).float()
        scale = scale if scale > 0 else torch.tensor(1.0)
        nearest = levels[(group[:, None] / scale - levels).abs().argmin(1)] * scale
        torch.testing.assert_close(decoded, nearest, rtol=1e-4, atol=1e-5)


def test_int8_is_within_half_a_step() -> None:
    given = weight()
    found = expand_codes(encode(given, "int8"), SHAPE, "int8", torch.float32)
    steps = given.view(-1, GROUP).abs().amax(1, keepdim=True) / 127
    # the largest, where its scale is rounded down
    assert ((given - found).view(-1, GROUP).abs() <= 0.5 * steps * 1.01 + 0.3 * steps).all()
    assert (found.view(-1, GROUP)[0] == 0).all()


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_dtype_and_coding_again_changes_nothing(form: str, dtype: torch.dtype) -> None:
    given = weight(dtype=dtype)
    packed = encode(given, form)
    found = expand_codes(packed, SHAPE, form, dtype)
    assert (
        packed.nbytes
        == packed_bytes(given.numel(), form)
        == given.numel() * FORMS[form].bits // 8 + 2 * given.numel() // GROUP
    )
    assert found.dtype == dtype and torch.equal(
        found, expand_codes(packed, SHAPE, form, torch.float32).to(dtype)
    )
    if dtype == torch.float32:
        assert torch.equal(encode(found, form), packed)
    relative = float((found.float() - given.float()).norm() / given.float().norm())
    assert (
        relative == pytest.approx(rounding_of([given], form), rel=0.1)
        and relative < {"int8": 0.01, "nf4": 0.12}[form]
    )


def test_more_elements_than_a_piece_are_written_out_alike() -> None:
    given = torch.randn(5000, GROUP)
    for form in FORMS:
        found = expand_codes(encode(given, form), given.shape, form, torch.float32)
        assert torch.equal(
            found[4990:], expand_codes(encode(given[4990:], form), (10, GROUP), form, torch.float32)
        )


def coded_linear(form: str = "nf4") -> tuple[nn.Sequential, torch.Tensor]:
    """Two linears that share a weight, held as codes, and that weight written out."""
    model = nn.Sequential(nn.Linear(SHAPE[1], SHAPE[0]), nn.ReLU(), nn.Linear(SHAPE[1], SHAPE[0]))
    model.requires_grad_(False)
    model[2].weight = model[0].weight
    packed = encode(model[0].weight, form)
    hold(model, "0.weight", packed, form)
    return model, expand_codes(packed, SHAPE, form, torch.float32)


def test_a_model_reads_it_like_any_other_weight() -> None:
    model, plain = coded_linear()
    assert (
        model[0].weight is model[2].weight
        and isinstance(model[0].weight, CodedWeight)
        and isinstance(model[0].weight, nn.Parameter)
    )
    assert (
        not model[0].weight.requires_grad
        and model[0].weight.shape == SHAPE
        and model[0].weight.dtype == torch.float32
    )
    x = torch.randn(3, SHAPE[1], requires_grad=True)
    torch.testing.assert_close(model[0](x), F.linear(x, plain, model[0].bias))
    torch.testing.assert_close(x @ model[0].weight.T, x @ plain.T)
    model[0](x).sum().backward()
    torch.testing.assert_close(x.grad, plain.sum(0).expand(3, -1))
    assert torch.equal(model[0].weight.float(), plain) and torch.equal(
        model[0].weight.to(torch.bfloat16), plain.bfloat16()
    )


def test_copies_and_files_have_the_same_codes() -> None:
    model, plain = coded_linear()
    twin = copy.deepcopy(model)
    assert (
        isinstance(twin[0].weight, CodedWeight)
        and twin[0].weight is twin[2].weight
        and twin[0].weight is not model[0].weight
    )
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    assert torch.equal(state["0.weight"].plain(), plain)
    other, _ = coded_linear()
    other.load_state_dict(state)
    x = torch.randn(2, SHAPE[1])
    assert torch.equal(other[0](x), model[0](x)) and torch.equal(twin[0](x), model[0](x))


def test_what_would_write_to_it_is_refused_in_words() -> None:
    model, plain = coded_linear()
    for write in (
        lambda: model[0].weight.data.add_(1.0),
        lambda: model[0].weight.data.__iadd__(1.0),
        lambda: model[0].load_state_dict({"weight": plain + 1.0, "bias": torch.zeros(SHAPE[0])}),
    ):
        with pytest.raises((GuardError, RuntimeError), match="held in nf4"):
            write()
    assert torch.equal(model[0].weight.plain(), plain)


def test_its_own_values_may_be_written_to_it_as_ddp_does() -> None:
    weight = CodedWeight(encode(torch.randn(8, 64), "int8"), (8, 64), "int8", torch.float32)
    before = weight.packed.clone()
    flat = weight.plain().flatten()
    weight.copy_(flat.view(8, 64))
    assert torch.equal(weight.packed, before)
    for other in (flat.view(8, 64) + 1e-3, flat.view(64, 8)):
        with pytest.raises(GuardError, match="would write to a frozen weight that is held in int8"):
            weight.copy_(other)


def test_workspace_is_what_the_allocator_gives_out() -> None:
    for form, dtype in ((f, d) for f in FORMS for d in (torch.float32, torch.bfloat16)):
        packed, shape = encode(torch.randn(512, 1024), form), [512, 1024]
        with torch_compat_memory.watched_memory("cpu") as peak:
            made = expand_codes(packed, shape, form, dtype)
        foreseen = workspace_bytes("effcompile::expand_codes", (packed, shape, form, dtype))
        assert foreseen is not None and peak() - made.nbytes == pytest.approx(foreseen, abs=1 << 16)
