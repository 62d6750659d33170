"""Recurrences behind a state: as Hugging Face's forms of them, whole and in parts, compiled and by torch."""

import pytest
import torch
from torch import Tensor
from transformers.models.mamba.modeling_mamba import causal_conv1d_fn, mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from effcompile.ops import recurrence_native
from effcompile.ops.recurrence import delta_rule, short_conv, state_space

CLOSE = {"rtol": 2e-4, "atol": 2e-5}
TOKENS = 37


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    found = recurrence_native.kernels()
    if request.param == "torch":
        monkeypatch.setattr("effcompile.ops.recurrence.kernels", lambda: "none here")
    elif isinstance(found, str):
        pytest.skip(found)
    return str(request.param)


def in_parts(
    run: object, tokens: list[Tensor], state: Tensor, sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """`run(parts of tokens, state)`, part by part."""
    at, made = 0, []
    for size in sizes:
        y, state = run([each[:, at : at + size] for each in tokens], state)  # type: ignore[operator]
        made.append(y)
        at += size
    return torch.cat(made, 1), state


SIZES = [(TOKENS,), (20, 17), (1,) * TOKENS, (3, 1, 33)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("channels", "kernel"), [(5, 3), (16, 4), (70, 4)])
def test_a_short_convolution(kernels: str, sizes: tuple[int, ...], channels: int, kernel: int) -> None:
    x, weight, bias = drawn(2, channels, TOKENS), drawn(channels, kernel), drawn(channels)
    wanted = causal_conv1d_fn(x, weight, bias, activation="silu").transpose(1, 2)
    run = lambda parts, state: short_conv(parts[0], weight, bias, state, True)  # noqa: E731
    found, state = in_parts(run, [x.transpose(1, 2)], torch.zeros(2, channels, kernel), sizes)
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert torch.equal(state, x[:, :, -kernel:])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("channels", "width"), [(6, 5), (20, 16), (4, 33)])
def test_mamba(kernels: str, sizes: tuple[int, ...], channels: int, width: int) -> None:
    x, dt = drawn(2, channels, TOKENS), torch.nn.functional.softplus(drawn(2, channels, TOKENS, seed=1))
    logs, d = drawn(channels, width), drawn(channels)
    b, c = drawn(2, width, TOKENS, seed=2), drawn(2, width, TOKENS, seed=3)
    wanted, left = mamba_selective_scan(x, dt, -logs.exp(), b, c, D=d, return_last_state=True)
    tokens = [each.transpose(1, 2) for each in (x, dt, b, c)]
    for table, as_logs in ((-logs.exp(), False), (logs, True)):
        run = lambda p, s, a=table, f=as_logs: state_space(p[0], p[1], a, p[2], p[3], d, s, f)  # noqa: E731
        found, state = in_parts(run, tokens, torch.zeros(2, channels, width), sizes)
        torch.testing.assert_close(found, wanted.transpose(1, 2), **CLOSE)
        torch.testing.assert_close(state, left, **CLOSE)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("heads", "rows", "groups", "width"), [(4, 3, 2, 16), (6, 8, 1, 21), (2, 5, 2, 64)])
def test_mamba2(kernels: str, sizes: tuple[int, ...], heads: int, rows: int, groups: int, width: int) -> None:
    x, dt = drawn(2, TOKENS, heads, rows), torch.nn.functional.softplus(drawn(2, TOKENS, heads))
    a, d, first = -drawn(heads).exp(), drawn(heads), drawn(2, heads, rows, width)
    b, c = drawn(2, TOKENS, groups, width, seed=2), drawn(2, TOKENS, groups, width, seed=3)
    wanted, left = mamba2_chunk_scan(
        x, dt, a, b, c, chunk_size=8, D=d, initial_states=first, return_final_states=True
    )
    run = lambda p, s: state_space(p[0], p[1], a[:, None], p[2], p[3], d, s)  # noqa: E731
    found, state = in_parts(run, [x, dt, b, c], first, sizes)
    torch.testing.assert_close(found, wanted, **CLOSE)
    torch.testing.assert_close(state, left, **CLOSE)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("groups", "heads", "k", "v"), [(2, 4, 8, 8), (1, 1, 5, 70), (3, 3, 16, 17)])
@pytest.mark.parametrize("normed", [True, False])
def test_gated_delta_rule(
    kernels: str, sizes: tuple[int, ...], groups: int, heads: int, k: int, v: int, normed: bool
) -> None:
    """Keys that are not normed are short: long ones let the state grow without bound."""
    q, key = drawn(2, TOKENS, groups, k), 0.3 * drawn(2, TOKENS, groups, k, seed=1)
    value, first = drawn(2, TOKENS, heads, v, seed=2), drawn(2, heads, k, v)
    g, beta = -drawn(2, TOKENS, heads).abs(), drawn(2, TOKENS, heads, seed=3).sigmoid()
    wanted, left = torch_chunk_gated_delta_rule(
        q, key, value, g, beta, chunk_size=8, initial_state=first, output_final_state=True,
        use_qk_l2norm_in_kernel=normed,
    )  # fmt: skip
    run = lambda p, s: delta_rule(*p, s, normed)  # noqa: E731
    found, state = in_parts(run, [q, key, value, g, beta], first, sizes)
    torch.testing.assert_close(found, wanted, **CLOSE)
    torch.testing.assert_close(state, left, **CLOSE)


def test_other_dtypes_are_torchs() -> None:
    x, weight = drawn(2, 9, 6), drawn(6, 4)
    wanted, _ = short_conv(x, weight, None, torch.zeros(2, 6, 4), False)
    for dtype, close in ((torch.bfloat16, 0.05), (torch.float64, 1e-5)):
        found, state = short_conv(
            x.to(dtype), weight.to(dtype), None, torch.zeros(2, 6, 4, dtype=dtype), False
        )
        assert found.dtype is state.dtype is dtype
        torch.testing.assert_close(found.float(), wanted, rtol=close, atol=close)


def test_shapes_are_known_without_computing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = (drawn(2, 3, 4, 5), drawn(2, 3, 4), drawn(4, 1), drawn(2, 3, 2, 6), drawn(2, 3, 2, 6), None)
    state = drawn(2, 4, 5, 6)
    with FakeTensorMode() as mode:
        given = [None if each is None else mode.from_tensor(each) for each in (*real, state)]
        fake = state_space(*given)
    found = state_space(*real, state)
    assert [(f.shape, f.dtype, f.stride()) for f in fake] == [(f.shape, f.dtype, f.stride()) for f in found]


def test_gradients_are_those_of_huggingfaces_form() -> None:
    """Errors of options are weighed with them. In float64, as `gradcheck` of a recurrence wants it."""
    x, dt = drawn(1, 4, 5).double(), torch.nn.functional.softplus(drawn(1, 4, 5, seed=1)).double()
    logs, b, c, d = (drawn(*shape, seed=2).double() for shape in ((4, 3), (1, 3, 5), (1, 3, 5), (4,)))
    given = [each.requires_grad_() for each in (x, dt, logs, b, c, d)]

    def ours(x: Tensor, dt: Tensor, logs: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        rows = [each.transpose(1, 2) for each in (x, dt, b, c)]
        made: Tensor = state_space(*rows[:2], logs, *rows[2:], d, x.new_zeros(1, 4, 3), True)[0]
        return made.transpose(1, 2)

    wanted = torch.autograd.grad(mamba_selective_scan(x, dt, -logs.exp(), b, c, D=d).square().sum(), given)
    found = torch.autograd.grad(ours(*given).square().sum(), given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)  # Hugging Face's is in fp32 in part
    conv = [drawn(1, 5, 4).double(), drawn(4, 3).double(), drawn(4).double(), drawn(1, 4, 3).double()]
    assert torch.autograd.gradcheck(
        lambda *each: short_conv(*each, True), [each.requires_grad_() for each in conv]
    )
    rule = [drawn(1, 4, 2, 3), drawn(1, 4, 2, 3, seed=1), drawn(1, 4, 2, 3, seed=2), -drawn(1, 4, 2).abs()]
    rule += [drawn(1, 4, 2, seed=3).sigmoid(), drawn(1, 2, 3, 3)]
    assert torch.autograd.gradcheck(
        lambda *each: delta_rule(*each, True), [each.double().requires_grad_() for each in rule]
    )
