"""LoRA and its like are merged before inference: the base model's operators, the adapted model's results."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from effcompile.capture import capture, verify_capture

peft = pytest.importorskip("peft")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def adapted(config: Any) -> nn.Module:
    torch.manual_seed(0)
    model = peft.get_peft_model(Net(), config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora" in name:
            nn.init.normal_(parameter, std=0.3)  # peft begins with a delta of zero
    return model.eval()


def operators(model: nn.Module, x: torch.Tensor) -> Counter[str]:
    graph = capture(model, (x,)).graph
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"lora_dropout": 0.3}], ids=["lora", "dora", "dropout"]
)
def test_the_captured_graph_has_no_operators_of_the_adapters(options: dict[str, Any]) -> None:
    model, x = adapted(peft.LoraConfig(r=2, target_modules=["up", "down"], **options)), torch.randn(3, 8)
    before, wanted = {name: value.clone() for name, value in model.state_dict().items()}, model(x)
    program = capture(model, (x,))
    assert any("adapters merged into the weights of 2 layers" in str(mend) for mend in program.mends)
    assert operators(model, x) == operators(Net().eval(), x)
    torch.testing.assert_close(program.module(x), wanted, rtol=1e-6, atol=1e-6)
    assert all(check.passed for check in verify_capture(program, model))
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    ) and torch.equal(model(x), wanted)


def test_disabled_adapters_stay_out() -> None:
    model, x = adapted(peft.LoraConfig(r=2, target_modules=["up"])), torch.randn(3, 8)
    with model.disable_adapter():
        wanted = model(x)
        program = capture(model, (x,))
        torch.testing.assert_close(program.module(x), wanted, rtol=1e-6, atol=1e-6)
