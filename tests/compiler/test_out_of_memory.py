"""Memory that runs out in the tool itself is an error in words where the system lets us know."""

import subprocess
import sys

import pytest
import torch

import effcompile
from effcompile.core.errors import LoweringError, OutOfMemoryError, UsageError
from effcompile.machine import memory
from effcompile.machine.room import planning


def test_an_allocation_that_the_system_refuses_is_told_in_words() -> None:
    with (
        pytest.raises(OutOfMemoryError, match="Memory ran out while the model was planned or verified"),
        planning(),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(OutOfMemoryError, match="Raise the limit"), planning():
        raise MemoryError


@pytest.mark.parametrize("error", [RuntimeError("another"), OSError(2, "no file"), UsageError("wrong")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error).replace("[", r"\[").replace("]", r"\]")), planning():
        raise error


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="an address space's limit")
def test_planning_under_a_limit_of_the_address_space_ends_in_words() -> None:
    script = """
import resource, torch
from torch import nn
import effcompile
from effcompile.core.errors import EffcompileError
from effcompile.machine import memory

class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(1024, 8192), nn.Linear(8192, 1024)
    def forward(self, x):
        return self.b(torch.tanh(self.a(x))).square().mean()

model, x = Big().train(), torch.randn(4096, 1024)
limit = memory._of_process("vms") + (150 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    effcompile.optimize(model, inputs=(x,), mode="training")
except EffcompileError as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "OutOfMemoryError", done.stderr[-2000:]


def test_a_backend_that_copies_more_weights_than_memory_holds_gives_way_to_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)).eval(),
        torch.randn(4, 512),
    )
    weights = sum(p.numel() * 4 for p in model.parameters())
    monkeypatch.setattr(memory, "free_bytes", lambda device="cpu": 2 * weights)
    with pytest.raises(
        LoweringError, match=r"Lowering to onnxruntime needs .* MiB, and .* are free: .*--backend torch-eager"
    ):
        effcompile.optimize(model, inputs=(x,), backend="onnxruntime")
    with torch.no_grad():
        assert torch.allclose(
            effcompile.optimize(model, inputs=(x,), backend="torch-eager")(x), model(x), atol=1e-5
        )
