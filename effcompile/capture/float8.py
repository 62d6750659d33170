"""Linears in float8 by torchao, put into a model for as long as its step is captured: tensorwise dynamic
scales, bf16 results.

Micikevicius et al. 2022 (arXiv 2209.05433): e4m3 in the forward, e5m2 for gradients. Weights stay the model's
own parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from effcompile.core.errors import CaptureError
from effcompile.core.reasons import Unsupported

#: The first compute capability with float8 products: Ada (Hopper is 9.0).
CAPABILITY = (8, 9)
#: AMD's architectures with float8 products: MI300, MI350.
_AMD = ("gfx94", "gfx95")
#: torch._scaled_mm takes sizes that are multiples of this.
_MULTIPLE = 16


def unavailable(device: str) -> Unsupported | None:
    """Why there are no float8 products on this machine; None where there are."""
    if device != "cuda":
        return Unsupported.of(
            "float8 products need a GPU of compute capability {}.{} or above; the model is on {}",
            CAPABILITY[0],
            CAPABILITY[1],
            device,
        )
    amd = torch.cuda.get_device_properties().gcnArchName.partition(":")[0] if torch.version.hip else None
    if amd is not None and not amd.startswith(_AMD):
        return Unsupported.of(
            "float8 products need an AMD GPU of {} or {}; this one is {}", f"{_AMD[0]}…", f"{_AMD[1]}…", amd
        )
    found = torch.cuda.get_device_capability()
    if amd is None and found < CAPABILITY:
        return Unsupported.of(
            "float8 products need compute capability {}.{} or above; this GPU has {}.{}",
            CAPABILITY[0],
            CAPABILITY[1],
            found[0],
            found[1],
        )
    return None if find_spec("torchao") else Unsupported("it needs torchao: pip install torchao")


@contextlib.contextmanager
def float8_linears(model: nn.Module, *, elsewhere: bool = False) -> Iterator[None]:
    """The model with its linears in float8, where their sizes allow it, put back at the end.

    Without such a GPU torchao emulates their products, in the time of fp32: for tests of what is captured.
    `elsewhere`: the step is for another machine, and only traced here. Where the model itself is called, to
    see what it returns, its linears are those of its own dtype: a CPU without such products takes a thousand
    times as long for them, or has none.

    Raises:
        CaptureError: no linear can be.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    own = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _fits(child)
    ]
    if not own:
        raise CaptureError(
            f"no linear of {type(model).__name__} has sizes that are multiples of {_MULTIPLE}, as float8 "
            "products need"
        )
    config = Float8LinearConfig(
        emulate=not elsewhere and unavailable(next(model.parameters()).device.type) is not None
    )
    try:
        convert_to_float8_training(model, module_filter_fn=lambda module, _: _fits(module), config=config)
        if elsewhere:
            for parent, name, _ in own:
                _only_traced(getattr(parent, name))
        yield
    finally:
        for parent, name, child in own:
            setattr(parent, name, child)


def _only_traced(linear: nn.Module) -> None:
    in_float8, weight, bias = linear.forward, linear.get_parameter("weight"), linear.bias
    assert bias is None or isinstance(bias, Tensor)

    def forward(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            traced: Tensor = in_float8(x)
            return traced
        return F.linear(x, weight, bias)

    linear.forward = forward


def _fits(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.in_features % _MULTIPLE == 0
        and module.out_features % _MULTIPLE == 0
    )
