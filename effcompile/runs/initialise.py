"""The initialisations that a run can begin with.

Each changes the model in place and says which parameters are new.

fixup       Zhang et al. 2019 (arXiv 1901.09321): no norms in the layers; the linears of a branch scaled by
            L^(−1/(2m−2)) with m = 2, its end zero.
t-fixup     Huang et al. 2020 (ICML, "Improving transformer optimization through better initialization"): no
            norms; Xavier, then the ends of the branches and the value and feed-forward linears scaled by
            0.67 · N^(−1/4); embeddings of standard deviation d^(−1/2) and scaled alike.
rezero      Bachlechner et al. 2020 (arXiv 2003.04887): no norms; one scale, of zero, for a layer's branches.
skipinit    De & Smith 2020 (arXiv 2002.10444): no norms; a scale of zero at the end of each branch.
layerscale  Touvron et al. 2021 (arXiv 2103.17239): norms stay; a scale for each channel at the end of each
            branch: 0.1 to 18 layers, 1e-5 to 24, else 1e-6.
mup         Yang et al. 2022 (arXiv 2203.03466, table 8), for Adam, from a base width of 256: hidden matrices
            of variance 1 / fan-in, and of learning rates divided by width / 256; the head of variance
            1 / fan-in², as a multiplier of 1 / width does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from effcompile.core.errors import UsageError
from effcompile.runs.branches import branch_ends, is_linear, is_norm
from effcompile.runs.carry import Origin, Origins

Recipe = Callable[[nn.Module, str], Origins]
_VALUES = ("v_proj", "value", "fc1", "up_proj", "gate_proj", "c_fc", "linear1", "intermediate.dense", "up")


class _Scaled(nn.Module):
    """A linear whose output is multiplied with a learnable `gain`: mixed into the linear's own class, so that
    all names stay.
    """

    gain: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x) * self.gain
        return found


def _scaled(linear: nn.Module, gain: nn.Parameter) -> None:
    kind = type(linear)
    linear.register_parameter("gain", gain)
    linear.__class__ = type(f"Scaled{kind.__name__}", (_Scaled, kind), {"__module__": kind.__module__})


def _stack(model: nn.Module, layers: str) -> list[nn.Module]:
    return list(model.get_submodule(layers).children())


def _without_norms(model: nn.Module, layers: str) -> None:
    """Norms of the layers become identities."""
    for layer in _stack(model, layers):
        for name, module in list(layer.named_modules()):
            if is_norm(module):
                owner, _, attribute = name.rpartition(".")
                setattr(layer.get_submodule(owner), attribute, nn.Identity())


def _with_gains(
    model: nn.Module, layers: str, make: Callable[[nn.Module], nn.Parameter], *, shared: bool = False
) -> Origins:
    origins: dict[str, Origin] = {}
    names = {id(module): name for name, module in model.named_modules()}
    for layer in _stack(model, layers):
        one: nn.Parameter | None = None
        for end in branch_ends(layer):
            gain = one if shared and one is not None else make(end)
            one = one if one is not None else gain
            _scaled(end, gain)
            origins[f"{names[id(end)]}.gain"] = Origin(source=f"{names[id(end)]}.weight")
    return origins


def _zero(linear: nn.Module) -> nn.Parameter:
    return nn.Parameter(torch.zeros((), device=_weight(linear).device, dtype=_weight(linear).dtype))


def _rezero(model: nn.Module, layers: str) -> Origins:
    _without_norms(model, layers)
    return _with_gains(model, layers, _zero, shared=True)


def _skipinit(model: nn.Module, layers: str) -> Origins:
    _without_norms(model, layers)
    return _with_gains(model, layers, _zero)


def _layerscale(model: nn.Module, layers: str) -> Origins:
    depth = len(_stack(model, layers))
    start = 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6

    def gain(linear: nn.Module) -> nn.Parameter:
        weight = _weight(linear)
        width = weight.shape[0] if isinstance(linear, nn.Linear) else weight.shape[1]
        return nn.Parameter(torch.full((width,), start, device=weight.device, dtype=weight.dtype))

    return _with_gains(model, layers, gain)


@torch.no_grad()
def _fixup(model: nn.Module, layers: str) -> Origins:
    _without_norms(model, layers)
    stack = _stack(model, layers)
    branches = sum(len(branch_ends(layer)) for layer in stack)
    for layer in stack:
        ends = branch_ends(layer)
        for linear in filter(is_linear, layer.modules()):
            if linear in ends:
                _weight(linear).zero_()
            else:
                _weight(linear).mul_(branches**-0.5)
            _zero_bias(linear)
    return {}


@torch.no_grad()
def _t_fixup(model: nn.Module, layers: str) -> Origins:
    _without_norms(model, layers)
    stack = _stack(model, layers)
    scale = 0.67 * len(stack) ** -0.25
    for layer in stack:
        ends = branch_ends(layer)
        for name, linear in layer.named_modules():
            if is_linear(linear):
                nn.init.xavier_uniform_(_weight(linear))
                _zero_bias(linear)
                if linear in ends or name.endswith(_VALUES):
                    _weight(linear).mul_(scale)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(0, module.embedding_dim**-0.5).mul_(scale)
    return {}


#: The width at which the user's learning rate was found.
BASE_WIDTH = 256


@torch.no_grad()
def _mup(model: nn.Module, layers: str) -> Origins:
    inside = {id(module) for layer in _stack(model, layers) for module in layer.modules()}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if not is_linear(module) or id(_weight(module)) in embeddings:
            continue
        weight = _weight(module)
        fan_in = weight.shape[1] if isinstance(module, nn.Linear) else weight.shape[0]
        weight.normal_(0, fan_in**-0.5 if id(module) in inside else math.sqrt(BASE_WIDTH) / fan_in)
        _zero_bias(module)
    return {}


def mup_rates(model: nn.Module, layers: str) -> dict[str, float]:
    """Qualified name of a hidden matrix → what its learning rate is multiplied with under Adam."""
    found = {}
    for name, module in model.get_submodule(layers).named_modules():
        if is_linear(module):
            weight = _weight(module)
            fan_in = weight.shape[1] if isinstance(module, nn.Linear) else weight.shape[0]
            found[f"{layers}.{name}.weight"] = BASE_WIDTH / fan_in
    return found


def _weight(linear: nn.Module) -> nn.Parameter:
    weight: Any = linear.weight
    if not isinstance(weight, nn.Parameter):
        raise UsageError(
            f"A {type(linear).__name__} has no plain weight: `init` begins with untrained, unquantised "
            "models."
        )
    return weight


def _zero_bias(linear: nn.Module) -> None:
    bias: Any = linear.bias
    if bias is not None:
        bias.zero_()


RECIPES: Mapping[str, Recipe] = {
    "fixup": _fixup, "t-fixup": _t_fixup, "rezero": _rezero, "skipinit": _skipinit, "layerscale": _layerscale,
    "mup": _mup,
}  # fmt: skip
