"""Which nodes draw from the random generator."""

import pytest
import torch
from torch import fx

from effcompile.core.torch_compat_aot import draws

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "more", "drawn"),
    [
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (), False),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (0.0, True), False),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (0.1,), True),
        (aten.native_dropout.default, (0.0, True), True),  # its mask is drawn whatever the share
        (aten.rand_like.default, (), True),
        (aten.mm.default, (), False),
    ],
)
def test_an_attention_that_drops_nothing_draws_nothing(
    target: torch._ops.OpOverload, more: tuple[object, ...], drawn: bool
) -> None:
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in "qkv"]
    count = sum(
        str(argument.type) == "Tensor" and not argument.has_default_value()
        for argument in target._schema.arguments
    )
    assert draws(graph.call_function(target, (*operands[:count], *more))) is drawn
    assert not draws(operands[0])
