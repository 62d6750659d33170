"""The compiled update on states of 8 bits beside torchao's own, run as it is: parameters, codes
and scales.
"""

import pytest
import torch
from torch import nn
from torchao.optim import Adam8bit, AdamW8bit

from effcompile.ops import states8
from effcompile.ops.states8 import compiled_adam8, step8

needs_compiler = pytest.mark.skipif(compiled_adam8() is None, reason="there is no C++ compiler")


def trained(
    kind: type, dtype: torch.dtype, ours: bool, count: int, steps: int = 3
) -> tuple[nn.Parameter, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    p = nn.Parameter(torch.randn(count, generator=generator).to(dtype))
    optimizer = kind([p], lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
    for _ in range(steps):
        p.grad = (torch.randn(count, generator=generator) ** 3).to(dtype)
        if ours:
            assert step8(optimizer)
        else:
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
    return p, optimizer.state[p]


@needs_compiler
@pytest.mark.parametrize("kind", [Adam8bit, AdamW8bit])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_it_leaves_what_torchaos_leaves(kind: type, dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (p, state), (q, wanted) = (trained(kind, dtype, ours, 256 * 37) for ours in (True, False))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(p, q, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert float(state["step"]) == float(wanted["step"]) == 3
    for name in ("exp_avg", "exp_avg_sq"):
        apart = (state[name].codes.int() - wanted[name].codes.int()).abs()
        assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 1e-3  # at a tie
        torch.testing.assert_close(state[name].scale, wanted[name].scale, rtol=1e-5, atol=0)


@needs_compiler
def test_what_it_does_not_take_is_left_to_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, dtype in ((256, torch.float32), (256 * 16 + 1, torch.float32), (256 * 16, torch.float64)):
        p = nn.Parameter(torch.ones(count, dtype=dtype))
        p.grad = torch.ones_like(p)
        assert not step8(AdamW8bit([p]))
    p = nn.Parameter(torch.ones(256 * 16))
    p.grad = torch.ones_like(p)
    monkeypatch.setattr(states8, "compiled_adam8", lambda: None)
    assert not step8(AdamW8bit([p]))


@needs_compiler
def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = states8.CompiledAdam8.__call__

    def wrong(self, p, *args):  # type: ignore[no-untyped-def]
        real(self, p, *args)
        p.mul_(1.01)

    monkeypatch.setattr(states8.CompiledAdam8, "__call__", wrong)
    assert compiled_adam8.__wrapped__() is None
