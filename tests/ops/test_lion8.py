"""Lion with its state in 8 bits: its update is Lion's on the state that it holds, which is the nearest that
codes can say.
"""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.ops.lion8 import Lion8bit


def parameter(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def held(state: dict[str, Tensor]) -> Tensor:
    """The state in float64, as its codes say it."""
    if "exp_avg" in state:
        return state["exp_avg"].double()
    codes, scale = state["codes"], state["scale"].double()
    return (state["qmap"].double()[codes.int()].view(-1, 256) * scale[:, None]).view(codes.shape)


@settings(max_examples=12, deadline=None)
@given(
    rows=st.sampled_from((1, 16, 17)), beta1=st.sampled_from((0.0, 0.9)), beta2=st.sampled_from((0.5, 0.99)),
    decay=st.sampled_from((0.0, 0.1)), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_step_is_lions_on_the_state_that_is_held(
    rows: int, beta1: float, beta2: float, decay: float, seed: int
) -> None:
    """In float64, step by step; of 1 row the state is in fp32."""
    p = parameter(rows, 256, seed=seed)
    optimizer = Lion8bit([p], lr=1e-2, betas=(beta1, beta2), weight_decay=decay)
    assert len(optimizer.state) == 0
    for step in range(3):
        before, m = (
            p.detach().double(),
            held(optimizer.state[p]) if step else torch.zeros(rows, 256, dtype=torch.float64),
        )
        p.grad = parameter(rows, 256, seed=seed + step + 1).detach()
        slope = p.grad.double()
        optimizer.step()
        turn = beta1 * m + (1 - beta1) * slope
        wanted = before - 1e-2 * decay * before - 1e-2 * turn.sign()
        clear = turn.abs() > 1e-6  # at 0 the sign is rounding's
        torch.testing.assert_close(p.detach().double()[clear], wanted[clear], rtol=1e-6, atol=1e-6)
        state, new = optimizer.state[p], beta2 * m + (1 - beta2) * slope
        if rows == 1:
            torch.testing.assert_close(held(state), new, rtol=1e-5, atol=1e-7)
            continue
        scale = new.view(-1, 256).abs().amax(1)
        torch.testing.assert_close(state["scale"].double(), scale, rtol=1e-5, atol=1e-9)
        apart = (new.view(-1, 256) / scale[:, None])[..., None] - state["qmap"].double()
        error = (held(state) - new).view(-1, 256).abs() / scale[:, None]
        assert (error <= apart.abs().amin(-1) + 1e-5).all()


def test_the_table_is_torchaos() -> None:
    made = pytest.importorskip("torchao.optim.quant_utils").create_dynamic_map(signed=True)
    p = parameter(16, 256)
    optimizer = Lion8bit([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["qmap"], torch.tensor(made), rtol=1e-6, atol=1e-9)


def test_a_byte_per_parameter_and_a_state_dict_that_says_all() -> None:
    p, twin = (parameter(64, 256, dtype=torch.bfloat16) for _ in range(2))
    optimizer, other = (Lion8bit([q], lr=1e-2) for q in (p, twin))
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.dtype == torch.bfloat16
    assert sum(t.nbytes for t in optimizer.state[p].values()) == 64 * 256 + 4 * 64 + 1024
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    twin.data.copy_(p)
    for q, each in ((p, optimizer), (twin, other)):
        q.grad = torch.full_like(q, -0.5)
        each.step()
    assert torch.equal(p, twin)
    for key, value in optimizer.state[p].items():
        assert torch.equal(value, other.state[twin][key]) and value.dtype == other.state[twin][key].dtype


def test_bad_settings_are_refused() -> None:
    for bad in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}):
        with pytest.raises(UsageError, match="Lion8bit takes"):
            Lion8bit([parameter(4)], **bad)  # type: ignore[arg-type]
